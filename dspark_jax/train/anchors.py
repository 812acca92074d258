"""Anchors: where blocks start, what they predict, and which labels count (DSpark, section 3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.base import Batch, Blocks


def starts(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """First slot of the segment that each token belongs to."""
    is_first = jnp.diff(segments, axis=1, prepend=-1) != 0
    slots = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(is_first, slots, 0), axis=1)


def candidates(
    loss_mask: Bool[Array, "B T"], segments: Int[Array, "B T"] | None = None
) -> Bool[Array, "B T"]:
    """Positions that may be anchors: they and the next token of the text are both supervised."""
    allowed = loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    if segments is None:
        return allowed
    return allowed & (segments == jnp.pad(segments[:, 1:], ((0, 0), (0, 1))))


def sample(
    key: Key[Array, ""],
    loss_mask: Bool[Array, "B T"],
    num_anchors: int,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Anchors drawn uniformly without replacement, ascending; then dummies (0, False).

    The draw of a slot depends on the key, the row's number and the slot alone: not on the padding,
    nor on the rows beside it.
    """
    allowed = candidates(loss_mask, segments)
    rows, length = allowed.shape
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    draws = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)
    draws = jnp.where(allowed, draws, 2.0)
    kept = min(num_anchors, allowed.shape[1])
    order = jnp.argsort(draws, axis=1)[:, :kept]
    valid = jnp.take_along_axis(allowed, order, 1)
    anchors = jnp.sort(jnp.where(valid, order, allowed.shape[1]), axis=1)
    anchors = jnp.pad(anchors, ((0, 0), (0, num_anchors - kept)), constant_values=allowed.shape[1])
    valid = anchors < allowed.shape[1]
    return jnp.where(valid, anchors, 0), valid


def cut(
    batch: Batch,
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    block_size: int,
    is_contiguous: bool = True,
) -> Blocks:
    """Predecessors, labels and what counts.

    Supervision stops at the first gap, for good (DSpark), or leaves out the gap alone (Domino);
    it never reaches into another segment of the row.
    """
    length = batch.tokens.shape[1]
    ahead = anchors[..., None] + 1 + jnp.arange(block_size)
    inside = (ahead < length) & valid[..., None]
    safe = jnp.where(inside, ahead, jnp.where(valid[..., None], length - 1, 0))
    rows = jnp.arange(batch.tokens.shape[0])[:, None, None]
    labels = batch.tokens[rows, safe]
    supervised = inside & batch.loss_mask[rows, safe]
    if batch.segments is not None:
        segments = batch.segments[rows, anchors[..., None]]
        supervised &= batch.segments[rows, safe] == segments
    first = batch.tokens[rows[..., 0], anchors][..., None]
    return Blocks(
        anchors=anchors,
        valid=valid,
        prevs=jnp.concatenate([first, labels[..., :-1]], -1),
        labels=labels,
        counted=jnp.cumprod(supervised, -1).astype(bool) if is_contiguous else supervised,
        starts=None if batch.segments is None else starts(batch.segments),
    )


def blocks(
    key: Key[Array, ""], batch: Batch, num_anchors: int, block_size: int, is_contiguous: bool
) -> Blocks:
    """The batch cut behind sampled anchors."""
    chosen = sample(key, batch.loss_mask, num_anchors, batch.segments)
    return cut(batch, *chosen, block_size, is_contiguous)


def weights(counted: Bool[Array, "*blocks K"], decay: float) -> Float[Array, "*blocks K"]:
    """exp(-k / decay) where the label counts, 0 elsewhere; no decay at 0."""
    positions = jnp.arange(counted.shape[-1], dtype=jnp.float32)
    factor = jnp.exp(-positions / decay) if decay else jnp.ones_like(positions)
    return counted * factor
