"""Losses: cross entropy of corrected and base logits, L1 to the target's law, selector, confidence.

Sources: DSpark paper, section 3; Domino, section 3.4; DFlash-2; D-PACE (arXiv 2605.18810).

Here are the terms of some blocks; `sweep` forms them chunk by chunk.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train.parallel import Vocabulary, varying_as
from dspark_jax.train.vocabulary import Subset
from dspark_jax.walk import follow

TERMS = ("cross_entropy", "base", "l1", "length", "selector", "confidence")


@chex.dataclass(frozen=True)
class Supervision:
    """What the blocks of a chunk are held against.

    Attributes:
      prevs: the token before each predicted one.
      labels: the predicted token.
      counted: whether the label counts.
      weights: of each position; the loss is divided by their sum over the whole batch, once.
      target_hidden: the target's final-normed state that predicts the label.
    """

    prevs: Int[Array, "*N K"]
    labels: Int[Array, "*N K"]
    counted: Bool[Array, "*N K"]
    weights: Float[Array, "*N K"]
    target_hidden: Float[Array, "*N K D"]


@chex.dataclass(frozen=True)
class Tally:
    """Sums over blocks; ratios are taken once, after all sums (pooled, never a mean of means).

    Attributes:
      weight: sum of the weights; the denominator of the six terms that follow.
      cross_entropy: weighted, of the corrected logits.
      base: weighted, of the base logits.
      l1: weighted.
      length: weighted; minus the expected number of accepted drafts, position by position.
      selector: weighted.
      confidence: weighted.
      accepted: per position, sum of 1 - l1 / 2: acceptance when sampling at temperature 1.
      agreed: per position, drafted argmax equals the target's.
      counted: per position, labels that count.
      expected: sum over blocks of the expected accepted length, bonus included.
      greedy: the same for greedy decoding: 1 + length of the prefix that agrees.
      blocks: valid blocks.
    """

    weight: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    base: Float[Array, ""]
    l1: Float[Array, ""]
    length: Float[Array, ""]
    selector: Float[Array, ""]
    confidence: Float[Array, ""]
    accepted: Float[Array, "K"]
    agreed: Float[Array, "K"]
    counted: Float[Array, "K"]
    expected: Float[Array, ""]
    greedy: Float[Array, ""]
    blocks: Float[Array, ""]


def draft_logits(
    heads: Heads,
    lent: Lent,
    hidden: Float[Array, "N K D"],
    prevs: Int[Array, "N K"],
    among: slice | Int[Array, "tokens"] = slice(None),
) -> tuple[Float[Array, "N K V"], Float[Array, "N K V"]]:
    """Base logits, and those corrected along given predecessors.

    `among` are the tokens of the lent head, where it holds but some.
    """
    base = heads.base_logits(lent, hidden)
    state, transition = heads.transition(hidden.shape[0], among, lent.embedding)
    rows = jnp.swapaxes(hidden, 0, 1)
    bias = follow(transition, varying_as(state, hidden), prevs.T, rows)
    return base, base + jnp.moveaxis(bias, 0, 1)


def base_share(losses: Losses, step: Int[Array, ""], steps: int) -> Float[Array, ""]:
    """Domino's lambda at an optimizer step: linear from `base` to 0 (Domino, section 3.4)."""
    if losses.base_decay is None:
        return jnp.asarray(losses.base, jnp.float32)
    end = max(1, int(steps * losses.base_decay))
    return losses.base * (1 - jnp.minimum(step / end, 1.0))


def dpace_weights(
    cross_entropy: Float[Array, "N K"], mask: Float[Array, "N K"], alpha: float
) -> Float[Array, "N K"]:
    """D-PACE: how much of the block hangs on each position (arXiv 2605.18810), no gradient."""
    q = (1 - alpha) * jnp.exp(-jax.lax.stop_gradient(cross_entropy)) + alpha
    reached = jnp.cumprod(jnp.where(mask > 0, q, 1.0), -1)
    return jnp.cumsum((reached * mask)[:, ::-1], -1)[:, ::-1] * mask


def selector_loss(
    losses: Losses,
    base: Float[Array, "N K V"],
    logits: Float[Array, "N K V"],
    labels: Int[Array, "N K"],
    vocabulary: Vocabulary = Vocabulary(),
) -> Float[Array, "N K"]:
    """Cross entropy of corrected logits over the best candidates of the base logits.

    A label that is no candidate counts 0, or replaces the worst candidate.
    """
    ids = vocabulary.top_k(jax.lax.stop_gradient(base), losses.candidates)
    is_in = jnp.any(ids == labels[..., None], -1)
    ids = ids.at[..., -1].set(jnp.where(is_in, ids[..., -1], labels))
    chosen = vocabulary.pick(logits, ids)
    label = vocabulary.pick(logits, labels[..., None])[..., 0]
    loss = jax.nn.logsumexp(chosen, -1) - label
    return loss if losses.missing == "inject" else loss * is_in


def chunk_loss(
    losses: Losses,
    vocabulary: Vocabulary,
    heads: Heads,
    hidden: Float[Array, "N K D"],
    given: Supervision,
    lent: Lent,
    subset: Subset | None,
    share: Float[Array, ""] | float = 0.0,
) -> tuple[Float[Array, ""], Tally]:
    """Weighted loss of some blocks, a sum, and what it is made of.

    `share` is Domino's lambda, used if `losses.base` is set.
    """
    among, log_share = (slice(None), 0.0) if subset is None else (subset.tokens, subset.log_share)
    base, logits = draft_logits(heads, lent, hidden, given.prevs, among)
    target_logits = jax.lax.stop_gradient(heads.base_logits(lent, given.target_hidden))

    def label_loss(logits):
        log_probs = vocabulary.log_softmax(logits + log_share)
        return log_probs, -vocabulary.pick(log_probs, given.labels[..., None])[..., 0]

    log_probs, final = label_loss(logits)
    target_probs = jnp.exp(vocabulary.log_softmax(target_logits + log_share))
    l1 = vocabulary.sum(jnp.abs(jnp.exp(log_probs) - target_probs))
    accept = jax.lax.stop_gradient(jnp.clip(1 - l1 / 2, 0, 1))
    terms = {"cross_entropy": final, "l1": l1}
    if losses.base:
        terms["base"] = label_loss(base)[1]
    if losses.length:
        terms["length"] = -_reached(jnp.clip(1 - l1 / 2, 0, 1), given.counted)
    if losses.selector:
        terms["selector"] = selector_loss(losses, base, logits, given.labels, vocabulary)
    if heads.confidence_head is not None:
        seen = hidden if losses.confidence_to_backbone else jax.lax.stop_gradient(hidden)
        logit = heads.confidence(given.prevs, seen)
        terms["confidence"] = jax.nn.softplus(logit) - logit * accept
    weights = given.weights
    if losses.dpace is not None:
        weights = dpace_weights(final, weights, losses.dpace)
    sums = {name: jnp.sum(weights * terms.get(name, 0.0)) for name in TERMS}
    agree = vocabulary.argmax(logits) == vocabulary.argmax(target_logits)
    tally = _tally(given.counted, accept, agree, weight=jnp.sum(weights), **sums)
    return _total(losses, sums, share if losses.base else 0.0), tally


def averaged(value: Float[Array, ""], tally: Tally) -> tuple[Float[Array, ""], Tally]:
    """Sums over all blocks -> the loss and its terms, weighted means.

    Their denominator is known once all blocks are (D-PACE's weights depend on the logits); no
    gradient flows through it.
    """
    mean = per_weight(tally)
    return value * mean, tally.replace(**{name: tally[name] * mean for name in TERMS})


def per_weight(tally: Tally) -> Float[Array, ""]:
    """What turns sums over all blocks into weighted means."""
    return 1 / (jax.lax.stop_gradient(tally.weight) + 1e-6)


def _total(
    losses: Losses, sums: dict[str, Float[Array, ""]], share: Float[Array, ""] | float
) -> Float[Array, ""]:
    """What is minimised."""
    labels = (1 - share) * sums["cross_entropy"] + share * sums["base"]
    others = ("l1", "length", "selector", "confidence")
    return losses.cross_entropy * labels + sum(getattr(losses, n) * sums[n] for n in others)


def _tally(
    counted: Bool[Array, "N K"], accept: Float[Array, "N K"], agree: Bool[Array, "N K"], **sums
) -> Tally:
    has_any = jnp.any(counted, -1)
    return Tally(
        accepted=jnp.sum(accept * counted, 0),
        agreed=jnp.sum(agree * counted, 0, dtype=jnp.float32),
        counted=jnp.sum(counted, 0, dtype=jnp.float32),
        expected=jnp.sum(has_any) + jnp.sum(_reached(accept, counted)),
        greedy=jnp.sum(has_any) + jnp.sum(_reached(agree, counted)),
        blocks=jnp.sum(has_any, dtype=jnp.float32),
        **sums,
    )


def _reached(survival: Array, counted: Bool[Array, "N K"]) -> Float[Array, "N K"]:
    """That a draft stands with all before it; a gap neither breaks the run nor counts."""
    return jnp.cumprod(jnp.where(counted, survival, 1.0), -1) * counted
