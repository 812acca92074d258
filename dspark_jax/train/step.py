"""One optimizer step: pure functions of state and batch; the loop jits them."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from dspark_jax.base import Batch, Blocks, Params
from dspark_jax.config_training import Losses, TrainConfig
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors, vocabulary
from dspark_jax.train.losses import Supervision, Tally, averaged, base_share, per_weight
from dspark_jax.train.sweep import block_loss
from dspark_jax.train.vocabulary import Subset


@chex.dataclass(frozen=True)
class TrainState:
    """Everything a run must not lose.

    Attributes:
      step: optimizer steps taken.
      params: the drafter's fp32 parameters.
      optimizer: optax state.
      key: randomness of the anchors, a typed key; never changes, step is folded in.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: Any
    key: Array


@chex.dataclass(frozen=True)
class Knowledge:
    """What the frozen target says about a batch.

    Attributes:
      features: context features.
      hidden: final-normed hidden states.
      lent: its embedding and lm head.
    """

    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T D"]
    lent: Lent


def ask(target: Target, batch: Batch, target_layer_ids: tuple[int, ...]) -> Knowledge:
    """What the target says, without gradient; it runs unless the batch brings its features."""
    features, hidden = batch.features, batch.hidden
    if features is None:
        starts = None if batch.segments is None else anchors.starts(batch.segments)
        hidden, features, _ = target(batch.tokens, target_layer_ids, starts=starts)
    lent = Lent(embedding=target.embed_tokens[...], head=target.head)
    return jax.lax.stop_gradient(Knowledge(features=features, hidden=hidden, lent=lent))


def predictions(
    drafter: Drafter, known: Knowledge, blocks: Blocks, tokens: Int[Array, "B T"], chunk: int
) -> tuple[Float[Array, "B A K D"], Float[Array, "B A K D"]]:
    """Final-normed states that predict each label: the drafter's, and the target's.

    Attention weights exist for about `chunk` anchors of each row at a time.
    """
    length, where = tokens.shape[1], blocks.anchors
    rows = jnp.arange(tokens.shape[0])[:, None]
    slots = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    positions = slots if blocks.starts is None else slots - blocks.starts
    start = None if blocks.starts is None else blocks.starts[rows, where]
    context = drafter.backbone.context(known.features, positions)

    def some(part):
        lead, at, where, valid, start = part
        return drafter.hidden(known.lent, lead, at, context, where, valid, start)

    lead, at = tokens[rows, where], positions[rows, where]
    hidden = _over_anchors(some, (lead, at, where, blocks.valid, start), chunk)
    ahead = where[..., None] + jnp.arange(blocks.labels.shape[-1])
    pick = jax.vmap(lambda row, index: row[index])  # by row, so that no device needs another's
    return hidden, pick(known.hidden, jnp.minimum(ahead, length - 2))


def _over_anchors(
    function: Callable, parts: tuple[Shaped[Array, "B A"] | None, ...], chunk: int
) -> Float[Array, "B A K D"]:
    """function(parts), a divisor of A anchors at a time.

    The backward pass forms each part's activations anew: beside the lm head that costs little.
    """
    size = largest_divisor(parts[0].shape[1], chunk)
    if size == parts[0].shape[1]:
        return function(parts)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size), 1, 0)

    out = jax.lax.map(jax.checkpoint(function), jax.tree.map(split, parts))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def loss(
    drafter: Drafter,
    known: Knowledge,
    blocks: Blocks,
    tokens: Int[Array, "B T"],
    losses: Losses,
    chunk: int,
    subset: Subset | None = None,
    share: Float[Array, ""] | float = 0.0,
    mesh: Mesh | None = None,
    is_sum: bool = False,
) -> tuple[Float[Array, ""], Tally]:
    """The loss of a batch cut into blocks, with one global denominator.

    Args:
      drafter: what is trained.
      known: what the target says.
      blocks: the batch, cut.
      tokens: the batch's ids.
      losses: weights of the terms.
      chunk: blocks whose logits exist at once.
      subset: tokens of a sampled softmax, None = the whole vocabulary. Labels outside it weigh 0.
      share: of the base logits in the cross entropy.
      mesh: devices that share the work.
      is_sum: the batch is a part of one: leaves the division to `averaged`, behind the last part.

    Raises:
      ValueError: the drafter's vocabulary is a reduced one.
    """
    if drafter.config.draft_vocab_size:
        raise ValueError(
            f"draft_vocab_size = {drafter.config.draft_vocab_size}: drafters are trained over the "
            "whole vocabulary (frequent_tokens and drawn_tokens make that cheap)"
        )
    hidden, target_hidden = predictions(drafter, known, blocks, tokens, chunk)
    decay = losses.decay if losses.dpace is None else 0.0
    weights, labels, lent = anchors.weights(blocks.counted, decay), blocks.labels, known.lent
    if subset is not None:
        labels = vocabulary.locate(subset, labels, lent.head.shape[0])
        weights, labels = weights * (labels >= 0), jnp.maximum(labels, 0)
        lent = lent.replace(head=lent.head[subset.tokens])
    given = Supervision(
        prevs=blocks.prevs,
        labels=labels,
        counted=blocks.counted,
        weights=weights,
        target_hidden=target_hidden,
    )
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, given))
    return block_loss(losses, drafter.heads, *flat, lent, chunk, subset, share, mesh, is_sum)


def parts(rows: Any, count: int) -> Any:
    """Arrays [B, ...] -> [count, B / count, ...]; part i has every count-th row from i on.

    So each device has rows of every part, and none moves.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), rows)


def _sum_of_parts(function: Callable, rows: Any, count: int) -> Any:
    """Sum of function(*part), a part of the rows after the other."""
    if count == 1:
        return function(*rows)
    split = parts(rows, count)
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], split))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(*part)), None

    return jax.lax.scan(add, nothing, split)[0]


def train_step(
    optimizer: optax.GradientTransformation,
    graphdef: nnx.GraphDef,
    config: TrainConfig,
    state: TrainState,
    target: Target,
    batch: Batch,
    split: vocabulary.Split | None,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Samples anchors, forms the gradient, updates the parameters.

    Args:
      optimizer: the chain.
      graphdef: the drafter's structure.
      config: the run's: losses, numbers of anchors, of drawn tokens and of parts of the batch.
      state: before the step.
      target: the frozen model.
      batch: conversations.
      split: the vocabulary by frequency; None = the loss runs over all of it.
      mesh: devices that share the work.
    """
    shape, losses = nnx.merge(graphdef, state.params).config, config.losses
    key = jax.random.fold_in(state.key, state.step)
    blocks = anchors.blocks(key, batch, config.num_anchors, shape.block_size, losses.is_contiguous)
    draw_key = jax.random.fold_in(key, 1)
    subset = None if split is None else vocabulary.draw(draw_key, split, config.drawn_tokens)
    share = base_share(losses, state.step, config.steps)

    def objective(params, batch, blocks):
        known = ask(target, batch, shape.target_layer_ids)
        given = known, blocks, batch.tokens, losses, config.anchor_chunk, subset, share, mesh
        return loss(nnx.merge(graphdef, params), *given, is_sum=True)

    gradient_of = functools.partial(jax.value_and_grad(objective, has_aux=True), state.params)
    sums, gradient = _sum_of_parts(gradient_of, (batch, blocks), config.accumulate)
    mean = per_weight(sums[1])
    (value, tally), gradient = averaged(*sums), jax.tree.map(lambda g: g * mean, gradient)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    state = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        optimizer=optimizer_state,
        key=state.key,
    )
    return state, {
        "loss": value,
        "gradient_norm": optax.tree.norm(gradient),
        "tally": tally,
        "supervised": jnp.sum(batch.loss_mask),
    }
