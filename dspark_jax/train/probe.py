"""Looks at a run without changing it: on the batch at hand, on held-out conversations."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key

from dspark_jax.base import Batch, Params
from dspark_jax.config_training import TrainConfig
from dspark_jax.nn.target import Target
from dspark_jax.sharding import row_parts
from dspark_jax.train import anchors, holdout, metrics
from dspark_jax.train.data import Corpus
from dspark_jax.train.gradients import term_norms
from dspark_jax.train.losses import base_share
from dspark_jax.train.placement import Placement
from dspark_jax.train.step import TrainState, ask, loss, parts


@dataclasses.dataclass(frozen=True)
class Probe:
    """A run's measurements."""

    config: TrainConfig
    look: Callable[..., dict]  # as `look` below, compiled once per padded length
    held: Corpus
    place: Callable[[Batch], Batch]  # host to devices

    def batch(self, state: TrainState, batch: Batch) -> dict:
        """Accepted lengths, and norms if wanted, on the blocks of the step that comes next.

        Where that accumulates they are those of its first part.
        """
        key = jax.random.fold_in(state.key, state.step)
        how = self.config.term_gradients, False, self.config.accumulate
        found = self.look(state.params, state.step, batch, key, *how)
        norms = {name: float(x) for name, x in jax.device_get(found["norms"]).items()}
        return metrics.drafted([found]) | ({"term_gradients": norms} if norms else {})

    def held_out(self, state: TrainState, is_stopping: Callable[[], bool]) -> dict | None:
        """Losses and accepted lengths over all held-out conversations; None if stopped before.

        Their blocks are the same at every step, so that figures can be compared.
        """
        found, fixed = [], jax.random.key(self.config.seed)
        size = self.config.batch_size // self.config.accumulate
        rows = holdout.batches(self.held, size, self.config.length_multiple)
        for number, batch in enumerate(rows):
            if is_stopping():
                return None
            key = jax.random.fold_in(fixed, number)
            found.append(
                self.look(state.params, state.step, self.place(batch), key, False, True, 1)
            )
        return metrics.summary(found) | metrics.drafted(found)


def build(
    config: TrainConfig,
    graphdef: nnx.GraphDef,
    target: Target,
    held: Corpus,
    place: Placement,
) -> Probe:
    """The measurements of a run."""
    target_graphdef, target_params = nnx.split(target)

    @functools.partial(place.jit, static_argnums=(5, 6, 7))
    def jitted(target_params, params, step, batch, key, *how):
        target = nnx.merge(target_graphdef, target_params)
        return look(config, graphdef, target, params, step, batch, key, *how, place.mesh)

    return Probe(
        config=config,
        look=functools.partial(jitted, target_params),
        held=held,
        place=place.all_rows,
    )


def look(
    config: TrainConfig,
    graphdef: nnx.GraphDef,
    target: Target,
    params: Params,
    step: Int[Array, ""],
    batch: Batch,
    key: Key[Array, ""],
    with_norms: bool,
    with_loss: bool,
    count: int = 1,
    mesh: Mesh | None = None,
) -> dict:
    """Prefixes by how blocks are drafted; the loss over the whole vocabulary; gradient norms.

    Args:
      config: the run's.
      graphdef: the drafter's structure.
      target: the frozen model.
      params: the drafter's parameters.
      step: optimizer steps taken.
      batch: conversations.
      key: of the anchors.
      with_norms: also each loss term's gradient norm.
      with_loss: also the loss and what it is made of.
      count: parts of the batch, of which the first is looked at.
      mesh: devices that share the work.
    """
    drafter, losses, chunk = nnx.merge(graphdef, params), config.losses, config.anchor_chunk
    shape = drafter.config
    blocks = anchors.blocks(key, batch, config.num_anchors, shape.block_size, losses.is_contiguous)
    if count > 1:
        batch, blocks = jax.tree.map(lambda x: x[0], parts((batch, blocks), count))
    known = ask(target, batch, shape.target_layer_ids)
    share = base_share(losses, step, config.steps)

    def objective(params, losses, share):
        drafter = nnx.merge(graphdef, params)
        return loss(drafter, known, blocks, batch.tokens, losses, chunk, None, share, mesh)

    sizes = chunk, losses.candidates, row_parts(mesh)
    found = metrics.measure(drafter, known, blocks, batch.tokens, *sizes)
    seen = {"prefixes": found, "norms": {}}
    if with_norms:
        seen["norms"] = term_norms(objective, params, losses, share)
    if with_loss:
        seen["loss"], seen["tally"] = objective(params, losses, share)
    return seen
