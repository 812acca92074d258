"""Calibrated candidates: the k best tokens of each position, and the bias of every adjacent pair.

A first-order head restricted to candidates is DFlash-2's Selector:

    S_t(a, b) = U_t(b) + <W1[a] * g(h_t, a), W2[b]>,    a in C_{t-1}, b in C_t

All C x C pairs of all positions are known before the walk, which then only looks up rows.
Candidates are kept in ascending id order, so that ties go to the lowest id in every walk.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import Markov
from dspark_jax.nn.layers import accumulator, project
from dspark_jax.nn.markov import MarkovHead

TopK = Literal["exact", "approx"]
_BLOCK = 128  # logits a block of the two-stage search, at most


def top_candidates(
    logits: Float[Array, "*rows V"], count: int, method: TopK = "exact"
) -> Int[Array, "*rows C"]:
    """Ids of the `count` largest logits, ties to the lowest id, in ascending order.

    "exact" searches in two stages: only blocks whose best logit is among the `count` best blocks
    can hold one. "approx" is `jax.lax.approx_max_k`, which is fast on TPU and may miss some.
    """
    # The final sort also keeps callers' slices away from the search: XLA's CPU compiler turns a
    # top-k whose result is sliced into a full stable sort.
    if method == "approx":
        ids = jax.lax.approx_max_k(_one_zero(logits), count)[1]
    elif logits.shape[-1] <= count * _BLOCK:
        ids = jax.lax.top_k(_one_zero(logits), count)[1]
    else:
        ids = _two_stage(logits, count)
    return jnp.sort(ids, -1)


def _two_stage(logits: Float[Array, "*rows V"], count: int) -> Int[Array, "*rows C"]:
    rows, size = logits.shape[:-1], _block_size(logits)
    padding = [(0, 0)] * len(rows) + [(0, -logits.shape[-1] % size)]
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*rows, -1, size)
    chosen = jnp.sort(jax.lax.top_k(_one_zero(jnp.max(blocks, -1)), count)[1], -1)
    inside = jnp.take_along_axis(blocks, chosen[..., None], -2)
    place = jax.lax.top_k(_one_zero(inside.reshape(*rows, -1)), count)[1]
    return jnp.take_along_axis(chosen, place // size, -1) * size + place % size


def _one_zero(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0.0 for -0.0, which a top-k would put behind it."""
    return jnp.where(logits == 0, 0.0, logits)


def _block_size(logits: Float[Array, "*rows V"]) -> int:
    """Logits a block, none across the border of two devices: block maxima travel, logits do not.

    The mesh whose axis `tensor` may split them is part of their type.
    """
    vocabulary = logits.shape[-1]
    slices = jax.typeof(logits).sharding.mesh.shape.get("tensor", 1)
    if slices == 1 or vocabulary % slices:
        return _BLOCK
    here = vocabulary // slices
    return next(size for size in range(_BLOCK, 0, -1) if here % size == 0)


def pair_bias(
    prev_row: Float[Array, "R"], gate: Float[Array, "R"], next_row: Float[Array, "R"]
) -> Float[Array, ""]:
    """<A[a] * g, B[b]>: the one formula of Markov heads and the Selector.

    Rounded as a head's `query` and projection are: the product in its operands' precision, the sum
    in fp32 at least.
    """
    query = prev_row * gate
    wide = accumulator(query)
    return jnp.sum(query.astype(wide) * next_row.astype(wide))


_over_next = jax.vmap(pair_bias, in_axes=(None, None, 0))
_over_prev = jax.vmap(_over_next, in_axes=(0, 0, None))
_over_positions = jax.vmap(_over_prev)
_over_batch = jax.vmap(_over_positions)


def pair_scores(
    head: MarkovHead,
    anchors: Int[Array, "B"],
    candidates: Int[Array, "B K C"],
    hidden: Float[Array, "B K D"],
    tokens: Int[Array, "B K C"] | None = None,
) -> Float[Array, "B K C C"]:
    """Bias of every adjacent pair, predecessor first; position 0 has the anchor in every row.

    Where candidates are places in a reduced vocabulary, `tokens` are their ids in the target's.
    """
    prev = predecessors(anchors, candidates if tokens is None else tokens)
    rows = head.rows(prev)
    gates = jnp.broadcast_to(head.gate(prev, hidden[..., None, :]), rows.shape)
    return _over_batch(rows, gates, head.w2[...][candidates])


def predecessors(anchors: Int[Array, "B"], candidates: Int[Array, "B K C"]) -> Int[Array, "B K C"]:
    """What may stand before each position: the anchor alone, then the position before's."""
    first = jnp.broadcast_to(anchors[:, None, None], candidates[:, :1].shape)
    return jnp.concatenate([first, candidates[:, :-1]], 1)


def widened(
    head: MarkovHead,
    anchors: Int[Array, "B"],
    candidates: Int[Array, "B K C"],
    hidden: Float[Array, "B K D"],
    vocabulary: int,
    count: int,
    tokens: Int[Array, "B K C"] | None = None,
) -> tuple[Int[Array, "B K W"], Bool[Array, "B K W"]]:
    """Candidates united with each predecessor's `count` best successors by transition bias.

    Predecessors are the candidates of the position before: what widening adds there is not
    followed further. `tokens` as in `pair_scores`.

    Returns:
      Ids in ascending order, and False on repetitions.
    """
    prev = predecessors(anchors, candidates if tokens is None else tokens)
    query = head.rows(prev) * head.gate(prev, hidden[..., None, :])
    table, count = head.w2[...][:vocabulary], min(count, vocabulary)

    def successors(query):  # of one position: biases of all of them would not fit
        return top_candidates(project(query, table), count)

    best = jax.lax.map(successors, jnp.swapaxes(query, 0, 1))
    best = jnp.swapaxes(best, 0, 1).reshape(*candidates.shape[:2], -1)
    union = jnp.sort(jnp.concatenate([candidates, best], -1), -1)
    is_new = jnp.concatenate(
        [jnp.ones_like(union[..., :1], bool), union[..., 1:] != union[..., :-1]], -1
    )
    return union, is_new


@chex.dataclass(frozen=True)
class Selector:
    """DFlash-2's candidate selector, as its checkpoints hold it.

    Attributes:
      predecessor: codebook A.
      successor: codebook B.
      projection: H, without bias.
    """

    predecessor: Float[Array, "V R"]
    successor: Float[Array, "V R"]
    projection: Float[Array, "R D"]


def markov_to_selector(head: MarkovHead) -> Selector:
    """The Selector that scores exactly as a linear-gated head does.

    Raises:
      ValueError: the gate has no such form. `--candidates` runs any first-order head as it is.
    """
    if head.config.gate != "linear":
        raise ValueError(
            f"head.gate = {head.config.gate!r} has no exact DFlash-2 form: H h has no bias, so it "
            "cannot be constant, and no sigmoid; train with gate = 'linear'"
        )
    if head.w1[...].shape != head.w2[...].shape:
        raise ValueError(
            f"a head over {len(head.w2[...])} of {len(head.w1[...])} tokens has no DFlash-2 form: "
            "a Selector drafts all of them"
        )
    return Selector(
        predecessor=head.w1[...], successor=head.w2[...], projection=head.gate_proj.weight[...]
    )


def selector_to_markov(selector: Selector) -> MarkovHead:
    """The linear-gated first-order head that a Selector is, over the whole vocabulary."""
    vocab_size, rank = selector.predecessor.shape
    width, dtype = selector.projection.shape[1], selector.predecessor.dtype
    config = Markov(rank=rank, gate="linear")
    head = nnx.eval_shape(lambda: MarkovHead(config, width, vocab_size, dtype, rngs=nnx.Rngs(0)))
    head.w1.set_value(selector.predecessor)
    head.w2.set_value(selector.successor)
    head.gate_proj.weight.set_value(selector.projection)
    return head
