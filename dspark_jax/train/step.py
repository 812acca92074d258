"""One optimizer step: pure functions of state and batch; the loop jits them."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from dspark_jax.base import Batch, Blocks, Params
from dspark_jax.config import Losses
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors
from dspark_jax.train.losses import Supervision, Tally, block_loss


@chex.dataclass(frozen=True)
class TrainState:
    """Everything a run must not lose.

    Attributes:
      step: optimizer steps taken.
      params: the drafter's fp32 parameters.
      optimizer: optax state.
      key: randomness of the anchors; never changes, step is folded in.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: Any
    key: Key[Array, ""]


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
        hidden, features, _ = target(batch.tokens, target_layer_ids)
    lent = Lent(embedding=target.embed_tokens[...], head=target.head)
    return jax.lax.stop_gradient(Knowledge(features=features, hidden=hidden, lent=lent))


def loss(
    drafter: Drafter, known: Knowledge, blocks: Blocks, tokens: Array, losses: Losses, chunk: int
) -> tuple[Float[Array, ""], Tally]:
    """The loss of a batch cut into blocks, with one global denominator."""
    length = tokens.shape[1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    context = drafter.backbone.context(known.features, positions)
    visible = jnp.arange(length) < blocks.anchors[..., None]
    hidden = drafter.hidden(
        known.lent, tokens[rows, blocks.anchors], blocks.anchors, context, visible, blocks.valid
    )
    weights = anchors.weights(blocks.counted, losses.decay)
    ahead = jnp.arange(blocks.labels.shape[-1])
    before_label = jnp.minimum(blocks.anchors[..., None] + ahead, length - 2)
    given = Supervision(
        prevs=blocks.prevs,
        labels=blocks.labels,
        counted=blocks.counted,
        weights=weights / (jnp.sum(weights) + 1e-6),
        target_hidden=known.hidden[rows[..., None], before_label],
    )
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, given))
    return block_loss(losses, drafter.heads, *flat, known.lent, chunk)


def train_step(
    optimizer: optax.GradientTransformation,
    graphdef: nnx.GraphDef,
    losses: Losses,
    num_anchors: int,
    chunk: int,
    state: TrainState,
    target: Target,
    batch: Batch,
) -> tuple[TrainState, dict[str, Array]]:
    """Samples anchors, forms the gradient, updates the parameters."""
    config = nnx.merge(graphdef, state.params).config
    known = ask(target, batch, config.target_layer_ids)
    key = jax.random.fold_in(state.key, state.step)
    blocks = anchors.cut(
        batch, *anchors.sample(key, batch.loss_mask, num_anchors), config.block_size
    )

    def objective(params):
        drafter = nnx.merge(graphdef, params)
        return loss(drafter, known, blocks, batch.tokens, losses, chunk)

    (value, tally), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
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
    }
