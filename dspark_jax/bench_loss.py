"""What chunks cost a loss: ours, all logits at once, and chunks formed again, in one run."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from dspark_jax.bench import medians
from dspark_jax.config import DrafterConfig, Geometry, Markov, Rotary
from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train.losses import Supervision, Tally, chunk_loss
from dspark_jax.train.parallel import Vocabulary
from dspark_jax.train.sweep import block_loss

LOSSES = Losses(confidence=0.0)  # cross entropy and L1


def loss_costs(
    vocab_size: int, width: int, rank: int, blocks: int, block_size: int, chunk: int, repeats: int
) -> dict[str, float]:
    """Median seconds of the loss of a DSpark vanilla drafter and its gradient, three ways.

    Args:
      vocab_size: V.
      width: D.
      rank: R.
      blocks: all of them.
      block_size: K.
      chunk: blocks whose logits exist at once.
      repeats: timed calls of each, interleaved.

    Returns:
      "whole": all logits at once; "chunked": as training does it; "remat": chunks whose logits
      the backward pass forms again.

    Raises:
      ValueError: `chunk` does not divide `blocks`.
    """
    if blocks % chunk:
        raise ValueError(f"chunk = {chunk}: must divide the {blocks} blocks")
    given = inputs(vocab_size, width, rank, blocks, block_size)

    def part(gradient):
        return lambda: jax.block_until_ready(gradient(*given))

    return medians({name: part(gradient) for name, gradient in gradients(chunk).items()}, repeats)


def gradients(chunk: int) -> dict[str, Callable]:
    """By way of forming it: loss, tally, and the gradient with respect to heads and hidden."""
    ways = {
        "whole": _whole,
        "chunked": functools.partial(block_loss, LOSSES, chunk=chunk),
        "remat": functools.partial(_remat, chunk),
    }
    form = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    return {name: jax.jit(form(way)) for name, way in ways.items()}


def inputs(
    vocab_size: int, width: int, rank: int, blocks: int, block_size: int
) -> tuple[Heads, Float[Array, "N K D"], Supervision, Lent]:
    """Random heads, hidden states, labels and tables."""
    geometry = Geometry(
        width=width, mlp_width=8, heads=1, kv_heads=1, head_dim=8, rotary=Rotary(theta=1e4)
    )
    config = DrafterConfig(
        geometry=geometry,
        vocab_size=vocab_size,
        num_layers=1,
        block_size=block_size,
        target_layer_ids=(0,),
        mask_token=0,
        predict_from_anchor=True,
        head=Markov(rank=rank),
    )
    draws, shape = np.random.default_rng(0), (blocks, block_size)
    hidden, target_hidden = draws.standard_normal((2, *shape, width), np.float32)
    prevs, labels = draws.integers(0, vocab_size, (2, *shape), np.int32)
    table = jnp.asarray(draws.standard_normal((vocab_size, width), np.float32) / 8)
    given = Supervision(
        prevs=jnp.asarray(prevs),
        labels=jnp.asarray(labels),
        counted=jnp.ones(shape, bool),
        weights=jnp.ones(shape),
        target_hidden=jnp.asarray(target_hidden),
    )
    heads = Heads(config, jnp.float32, rngs=nnx.Rngs(0))
    return heads, jnp.asarray(hidden), given, Lent(embedding=table, head=table)


def _whole(
    heads: Heads, hidden: Float[Array, "N K D"], given: Supervision, lent: Lent
) -> tuple[Float[Array, ""], Tally]:
    return chunk_loss(LOSSES, Vocabulary(), heads, hidden, given, lent, None)


def _remat(
    chunk: int, heads: Heads, hidden: Float[Array, "N K D"], given: Supervision, lent: Lent
) -> tuple[Float[Array, ""], Tally]:
    """The same sums, a chunk at a time; nothing but its inputs is kept for the backward pass."""
    parts = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, given))
    each = jax.checkpoint(lambda part: _whole(heads, *part, lent))
    return jax.tree.map(lambda x: jnp.sum(x, 0), jax.lax.map(each, parts))
