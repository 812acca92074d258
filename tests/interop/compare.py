"""Our exports in the packages of others, and theirs here: run by `run.sh`, never by pytest."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import theirs
from flax import nnx

from dspark_jax import goldens
from dspark_jax.config import (
    Confidence,
    Convolution,
    DrafterConfig,
    Geometry,
    Markov,
    Recurrent,
    Rotary,
)
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.train.losses import draft_logits
from dspark_jax.weights import formats, targets

PLAIN = DrafterConfig(
    geometry=Geometry(
        width=64,
        mlp_width=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rotary=Rotary(theta=1e6),
        qk_norm=True,
    ),
    vocab_size=97,
    num_layers=2,
    block_size=5,
    target_layer_ids=(1, 3, 6),
    mask_token=96,
    predict_from_anchor=False,
)
SELECTOR = {
    "head": Markov(rank=10, gate="linear"),
    "convolution": Convolution(group_size=16),
    "candidates": 8,
}
ANCHORED = {"predict_from_anchor": True, "confidence": Confidence()}
ZLAB = {
    "dflash": {},
    "dflash, sliding and causal": {"windows": (6, None), "causal": (True, True)},
    "dflash, scaled and capped": {
        "logit_multiplier": 0.5,
        "logit_softcap": 3.0,
        "embedding_scale": 2.0,
    },
    "dflash2": SELECTOR,
    "dflash2, sliding": {**SELECTOR, "windows": (6, 6)},
}
SPECULATORS = {
    "dflash": {},
    "dflash, reduced vocabulary": {"draft_vocab_size": 40},
    "dspark vanilla": {**ANCHORED, "head": Markov(rank=10)},
    "dspark gated": {**ANCHORED, "head": Markov(rank=10, gate="gated")},
    "dspark rnn": {**ANCHORED, "head": Recurrent(rank=10)},
    "dspark, no head": {"predict_from_anchor": True},
    "dspark, not from the anchor": {"head": Markov(rank=10)},
    "dspark, reduced vocabulary": {**ANCHORED, "head": Markov(rank=10), "draft_vocab_size": 40},
    "dflash2": SELECTOR,
}
THEIR_ZLAB = {
    "dflash": ({}, {}),
    "dflash, sliding": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True},
        {},
    ),
    "dflash2": (
        {},
        {"selector_rank": 10, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 16},
    ),
}
THEIR_SPECULATORS = {
    "dflash": ("dflash", {}),
    "dspark vanilla": ("dspark", {"markov_rank": 10}),
    "dspark gated": ("dspark", {"markov_rank": 10, "markov_head_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_rank": 10, "markov_head_type": "rnn"}),
    "dspark, reduced vocabulary": ("dspark", {"markov_rank": 10, "draft_vocab_size": 40}),
    "dflash2": ("dflash2", {"selector_rank": 10, "selector_top_k": 8}),
}


def random_drafter(change: dict) -> Drafter:
    """Weights large enough for laws far from uniform."""
    config = dataclasses.replace(PLAIN, **change)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(3)

    def draw(x):
        if x.dtype == jnp.int32:
            return jnp.sort(jnp.asarray(draws.permutation(97)[: x.size], jnp.int32))
        noise = draws.normal(size=x.shape)
        return jnp.asarray(noise / 6 if len(x.shape) > 1 else 1 + noise / 8, x.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def ours(drafter: Drafter, lent: Lent, features, tokens, anchors) -> dict[str, np.ndarray]:
    """Hidden states, logits along given tokens, confidence, greedy drafts."""
    where, tokens = jnp.asarray(anchors)[None], jnp.asarray(tokens)
    context = drafter.backbone.context(features, jnp.arange(features.shape[1])[None])
    valid = jnp.ones(where.shape, bool)
    hidden = drafter.hidden(lent, tokens[where], where, context, where, valid)[0]
    ahead = where[0, :, None] + jnp.arange(drafter.config.block_size)
    prevs = tokens[jnp.minimum(ahead, len(tokens) - 1)]
    base, logits = draft_logits(drafter.heads, lent, hidden, prevs)
    keys = jax.random.split(jax.random.key(0), hidden.shape[:2])
    cut = Candidates(count=drafter.config.candidates)
    given = drafter.heads, lent, prevs[:, 0], hidden, base, rule(None).choose, keys, cut
    out = {"hidden": hidden, "base": base, "draft": logits, "tokens": propose(*given).tokens}
    if drafter.config.confidence is not None:
        out["confidence"] = drafter.heads.confidence(prevs, hidden)
    return {name: np.asarray(value) for name, value in out.items()}


class Comparison:
    """A target, some features, and what came of each comparison."""

    def __init__(self, folder: Path):
        self.folder, self.target_folder, self.failed = folder, folder / "target", 0
        self.target = theirs.target(self.target_folder)
        self.config = targets.load(self.target_folder).config
        self.lent = Lent(
            embedding=jnp.asarray(self.target.get_input_embeddings().weight.detach().numpy()),
            head=jnp.asarray(self.target.lm_head.weight.detach().numpy()),
        )
        draws = np.random.default_rng(4)
        self.features = draws.normal(size=(1, 24, 192)).astype(np.float32)
        self.tokens = draws.integers(96, size=24)

    def say(self, name: str, found: dict, expected: dict) -> None:
        """Prints the largest error of each output."""
        rows = []
        for key, value in expected.items():
            check = goldens.same if key == "tokens" else goldens.close
            rows.append(check(key, found[key], value))
        self.failed += not all(row.passed for row in rows)
        errors = "  ".join(f"{row.name} {row.error:.1e}" for row in rows)
        print(f"{'pass' if all(row.passed for row in rows) else 'FAIL'}  {name:<52} {errors}")

    def zlab(self, name: str, drafter: Drafter, model) -> None:
        """One round behind all features."""
        length, anchor = self.features.shape[1], int(self.tokens[-1])
        tokens = np.append(self.tokens, anchor)
        found = ours(drafter, self.lent, self.features, tokens, [length])
        self.say(name, found, theirs.zlab(model, self.target, self.features, anchor))

    def speculators(self, name: str, drafter: Drafter, model) -> None:
        """Three blocks behind given anchors."""
        anchors = [3, 9, 15]
        found = ours(drafter, self.lent, self.features, self.tokens, anchors)
        expected = theirs.speculator(model, self.features, self.tokens, anchors)
        if drafter.config.candidates:
            del expected["draft"]
        self.say(name, found, expected)

    def write(self, kind: formats.Format, name: str, drafter: Drafter) -> Path:
        """Our export."""
        folder = self.folder / f"ours {kind} {name}"
        given = drafter, self.config, self.lent, jnp.float32, "card", str(self.target_folder)
        formats.write(folder, kind, *given)
        return folder


def main() -> None:
    """All of it; exits with 1 if anything differs."""
    jax.config.update("jax_default_matmul_precision", "highest")
    with tempfile.TemporaryDirectory() as folder:
        run = Comparison(Path(folder))
        for name, change in ZLAB.items():
            drafter, is_second = random_drafter(change), "head" in change
            path = run.write("dflash2" if is_second else "dflash", name, drafter)
            run.zlab(f"ours in dflash: {name}", drafter, theirs.open_zlab(path, is_second))
        nested = {"target_layer_ids": [1, 3, 6], "mask_token_id": 96, "block_size": 6}
        for name, (fields, more) in THEIR_ZLAB.items():
            path = run.folder / f"zlab {name}"
            model = theirs.random_zlab(path, fields, nested | more)
            drafter, _ = formats.read(path, formats.format_of(path))
            run.zlab(f"dflash's here: {name}", drafter, model)
        for name, change in SPECULATORS.items():
            drafter = random_drafter(change)
            path = run.write("speculators", name, drafter)
            run.speculators(f"ours in speculators: {name}", drafter, theirs.open_speculator(path))
        for name, (kind, fields) in THEIR_SPECULATORS.items():
            path = run.folder / f"speculators {name}"
            model = theirs.random_speculator(path, run.target_folder, kind, block_size=6, **fields)
            drafter, _ = formats.read(path, formats.format_of(path))
            run.speculators(f"speculators' here: {name}", drafter, model)
        if run.failed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
