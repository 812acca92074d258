"""Losses: cross entropy of corrected and base logits, L1 to the target's law, selector, confidence.

Sources: DSpark paper, section 3; Domino, section 3.4; DFlash-2; D-PACE (arXiv 2605.18810).

Logits exist for one chunk of anchors at a time. The lm head is frozen, so each chunk's gradient
with respect to hidden states and heads is formed in the forward sweep and kept; the backward pass
only scales it. Nothing is computed twice, and peak memory does not grow with the anchors.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train.parallel import Frozen, Vocabulary, over_devices, varying_as, zeros
from dspark_jax.train.vocabulary import Subset
from dspark_jax.walk import follow

TERMS = ("cross_entropy", "base", "l1", "selector", "confidence")


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
      weight: sum of the weights; the denominator of the five terms that follow.
      cross_entropy: weighted, of the corrected logits.
      base: weighted, of the base logits.
      l1: weighted.
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
    weights = dpace_weights(final, given.weights, losses.dpace) if losses.dpace else given.weights
    zero = jnp.zeros(final.shape)
    terms = {
        "cross_entropy": final,
        "base": label_loss(base)[1] if losses.base else zero,
        "l1": l1,
        "selector": zero,
        "confidence": zero,
    }
    if losses.selector:
        terms["selector"] = selector_loss(losses, base, logits, given.labels, vocabulary)
    if heads.confidence_head is not None:
        seen = hidden if losses.confidence_to_backbone else jax.lax.stop_gradient(hidden)
        logit = heads.confidence(given.prevs, seen)
        terms["confidence"] = jax.nn.softplus(logit) - logit * accept
    sums = {name: jnp.sum(weights * term) for name, term in terms.items()}
    share = share if losses.base else 0.0
    total = (
        losses.cross_entropy * ((1 - share) * sums["cross_entropy"] + share * sums["base"])
        + losses.l1 * sums["l1"]
        + losses.selector * sums["selector"]
        + losses.confidence * sums["confidence"]
    )
    agree = vocabulary.argmax(logits) == vocabulary.argmax(target_logits)
    counted, has_any = given.counted.astype(jnp.float32), jnp.any(given.counted, -1)
    return total, Tally(
        weight=jnp.sum(weights),
        accepted=jnp.sum(accept * counted, 0),
        agreed=jnp.sum(agree * counted, 0),
        counted=jnp.sum(counted, 0),
        expected=jnp.sum(has_any + _run_length(accept, counted)),
        greedy=jnp.sum(has_any + _run_length(agree, counted)),
        blocks=jnp.sum(has_any, dtype=jnp.float32),
        **sums,
    )


def _run_length(survival: Array, counted: Float[Array, "N K"]) -> Float[Array, "N"]:
    """Counted positions before the first failure; a gap neither breaks the run nor counts."""
    return jnp.sum(jnp.cumprod(jnp.where(counted > 0, survival, 1.0), -1) * counted, -1)


def block_loss(
    losses: Losses,
    heads: Heads,
    hidden: Float[Array, "N K D"],
    given: Supervision,
    lent: Lent,
    chunk: int,
    subset: Subset | None = None,
    share: Float[Array, ""] | float = 0.0,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Tally]:
    """The loss of all blocks, `chunk` blocks a device at a time (a divisor of their number).

    With a `subset`, labels are places in it and the lent head holds its rows alone. The loss is
    a weighted mean: its denominator is known once all chunks are (D-PACE's weights depend on the
    logits), and no gradient flows through it.
    """
    vocabulary = Vocabulary(None if mesh is None else "tensor")
    term = functools.partial(_row_loss, losses, vocabulary)
    frozen = lent, subset, jnp.asarray(share, jnp.float32)
    heads, rows = _without_rows(heads, given.prevs)
    value, tally = _sweep(term, chunk, mesh, heads, (hidden, rows), given, frozen)
    mean = 1 / (jax.lax.stop_gradient(tally.weight) + 1e-6)
    return value * mean, tally.replace(**{name: tally[name] * mean for name in TERMS})


def _without_rows(
    heads: Heads, prevs: Int[Array, "N K"]
) -> tuple[Heads, Float[Array, "N K R"] | None]:
    """Heads without W1, and its rows of the predecessors.

    A sweep then sums no gradient of W1's size: the rows' gradients go to their places once.
    """
    if not hasattr(heads.head, "w1"):
        return heads, None
    rows = heads.head.rows(prevs)
    return _with_rows(heads, rows[:0, 0]), rows


def _with_rows(heads: Heads, rows: Float[Array, "places R"]) -> Heads:
    graphdef, params = nnx.split(heads)

    def one(path, leaf):
        return rows if "'w1'" in jax.tree_util.keystr(path) else leaf

    return nnx.merge(graphdef, jax.tree.map_with_path(one, params))


def _row_loss(losses, vocabulary, heads, hidden, given, lent, subset, share):
    """`chunk_loss` of blocks that bring their rows of W1: each predecessor is its own token."""
    hidden, rows = hidden
    if rows is not None:
        heads = _with_rows(heads, rows.reshape(-1, rows.shape[-1]))
        given = given.replace(prevs=jnp.arange(given.prevs.size).reshape(given.prevs.shape))
    return chunk_loss(losses, vocabulary, heads, hidden, given, lent, subset, share)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sweep(term, chunk, mesh, heads, hidden, given, frozen):
    """Sum of term(heads, hidden[i], given[i], *frozen) over chunks i; `hidden` is a tree."""
    return _sweep_forward(term, chunk, mesh, heads, hidden, given, frozen)[0]


def _sweep_forward(term, chunk, mesh, heads, hidden, given, frozen: Frozen):
    sweep = functools.partial(_gradient_sweep, term, chunk)
    share = over_devices(sweep, mesh, heads, frozen)
    (value, d_heads), d_hidden = share(heads, hidden, given, frozen)
    return value, (d_heads, d_hidden)


def _sweep_backward(term, chunk, mesh, kept, cotangent):
    del term, chunk, mesh
    d_heads, d_hidden = jax.tree.map(lambda g: g * cotangent[0].astype(g.dtype), kept)
    return d_heads, d_hidden, None, None


_sweep.defvjp(_sweep_forward, _sweep_backward)


def _gradient_sweep(term, chunk, heads, hidden, given, frozen: Frozen):
    """((value, d_heads), d_hidden) of some blocks; values and gradients of heads are summed."""
    gradient = jax.value_and_grad(term, argnums=(0, 1), has_aux=True)

    def body(total, chunk):
        value, (d_heads, d_hidden) = gradient(heads, *chunk, *frozen)
        return jax.tree.map(jnp.add, total, (value, d_heads)), d_hidden

    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, given))
    one = jax.tree.map(lambda x: x[0], chunks)
    value, (d_heads, _) = jax.eval_shape(lambda one: gradient(heads, *one, *frozen), one)
    sums, d_hidden = jax.lax.scan(body, zeros((value, d_heads)), chunks)
    return sums, jax.tree.map(lambda d, x: d.reshape(x.shape), d_hidden, hidden)
