"""A run's budget from its config and data, before anything is trained."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import DrafterConfig
from dspark_jax.config_training import TrainConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import data, holdout, loop, optimizer, packing, placement
from dspark_jax.train.budget import Budget, Memory, budget, size
from dspark_jax.train.placement import Placement
from dspark_jax.train.step import TrainState


def plan(
    config: TrainConfig, target: Target, corpus: data.Corpus, drafter: DrafterConfig
) -> Budget:
    """What the run will need; the step is compiled for its longest batch.

    Args:
      config: the run.
      target: shapes and dtypes are enough.
      corpus: the conversations.
      drafter: what is trained.
    """
    training, held = holdout.split(corpus, config.holdout, config.seed, config.batch_size)
    place, lengths = placement.of(config), data.lengths(training.conversations)
    rows = packing.pack(lengths, config.max_length) if config.pack else packing.alone(lengths)
    graphdef, params = nnx.split(target)
    target = nnx.merge(graphdef, place.outline(params))
    state = jax.eval_shape(lambda target: loop.start(config, target, drafter)[1], target)
    state = place.outline(state)
    batch = place.outline_rows(_batch(config, target, drafter, int(rows.lengths.max())))
    return budget(
        config,
        drafter,
        state,
        nnx.state(target),
        int(lengths.sum()),
        sum(int(c.loss_mask.sum()) for c in training.conversations),
        len(rows.lengths),
        (len(lengths), len(held.conversations)),
        _memory(config, target, training, drafter, state, batch, place),
    )


def _batch(config: TrainConfig, target: Target, drafter: DrafterConfig, longest: int) -> Batch:
    """Shapes of the largest batch."""
    length = -(-longest // config.length_multiple) * config.length_multiple
    dtype, is_cached = jax.tree.leaves(target)[0].dtype, config.max_cache_bytes > 0

    def make():
        tokens = jnp.zeros((config.batch_size, length), jnp.int32)

        def states(width: int):
            return jnp.zeros((*tokens.shape, width), dtype) if is_cached else None

        return Batch(
            tokens=tokens,
            loss_mask=tokens > 0,
            features=states(drafter.feature_width),
            hidden=states(drafter.geometry.width),
            segments=tokens if config.pack else None,
        )

    return jax.eval_shape(make)


def _memory(
    config: TrainConfig,
    target: Target,
    corpus: data.Corpus,
    drafter: DrafterConfig,
    state: TrainState,
    batch: Batch,
    place: Placement,
) -> Memory:
    """From the compiled step; nothing is run."""
    chain = optimizer.build(config.optimizer, config.steps)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(drafter, rngs=nnx.Rngs(0))))
    step, given = loop.jitted_step(config, chain, graphdef, target, corpus, state, place)
    found = step.lower(state, batch, *given).compile().memory_analysis()
    new = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)  # outputs not in place
    return Memory(
        parameters=size(state.params),
        optimizer=size(state.optimizer),
        target=size(given),
        batch=size(batch),
        temporary=found.temp_size_in_bytes + new,
        backend=jax.default_backend(),
    )
