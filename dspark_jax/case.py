"""Blocks of any drafter, as the checks and their statements see them."""

from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from dspark_jax.nn.drafter import Drafter, Heads, Lent
from dspark_jax.nn.target import Target
from dspark_jax.weights.tensors import typed

Module = TypeVar("Module", bound=nnx.Module)


@chex.dataclass(frozen=True)
class Case:
    """Blocks behind some contexts, as a drafter sees them.

    Attributes:
      drafter: the drafter.
      lent: the target's embedding and lm head.
      features: context features of the tokens before the anchors.
      anchors: last committed tokens.
      keys: randomness of each position.
    """

    drafter: Drafter
    lent: Lent
    features: Float[Array, "B T F"]
    anchors: Int[Array, "B"]
    keys: Key[Array, "B K"]

    def hidden(self, drafter: Drafter | None = None) -> Float[Array, "B K D"]:
        """Final-normed hidden states of the predicting rows, of this drafter or another."""
        drafter = self.drafter if drafter is None else drafter
        rows, length = self.features.shape[:2]
        context = drafter.backbone.context(
            self.features, jnp.broadcast_to(jnp.arange(length), (rows, length))
        )
        where = jnp.full((rows, 1), length)
        valid = jnp.ones((rows, 1), bool)
        return drafter.hidden(self.lent, self.anchors[:, None], where, context, where, valid)[:, 0]


def make_case(target: Target, drafter: Drafter, rows: int = 8, length: int = 24) -> Case:
    """A case of random tokens, read by the target; the same for the same shapes."""
    draws = np.random.default_rng(0).integers(target.config.vocab_size, size=(rows, length + 1))
    taps = drafter.config.target_layer_ids
    features = jax.jit(lambda t, x: t(x, taps)[1])(target, jnp.asarray(draws[:, :-1], jnp.int32))
    return Case(
        drafter=drafter,
        lent=Lent(embedding=target.embed_tokens[...], head=target.head),
        features=features,
        anchors=jnp.asarray(draws[:, -1], jnp.int32),
        keys=jax.random.split(jax.random.key(0), (rows, drafter.config.block_size)),
    )


def cast(module: Module, dtype: DTypeLike) -> Module:
    """The same parameters in another precision."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: typed(x, dtype), state))


def narrow(heads: Heads, lent: Lent, count: int) -> tuple[Heads, Lent]:
    """The first rows of every table over the vocabulary: the same formula, fewer tokens.

    Of a reduced draft vocabulary only what is drafted gets fewer.
    """
    heads, is_reduced = nnx.clone(heads), heads.draft_tokens is not None
    tables = [getattr(heads.head, "w2", None), heads.lm_head, heads.draft_tokens]
    tables += [] if is_reduced else [getattr(heads.head, "w1", None)]
    for table in tables:
        if table is not None:
            table.set_value(table[...][:count])
    return heads, lent if is_reduced else Lent(
        embedding=lent.embedding[:count], head=lent.head[:count]
    )
