"""What the command line prints: answers, comparisons, tables."""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from dspark_jax.bench import RoundCosts, WalkCosts
from dspark_jax.bench_heads import Result
from dspark_jax.check import Finding
from dspark_jax.decode.answer import Answer
from dspark_jax.decode.engine import Generation
from dspark_jax.decode.propose import Candidates
from dspark_jax.evaluate import Summary
from dspark_jax.goldens import Difference
from dspark_jax.nn.drafter import Drafter
from dspark_jax.replay import Replay
from dspark_jax.weights.card import Card

_WIDE = None if sys.stdout.isatty() else 200  # a file has no width that tables must be cut to
out, err = Console(soft_wrap=True, width=_WIDE), Console(stderr=True)


class Lines(logging.Handler):
    """Log records as plain lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one."""
        err.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def print_error(error: Exception) -> None:
    """One line on standard error."""
    err.print("[bold red]error:[/]", end=" ")
    err.print(str(error), markup=False, highlight=False)


def print_heading(index: int, turn: int, *labels: str) -> None:
    """A rule above an answer."""
    out.rule(" ".join([f"prompt {index}, turn {turn}", *labels]))


def print_status(generation: Generation) -> None:
    """Tokens, rounds, accepted length and finish reason, on standard error."""
    length = generation.accepted_length
    err.print(
        f"({len(generation.tokens)} tokens, {generation.rounds} rounds, accepted length "
        f"{'-' if length is None else f'{length:.2f}'}, finish: {generation.finish_reason})",
        style="dim",
    )


def print_answer(answer: Answer, is_json: bool, has_heading: bool, label: str | None) -> None:
    """One answer, as text or as a JSON object."""
    if is_json:
        labels = {} if label is None else {"decoding": label}
        print(json.dumps({**answer.record(), **labels}, ensure_ascii=False), flush=True)
        return
    if has_heading or label:
        print_heading(answer.index, answer.turn, *filter(None, [label]))
    out.print(answer.text, markup=False, highlight=False)
    print_status(answer.generation)


def print_comparison(
    summaries: dict[str, Summary], costs: RoundCosts, batch_size: int, is_json: bool
) -> None:
    """Speculative against plain decoding, and the accepted length at which they break even."""
    table = Table(title=f"batch {batch_size}, wall time with prefill, without compilation")
    for column in ("decoding", "tokens", "tokens/s", "accepted length", "target calls/token"):
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary.tokens),
            f"{summary.tokens_per_second:.1f}",
            _number(summary.accepted_length),
            _number(summary.calls_per_token),
        )
    console = err if is_json else out
    console.print(table)
    fast, slow = summaries["speculative"], summaries["plain"]
    ratio = fast.tokens_per_second / slow.tokens_per_second if slow.tokens_per_second else 0.0
    console.print(
        f"speed-up {ratio:.2f}x; a greedy round costs draft {1e3 * costs.draft:.0f} ms + verify "
        f"{1e3 * costs.verify:.0f} ms, a single step {1e3 * costs.single:.0f} ms: break-even at "
        f"accepted length {costs.break_even:.2f} (prefill apart)",
        highlight=False,
    )


def print_summaries(rows: Sequence[tuple[str, Summary]], is_json: bool) -> None:
    """Accepted length and acceptance by position of prompt sets."""
    if is_json:
        for name, summary in rows:
            print(json.dumps({"prompts": name, **summary.record()}), flush=True)
        return
    table = Table(
        title="accepted length = committed tokens / rounds, the bonus counted (95% over prompts)"
    )
    for column in ("prompts", "answers", "tokens", "rounds", "accepted length", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("accepted at position k, of rounds that reached it")
    for name, s in rows:
        by_position = " ".join(f"{x:.2f}" for x in s.acceptance)
        counts = (str(s.answers), str(s.tokens), str(s.rounds))
        speed = f"{s.tokens_per_second:.1f}"
        table.add_row(name, *counts, _accepted_length(s), speed, by_position)
    out.print(table)


def _accepted_length(summary: Summary) -> str:
    """With its interval, where there is one."""
    interval = " ({:.2f}..{:.2f})".format(*summary.interval) if summary.interval else ""
    return _number(summary.accepted_length) + interval


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def print_findings(findings: Sequence[Finding]) -> None:
    """What was stated, how far it is from true, and whether that is near enough."""
    table = Table(title="difference = largest, over the largest value; 0 = bit for bit")
    table.add_column("statement")
    for column in ("difference", "limit", ""):
        table.add_column(column, justify="right")
    for f in findings:
        found = "-" if f.difference is None else f"{f.difference:.1e}"
        mark = "n/a" if f.difference is None else "pass" if f.passed else "FAIL"
        table.add_row(f.says, found, f"{f.limit:.0e}", mark)
    out.print(table)


def print_differences(folder: str, differences: Sequence[Difference]) -> None:
    """Largest error of each tensor of a folder of reference outputs."""
    table = Table(title=folder)
    table.add_column("tensor")
    for column in ("largest error", "limit", ""):
        table.add_column(column, justify="right")
    for d in differences:
        mark = "pass" if d.passed else "FAIL"
        table.add_row(d.name, f"{d.error:.1e}", f"{d.limit:.1e}", mark)
    out.print(table)


def print_walks(rows: Sequence[WalkCosts], is_json: bool) -> None:
    """Milliseconds of the full walk, and how many times faster each candidate walk is."""
    if is_json:
        for row in rows:
            ratios = {name: round(row.ratio(name), 2) for name in row.seconds}
            print(json.dumps({**dataclasses.asdict(row), "times_faster": ratios}))
        return
    names = [name for name in rows[0].seconds if name != "full"]
    table = Table(title="one block, base logits to tokens; times faster than the full walk")
    for column in ("V", "K", "B", "full, ms", *names):
        table.add_column(column, justify="right")
    for row in rows:
        shape = (str(row.vocab_size), str(row.block_size), str(row.batch))
        ratios = (f"{row.ratio(name):.1f}x" for name in names)
        table.add_row(*shape, f"{1e3 * row.seconds['full']:.2f}", *ratios)
    out.print(table)


def print_heads(results: Sequence[Result], is_json: bool) -> None:
    """Accepted lengths of drafters trained alike."""
    if is_json:
        for result in results:
            print(json.dumps(result.record()), flush=True)
        return
    table = Table(
        title="greedy, the same prompts; accepted length = committed tokens / rounds, the bonus "
        "counted (95% over prompts)"
    )
    for column in ("run", "steps", "parameters", "walked over", "tokens", "rounds"):
        table.add_column(column, justify="right")
    table.add_column("accepted length", justify="right")
    table.add_column("accepted at position k, of rounds that reached it")
    for r in results:
        s, walked = r.summary, f"{r.candidates} candidates" if r.candidates else "vocabulary"
        counts = (r.name, str(r.steps), f"{r.parameters:,}", walked, str(s.tokens), str(s.rounds))
        by_position = " ".join(f"{x:.2f}" for x in s.acceptance)
        table.add_row(*counts, _accepted_length(s), by_position)
    out.print(table)


def print_losses(seconds: dict[str, float], is_json: bool) -> None:
    """Milliseconds of each way to a loss and its gradient, and to all logits at once."""
    ratios = {name: taken / seconds["whole"] for name, taken in seconds.items()}
    if is_json:
        print(json.dumps({"seconds": seconds, "ratio": ratios}))
        return
    table = Table(title="loss and gradient; ratio to all logits at once")
    for column in ("logits", "ms", "ratio"):
        table.add_column(column, justify="right")
    for name, taken in seconds.items():
        table.add_row(name, f"{1e3 * taken:.0f}", f"{ratios[name]:.2f}x")
    out.print(table)


def print_candidates(rows: Sequence[tuple[Candidates, Replay]], is_json: bool) -> None:
    """Accepted length and recall by number of candidates, beside the first full walk's."""
    if is_json:
        for cut, r in rows:
            counts = {"candidates": cut.count, "widen": cut.widen, "rounds": r.rounds}
            ratios = {"accepted_length": r.accepted_length, "recall": r.recall}
            print(json.dumps({**counts, **ratios}))
        return
    full = next((r.accepted_length for cut, r in rows if not cut.count), None)
    table = Table(title="greedy, paired: one answer, drafts of every cut behind each of its tokens")
    for column in ("candidates", "accepted length", "to the full walk"):
        table.add_column(column, justify="right")
    table.add_column("the target's token is a candidate, by position")
    for cut, r in rows:
        name = "full" if not cut.count else f"{cut.count} + {cut.widen}" if cut.widen else None
        ratio = "-" if full is None else f"{r.accepted_length / full - 1:+.1%}"
        recall = " ".join(f"{x:.3f}" for x in r.recall)
        table.add_row(name or str(cut.count), f"{r.accepted_length:.3f}", ratio, recall)
    out.print(table)


def print_drafter(kind: str, drafter: Drafter, card: Card | None) -> None:
    """What a drafter is, field by field, and what its card says."""
    c, g = drafter.config, drafter.config.geometry
    layout = f"{c.num_inputs} rows, anchor and masks; " + (
        "the anchor's row predicts too"
        if c.predict_from_anchor
        else "the anchor's row does not predict"
    )
    sizes = [value.size for value in jax.tree.leaves(nnx.state(drafter))]
    reduced = f"{c.draft_vocab_size} of {c.vocab_size}" if c.draft_vocab_size else c.vocab_size
    rows = {
        "format": kind,
        "layout": layout,
        "drafted tokens a round": c.block_size,
        "backbone": f"{c.num_layers} layers, width {g.width}, MLP {g.mlp_width}, "
        f"{g.heads} query and {g.kv_heads} key heads of {g.head_dim}",
        "rotary": g.rotary,
        "windows": c.windows or "full attention",
        "causal layers": sum(c.causal),
        "convolutions": c.convolution or "none",
        "taps": list(c.target_layer_ids),
        "mask token": c.mask_token,
        "head": c.head or "none (DFlash)",
        "candidates": c.candidates or "the vocabulary",
        "confidence head": c.confidence or "none",
        "scales": f"embedding {c.embedding_scale or 1}, base logits {c.logit_multiplier}, "
        f"capped at {c.logit_softcap or 'nothing'}",
        "vocabulary": reduced,
        "parameters": f"{sum(sizes):,}",
        **_card_rows(card),
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    out.print(table)


def print_tensors(tensors: Mapping[str, jax.Array]) -> None:
    """Names, shapes and dtypes of a checkpoint's tensors, as they are stored."""
    table = Table("tensor", "shape", "dtype")
    for name, tensor in sorted(tensors.items()):
        table.add_row(name, " x ".join(map(str, tensor.shape)), tensor.dtype.name)
    out.print(table)


def _card_rows(card: Card | None) -> dict[str, str]:
    if card is None:
        return {"card": "no metadata: target, mode and expected accepted length are not known"}
    length = "not measured"
    if card.accepted_length is not None:
        length = f"{card.accepted_length} over {card.measured_on or 'unnamed prompts'}"
        length += f" ({card.counted})"
    if card.interval is not None:
        length += ", 95%: {:.2f}..{:.2f}".format(*card.interval)
    by_position = " ".join(f"{x:.2f}" for x in card.acceptance or ())
    return {
        "target": card.target,
        "trained mode": str(card.mode or "not known"),
        "expected accepted length": length,
        "accepted at position k": by_position or "not said",
        "data": card.data or "not said",
        "budget": card.budget or "not said",
    }
