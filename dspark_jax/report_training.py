"""What the verbs of training print."""

from rich.table import Table

from dspark_jax.audit import Audit
from dspark_jax.report import out
from dspark_jax.train.budget import Budget


def print_audit(found: Audit, samples: int) -> None:
    """Accuracies by position of both paths, and whether they agree."""
    table = Table(
        title=f"{samples} samples, {found.anchors} anchors: share of tokens drafted right"
    )
    table.add_column("by position")
    for k in range(len(found.counted)):
        table.add_column(str(k + 1), justify="right")
    rows = {
        "training path": found.trained,
        "decoding path": found.decoded,
        "same token on both": found.same,
    }
    for name, hits in rows.items():
        table.add_row(name, *(f"{x:.3f}" for x in found.shares(hits)))
    table.add_row("", *("agree" if agrees else "DIFFER" for agrees in found.agrees))
    out.print(table)
    share = found.expected / max(found.anchors, 1)
    out.print(
        f"{share:.1%} of the samples' tokens are the target's own argmax (all of them where it "
        f"answered greedily)\n{'both paths agree' if found.passed else 'the paths DIFFER'}",
        highlight=False,
    )


def print_budget(budget: Budget) -> None:
    """What a run will need."""
    memory, b = budget.memory, budget
    table = Table(show_header=False)
    kept = (
        f"kept on disk, of {_bytes(b.max_cache)} allowed" if b.max_cache else "computed in the step"
    )
    rows = {
        "trainable parameters": f"{b.trainable:,}",
        "frozen parameters": f"{b.frozen:,}",
        "memory per device": _bytes(memory.total),
        "  parameters": _bytes(memory.parameters),
        "  optimizer": _bytes(memory.optimizer),
        "  target": _bytes(memory.target),
        "  batch": _bytes(memory.batch),
        "  activations, gradients": f"{_bytes(memory.temporary)} (the step compiled for "
        f"{memory.backend}, at the longest batch)",
        "conversations": f"{b.conversations:,} to train on, {b.held_out:,} held out",
        "steps": f"{b.steps:,}",
        "epochs": f"{b.epochs:.2f}",
        "a step": f"{b.tokens_per_step:,.0f} tokens, {b.supervised_per_step:,.0f} of them the "
        f"target's, {b.blocks_per_step:,} blocks",
        "in all": f"{b.tokens:,.0f} tokens",
        "checkpoints on disk": _bytes(b.checkpoints),
        "exported drafter": _bytes(b.drafter),
        "target features": f"{_bytes(b.cache)}: {kept}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    out.print(table)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
