"""AdamW with a linear warm-up and a cosine to zero."""

import jax
import optax

from dspark_jax.base import Params
from dspark_jax.config_training import Optimizer


def schedule(config: Optimizer, steps: int) -> optax.Schedule:
    """Peak * (t + 1) / w during w warm-up steps, then half a cosine (DeepSpec's closed form)."""
    warmup = int(config.warmup * steps)
    peak = config.learning_rate
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    fall = optax.cosine_decay_schedule(peak, max(steps - warmup, 1))
    return optax.join_schedules([rise, fall], [warmup])


def build(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """The chain: clip by global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(params: Params) -> Params:
    """Everything but stored constants, which no gradient reaches."""
    return jax.tree.map_with_path(
        lambda path, _: "layer_scalar" not in jax.tree_util.keystr(path), params
    )
