"""What a drafter would gain, estimated on training blocks; sums first, ratios once at the end.

Each block's draft is held against the target's argmax along the data. What counts is the prefix
that agrees: whatever a position says behind an earlier miss, decoding never gets there.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.base import Blocks, HostArray
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Drafter, Heads, Lent, first_order
from dspark_jax.train.losses import TERMS, Tally, draft_logits
from dspark_jax.train.step import Knowledge, largest_divisor, predictions
from dspark_jax.walk import Steps, walk


@chex.dataclass(frozen=True)
class Prefixes:
    """Prefixes of some blocks that agree with the target; sums, to be added.

    Attributes:
      reached: per position, blocks that count there and agree everywhere before.
      accepted: per position, those that agree there too; the rest fail there first.
      blocks: blocks with a position that counts.
    """

    reached: Int[HostArray, "K"]
    accepted: Int[HostArray, "K"]
    blocks: Int[HostArray, ""]

    @property
    def length(self) -> float:
        """Accepted length, bonus included; 1 without blocks."""
        return 1 + float(self.accepted.sum()) / max(int(self.blocks), 1)

    def record(self) -> dict:
        """Plain numbers."""
        reached, accepted = (np.asarray(x, np.int64) for x in (self.reached, self.accepted))
        return {
            "length": self.length,
            "survival": [round(x / max(int(self.blocks), 1), 4) for x in accepted.tolist()],
            "reached": reached.tolist(),
            "accepted": accepted.tolist(),
            "failed": (reached - accepted).tolist(),
        }


def prefixes(agrees: Bool[Array, "N K"], counted: Bool[Array, "N K"]) -> Prefixes:
    """Counts prefixes; a position that does not count neither ends one nor lengthens it."""
    stands = jnp.cumprod(jnp.where(counted, agrees, True), -1).astype(bool)
    before = jnp.concatenate([jnp.ones_like(stands[:, :1]), stands[:, :-1]], -1)
    return Prefixes(
        reached=jnp.sum(before & counted, 0),
        accepted=jnp.sum(stands & counted, 0),
        blocks=jnp.sum(jnp.any(counted, -1)),
    )


def measure(
    drafter: Drafter,
    known: Knowledge,
    blocks: Blocks,
    tokens: Int[Array, "B T"],
    chunk: int,
    oracle: int,
    devices: int = 1,
) -> dict[str, Prefixes]:
    """Prefixes of a batch's blocks by how they are drafted.

    Each of the `devices` that share its rows forms the logits of `chunk` blocks at once.

    The keys: "walked", along the drafter's own tokens, as it decodes; "taught", along the data;
    "unary", by the base logits alone; "oracle", as if the head always chose right among the
    `oracle` best base logits (the drafter's own candidates, where it has some), for heads that a
    table of candidates holds. Labels a loss puts in among its candidates count for none of them.
    """
    hidden, target_hidden = predictions(drafter, known, blocks, tokens, chunk)

    def one(parts):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
        return _drafted(drafter.heads, known.lent, *flat, oracle)

    def split(x):  # some anchors of every row, so that rows stay on their devices
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    rows, count = blocks.anchors.shape
    size = largest_divisor(count, max(1, chunk * devices // rows))
    parts = hidden, target_hidden, blocks.prevs, blocks.counted
    found = jax.lax.map(one, jax.tree.map(split, parts))
    return jax.tree.map(lambda x: jnp.sum(x, 0), found)


def _drafted(
    heads: Heads,
    lent: Lent,
    hidden: Float[Array, "N K D"],
    target_hidden: Float[Array, "N K D"],
    prevs: Int[Array, "N K"],
    counted: Bool[Array, "N K"],
    oracle: int,
) -> dict[str, Prefixes]:
    """Prefixes of some blocks, by how they are drafted."""
    base, taught = draft_logits(heads, lent, hidden, prevs)
    best = jnp.argmax(heads.base_logits(lent, target_hidden), -1)
    cut, bias = cut_to_candidates(heads, base), taught - base
    drafts = {
        "walked": greedy_walk(heads, lent, prevs[:, 0], hidden, cut),
        "taught": jnp.argmax(cut + bias, -1),
        "unary": jnp.argmax(base, -1),
    }
    found = {name: prefixes(draft == best, counted) for name, draft in drafts.items()}
    if first_order(heads.config):
        count = min(heads.config.candidates or oracle, base.shape[-1])
        ids = selector.top_candidates(base, count)
        found["oracle"] = prefixes(jnp.any(ids == best[..., None], -1), counted)
    return found


def cut_to_candidates(heads: Heads, base: Float[Array, "N K V"]) -> Float[Array, "N K V"]:
    """Base logits, -inf off the candidates of a drafter that is walked over some."""
    if not heads.config.candidates:
        return base
    ids = selector.top_candidates(base, min(heads.config.candidates, base.shape[-1]))
    kept = jnp.put_along_axis(jnp.zeros(base.shape, bool), ids, True, -1, inplace=False)
    return jnp.where(kept, base, -jnp.inf)


def greedy_walk(
    heads: Heads,
    lent: Lent,
    anchors: Int[Array, "N"],
    hidden: Float[Array, "N K D"],
    base: Float[Array, "N K V"],
) -> Int[Array, "N K"]:
    """The tokens a drafter chooses, each fed on to the next; ties go to the lowest id."""

    def choose(logits, keys):
        del keys
        return jnp.argmax(logits, -1).astype(jnp.int32), None

    among = slice(base.shape[-1])
    state, transition = heads.transition(anchors.shape[0], among, lent.embedding)
    steps = Steps(logits=jnp.swapaxes(base, 0, 1), hidden=jnp.swapaxes(hidden, 0, 1), keys=None)
    return walk(transition, choose, state, anchors.astype(jnp.int32), steps)[0].T


def summary(window: Sequence[dict]) -> dict:
    """Plain numbers of some steps' metrics, all of them ratios of pooled sums.

    Args:
      window: of each step or batch: its `loss` and `tally`.
    """
    window = jax.device_get([{name: entry[name] for name in ("loss", "tally")} for entry in window])
    tallies = [entry["tally"] for entry in window]
    weights = np.asarray([tally.weight for tally in tallies], np.float64)

    def pooled(values) -> float:  # each is a mean over its own weight
        return float(np.dot(weights, np.asarray(values, np.float64)) / max(weights.sum(), 1e-6))

    tally: Tally = jax.tree.map(lambda *xs: np.sum(xs, 0), *tallies)
    counted, blocks = np.maximum(tally.counted, 1), max(float(tally.blocks), 1)
    return {
        "loss": pooled([entry["loss"] for entry in window]),
        **{name: pooled([tally[name] for tally in tallies]) for name in TERMS},
        "accept_rate": [round(float(x), 4) for x in tally.accepted / counted],
        "agree_rate": [round(float(x), 4) for x in tally.agreed / counted],
        "expected_length": float(tally.expected) / blocks,
        "greedy_length": float(tally.greedy) / blocks,
        "blocks": int(tally.blocks),
    }


def drafted(window: Sequence[dict]) -> dict:
    """Plain numbers of some batches' `prefixes`, pooled, by how blocks are drafted."""
    found = jax.device_get([entry["prefixes"] for entry in window])
    total = jax.tree.map(lambda *xs: np.sum(xs, 0), *found)
    return {name: one.record() for name, one in total.items()}
