"""Draft + target logits -> Verdict: how many draft tokens stand, and the target's next one.

Speculative sampling (Leviathan et al., 2023): token x_j, drawn from q_j, stands if u q_j(x_j) <
p_j(x_j); at the first refusal the next token comes from the residual max(p - q, 0). With p and q
one-hot this is greedy decoding, which is written out because it needs no distributions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.base import Choose, Draft, Verdict
from dspark_jax.sampling import Sampling, draw, fold, law

RESIDUAL_MASS = 1e-8  # under this the residual is rounding noise, and p itself is used


class Rule(NamedTuple):
    """How tokens are chosen and judged; the draft and the verdict must use the same one.

    Attributes:
      choose: (logits [B V], keys [B]) -> tokens [B] and their law, None when certain.
      accept: (draft, target logits [B K+1 V], keys [B], widths [B]) -> verdict; of a row's draft
        only the first `widths` tokens may stand.
    """

    choose: Choose
    accept: Callable[..., Verdict]


def rule(sampling: Sampling | None) -> Rule:
    """The rule of a batch; None means every row is greedy."""
    if sampling is None:
        return Rule(choose=_choose_greedy, accept=_accept_greedy)

    def choose(logits: Float[Array, "B V"], keys: Key[Array, "B"]):
        probs = law(logits, sampling)
        return draw(keys, probs), probs

    def accept(
        draft: Draft,
        logits: Float[Array, "B K1 V"],
        keys: Key[Array, "B"],
        widths: Int[Array, "B"] | None = None,
    ) -> Verdict:
        rows = jax.tree.map(lambda x: jnp.repeat(x, logits.shape[1]), sampling)
        p = law(logits.reshape(-1, logits.shape[-1]), rows).reshape(logits.shape)
        return accept_sampled(draft.tokens, draft.probs, p, keys, widths)

    return Rule(choose=choose, accept=accept)


def _choose_greedy(logits: Float[Array, "B V"], keys: Key[Array, "B"]):
    del keys
    return jnp.argmax(logits, -1).astype(jnp.int32), None


def _accept_greedy(
    draft: Draft,
    logits: Float[Array, "B K1 V"],
    keys: Key[Array, "B"],
    widths: Int[Array, "B"] | None = None,
) -> Verdict:
    del keys
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    agrees = (draft.tokens == best[:, :-1]) & _may_stand(draft.tokens, widths)
    stands = jnp.cumprod(agrees, -1)
    accepted = jnp.sum(stands, -1).astype(jnp.int32)
    return Verdict(accepted=accepted, bonus=jnp.take_along_axis(best, accepted[:, None], -1)[:, 0])


def accept_sampled(
    tokens: Int[Array, "B K"],
    q: Float[Array, "B K V"] | None,
    p: Float[Array, "B K1 V"],
    keys: Key[Array, "B"],
    widths: Int[Array, "B"] | None = None,
) -> Verdict:
    """Judges drawn tokens.

    Args:
      tokens: the draft.
      q: the law each was drawn from; None = each was certain.
      p: the target's law at the same positions and the one behind.
      keys: one a row.
      widths: tokens of each row's draft that may stand; None = all.
    """
    vocabulary, inside = p.shape[-1], _may_stand(tokens, widths)
    q = jax.nn.one_hot(tokens, vocabulary, dtype=p.dtype) if q is None else q
    here = tokens[..., None]
    drawn = jnp.take_along_axis(q, here, -1)[..., 0]
    wanted = jnp.take_along_axis(p[:, :-1], here, -1)[..., 0]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, tokens.shape[1:]))(fold(keys, 0))
    stands = jnp.cumprod((uniform * drawn < wanted) & inside, -1)
    accepted = jnp.sum(stands, -1).astype(jnp.int32)
    at = accepted[:, None, None]
    p_next = jnp.take_along_axis(p, at, 1)[:, 0]
    q = jnp.where(inside[..., None], q, 0.0)  # behind a row's width nothing was drawn: p itself
    q_next = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, 1)[:, 0]
    return Verdict(accepted=accepted, bonus=draw(fold(keys, 1), residual(p_next, q_next)))


def _may_stand(tokens: Int[Array, "B K"], widths: Int[Array, "B"] | None) -> Bool[Array, "B K"]:
    """Which places of a draft lie within their row's width."""
    if widths is None:
        return jnp.ones(tokens.shape, bool)
    return jnp.arange(tokens.shape[1]) < widths[:, None]


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The law behind a refusal: max(p - q, 0), normalised; p where that has no mass."""
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, -1, keepdims=True)
    return jnp.where(mass > RESIDUAL_MASS, rest / jnp.maximum(mass, RESIDUAL_MASS), p)
