"""Logits -> law -> token: the one place where temperature, top-k and top-p act, on p and q alike.

The filters apply in this order: temperature, top-k, top-p. Ties go to the lowest id everywhere.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (DSpark reference, section 5.1)


@chex.dataclass(frozen=True)
class Sampling:
    """How each row of a batch is sampled.

    Attributes:
      temperature: 0 = greedy.
      top_k: keep the k most likely tokens; 0 = all.
      top_p: then keep the smallest most-likely set of at least this mass; 1 = all.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]


def law(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """The fp32 distribution a token is drawn from; one-hot of the argmax for greedy rows."""
    is_greedy = sampling.temperature < GREEDY_BELOW
    temperature = jnp.where(is_greedy, 1.0, sampling.temperature)[:, None]
    scaled = logits.astype(jnp.float32) / temperature
    is_filtered = ~is_greedy & ((sampling.top_k > 0) | (sampling.top_p < 1))
    kept = jax.lax.cond(
        jnp.any(is_filtered),
        lambda: _kept(scaled, sampling.top_k, sampling.top_p),
        lambda: jnp.ones(logits.shape, bool),
    )
    probs = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    best = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(is_greedy[:, None], best, probs)


def _kept(
    logits: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """What top-k, then top-p on the renormalised rest, leave; at least one token."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, -1)
    rank = jnp.arange(logits.shape[-1])
    in_top_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probs = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf))
    mass_before = jnp.cumsum(probs, -1) - probs
    in_top_p = (mass_before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(in_top_k & in_top_p)


def draw(keys: Key[Array, "B"], probs: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token a row by the Gumbel-max rule; tokens of probability 0 are never drawn."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[-1:]))(keys)
    return jnp.argmax(jnp.log(probs) + noise, -1).astype(jnp.int32)


def request_key(seed: int) -> Key[Array, ""]:
    """The randomness of one request: independent of batch, order and neighbours."""
    return jax.random.key(seed)


def fold(keys: Key[Array, "B"], data: Int[Array, "B"] | Int[Array, ""] | int) -> Key[Array, "B"]:
    """A new key a row, from the row's key and a counter or a purpose."""
    data = jnp.broadcast_to(jnp.asarray(data, jnp.int32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, data)
