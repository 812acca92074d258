"""Anchors: where blocks start, what they predict, and which labels count (DSpark, section 3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.base import Batch, Blocks


def candidates(loss_mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Positions that may be anchors: they and the next token are both supervised."""
    return loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))


def sample(
    key: Key[Array, ""], loss_mask: Bool[Array, "B T"], num_anchors: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Anchors drawn uniformly without replacement, ascending; then dummies (0, False)."""
    allowed = candidates(loss_mask)
    draws = jnp.where(allowed, jax.random.uniform(key, allowed.shape), 2.0)
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

    Supervision stops at the first gap, for good (DSpark), or leaves out the gap alone (Domino).
    """
    length = batch.tokens.shape[1]
    ahead = anchors[..., None] + 1 + jnp.arange(block_size)
    inside = (ahead < length) & valid[..., None]
    safe = jnp.where(inside, ahead, jnp.where(valid[..., None], length - 1, 0))
    rows = jnp.arange(batch.tokens.shape[0])[:, None, None]
    labels = batch.tokens[rows, safe]
    supervised = inside & batch.loss_mask[rows, safe]
    first = batch.tokens[rows[..., 0], anchors][..., None]
    return Blocks(
        anchors=anchors,
        valid=valid,
        prevs=jnp.concatenate([first, labels[..., :-1]], -1),
        labels=labels,
        counted=jnp.cumprod(supervised, -1).astype(bool) if is_contiguous else supervised,
    )


def blocks(
    key: Key[Array, ""], batch: Batch, num_anchors: int, block_size: int, is_contiguous: bool
) -> Blocks:
    """The batch cut behind sampled anchors."""
    chosen = sample(key, batch.loss_mask, num_anchors)
    return cut(batch, *chosen, block_size, is_contiguous)


def weights(counted: Bool[Array, "*blocks K"], decay: float) -> Float[Array, "*blocks K"]:
    """exp(-k / decay) where the label counts, 0 elsewhere; no decay at 0."""
    positions = jnp.arange(counted.shape[-1], dtype=jnp.float32)
    factor = jnp.exp(-positions / decay) if decay else jnp.ones_like(positions)
    return counted * factor
