"""The DSpark loss: cross entropy, L1 to the target's law, confidence (DSpark paper, section 3).

Logits exist for one chunk of anchors at a time. The lm head is frozen, so each chunk's gradient
with respect to hidden states and heads is formed in the forward sweep and kept; the backward pass
only scales it. Nothing is computed twice, and peak memory does not grow with the anchors.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train.vocabulary import Subset
from dspark_jax.walk import follow


@chex.dataclass(frozen=True)
class Supervision:
    """What the blocks of a chunk are held against.

    Attributes:
      prevs: the token before each predicted one.
      labels: the predicted token.
      counted: whether the label counts.
      weights: of each position, already divided by their sum over the whole batch.
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
      cross_entropy: weighted.
      l1: weighted.
      confidence: weighted.
      accepted: per position, sum of 1 - l1 / 2: acceptance when sampling at temperature 1.
      agreed: per position, drafted argmax equals the target's.
      counted: per position, labels that count.
      expected: sum over blocks of the expected accepted length, bonus included.
      greedy: the same for greedy decoding: 1 + length of the prefix that agrees.
      blocks: valid blocks.
    """

    cross_entropy: Float[Array, ""]
    l1: Float[Array, ""]
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
    among: slice | Int[Array, "V"] = slice(None),
) -> Float[Array, "N K V"]:
    """Corrected logits along given predecessors; `among` are the tokens of the lent head."""
    base = heads.base_logits(lent, hidden)
    state, transition = heads.transition(hidden.shape[0], among, lent.embedding)
    bias = follow(transition, state, prevs.T, jnp.swapaxes(hidden, 0, 1))
    return base + jnp.moveaxis(bias, 0, 1) if heads.head is not None else base


def chunk_loss(
    losses: Losses,
    heads: Heads,
    hidden: Float[Array, "N K D"],
    given: Supervision,
    lent: Lent,
    subset: Subset | None,
) -> tuple[Float[Array, ""], Tally]:
    """Weighted loss of some blocks, and what it is made of."""
    among, log_share = (slice(None), 0.0) if subset is None else (subset.tokens, subset.log_share)
    logits = draft_logits(heads, lent, hidden, given.prevs, among)
    target_logits = jax.lax.stop_gradient(heads.base_logits(lent, given.target_hidden))
    log_probs = jax.nn.log_softmax(logits + log_share)
    label = jnp.take_along_axis(log_probs, given.labels[..., None], -1)[..., 0]
    l1 = jnp.sum(jnp.abs(jnp.exp(log_probs) - jax.nn.softmax(target_logits + log_share)), -1)
    accept = jax.lax.stop_gradient(jnp.clip(1 - l1 / 2, 0, 1))
    cross_entropy = -jnp.sum(given.weights * label)
    weighted_l1 = jnp.sum(given.weights * l1)
    confidence = jnp.zeros(())
    if heads.confidence_head is not None:
        logit = heads.confidence(given.prevs, hidden)
        confidence = jnp.sum(given.weights * (jax.nn.softplus(logit) - logit * accept))
    total = (
        losses.cross_entropy * cross_entropy
        + losses.l1 * weighted_l1
        + losses.confidence * confidence
    )
    agree = jnp.argmax(logits, -1) == jnp.argmax(target_logits, -1)
    counted = given.counted.astype(jnp.float32)
    return total, Tally(
        cross_entropy=cross_entropy,
        l1=weighted_l1,
        confidence=confidence,
        accepted=jnp.sum(accept * counted, 0),
        agreed=jnp.sum(agree * counted, 0),
        counted=jnp.sum(counted, 0),
        expected=jnp.sum(counted[:, 0] + _run_length(accept * counted)),
        greedy=jnp.sum(counted[:, 0] + _run_length(agree * counted)),
        blocks=jnp.sum(counted[:, 0]),
    )


def _run_length(survival: Float[Array, "N K"]) -> Float[Array, "N"]:
    return jnp.sum(jnp.cumprod(survival, -1), -1)


def block_loss(
    losses: Losses,
    heads: Heads,
    hidden: Float[Array, "N K D"],
    given: Supervision,
    lent: Lent,
    chunk: int,
    subset: Subset | None = None,
) -> tuple[Float[Array, ""], Tally]:
    """The loss of all blocks, `chunk` blocks at a time (a divisor of their number).

    With a `subset`, labels are places in it and the lent head holds its rows alone.
    """

    def split(x):
        return x.reshape(-1, chunk, *x.shape[1:])

    term = functools.partial(chunk_loss, losses)
    chunks = jax.tree.map(split, given)
    return _sweep(term, heads, split(hidden), chunks, (lent, subset))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sweep(term, heads, hidden, given, frozen):
    """Sum of term(heads, hidden[i], given[i], *frozen)."""

    def body(chunk):
        return term(heads, *chunk, *frozen), None

    return _accumulate(body, (hidden, given))[0]


def _sweep_forward(term, heads, hidden, given, frozen):
    gradient = jax.value_and_grad(term, argnums=(0, 1), has_aux=True)

    def body(chunk):
        value, (d_heads, d_hidden) = gradient(heads, *chunk, *frozen)
        return (value, d_heads), d_hidden

    (value, d_heads), d_hidden = _accumulate(body, (hidden, given))
    return value, (d_heads, d_hidden)


def _sweep_backward(term, kept, cotangent):
    del term
    d_heads, d_hidden = jax.tree.map(lambda g: g * cotangent[0].astype(g.dtype), kept)
    return d_heads, d_hidden, None, None


_sweep.defvjp(_sweep_forward, _sweep_backward)


def _accumulate(body, chunks):
    """Scans body(chunk) -> (summed, stacked): the sum of the first, the stack of the second."""

    def step(total, chunk):
        summed, stacked = body(chunk)
        return jax.tree.map(jnp.add, total, summed), stacked

    one = jax.tree.map(lambda x: x[0], chunks)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda c: body(c)[0], one)
    )
    return jax.lax.scan(step, zeros, chunks)
