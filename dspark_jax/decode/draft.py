"""Anchor + context -> Draft: a drafter, or no drafter, as plain functions (`base.Proposer`)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from dspark_jax.base import Cache, Choose, Draft, Params
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.nn.backbone import Context
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.layers import write_slots


@dataclasses.dataclass(frozen=True)
class NoProposer:
    """Plain decoding: nothing is drafted, each round commits the target's next token."""

    block_size: int = 0

    def init_cache(self, params: Params, batch: int, slots: int) -> Cache:
        """Nothing to remember."""
        return ()

    def extend(self, params, features, cache, slots, positions) -> Cache:
        """Nothing to remember."""
        return cache

    def draft(self, params, lent, anchors, cache, slots, positions, choose, keys) -> Draft:
        """The empty draft."""
        return Draft(tokens=jnp.zeros((anchors.shape[0], 0), jnp.int32), probs=None)


@dataclasses.dataclass(frozen=True)
class DrafterProposer:
    """A drafter; its parameters are arguments, its structure is static."""

    graphdef: nnx.GraphDef
    block_size: int  # drafted tokens a round, at most those of the drafter
    candidates: Candidates = Candidates()

    def init_cache(self, params: Params, batch: int, slots: int) -> tuple[Context, ...]:
        """Empty keys and values of context features, one pair a layer."""
        drafter = self._merge(params)
        g = drafter.config.geometry
        dtype = drafter.backbone.fc.weight[...].dtype
        empty = jnp.zeros((batch, g.kv_heads, slots, g.head_dim), dtype)
        return tuple((empty, empty) for _ in drafter.backbone.layers)

    def extend(
        self,
        params: Params,
        features: Float[Array, "B T F"],
        cache: tuple[Context, ...],
        slots: Int[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> tuple[Context, ...]:
        """Writes features of tokens at slots[b], slots[b] + 1, ...; block rows are never kept."""
        where = slots[:, None] + jnp.arange(features.shape[1])
        drafter = self._merge(params)
        dtype = drafter.backbone.fc.weight[...].dtype
        new = drafter.backbone.context(features.astype(dtype), positions)
        return tuple(
            tuple(
                write_slots(old, jnp.swapaxes(rows, 1, 2), where)
                for old, rows in zip(layer, layer_new, strict=True)
            )
            for layer, layer_new in zip(cache, new, strict=True)
        )

    def draft(
        self,
        params: Params,
        lent: Lent,
        anchors: Int[Array, "B"],
        cache: tuple[Context, ...],
        slots: Int[Array, "B"],
        positions: Int[Array, "B"],
        choose: Choose,
        keys: Key[Array, "B K"],
    ) -> Draft:
        """One pass of the backbone over its whole block, then the walk."""
        drafter = self._merge(params)
        hidden = drafter.hidden(
            lent,
            anchors[:, None],
            positions[:, None],
            cache,
            slots[:, None],
            jnp.ones((anchors.shape[0], 1), bool),
        )[:, 0, : self.block_size]
        base = drafter.heads.base_logits(lent, hidden)
        return propose(drafter.heads, lent, anchors, hidden, base, choose, keys, self.candidates)

    def _merge(self, params: Params) -> Drafter:
        return nnx.merge(self.graphdef, params)


def proposer(
    drafter: Drafter | None, candidates: Candidates | None = None, block_size: int = 0
) -> tuple[DrafterProposer | NoProposer, Params]:
    """The functions and parameters of a drafter; None = plain decoding.

    Args:
      drafter: what drafts.
      candidates: how a block's vocabulary is cut; None = as the drafter says.
      block_size: drafted tokens a round; 0 = the drafter's own.

    Raises:
      ValueError: more tokens than the drafter's block: it has never seen such a block.
    """
    if drafter is None:
        return NoProposer(), ()
    graphdef, params = nnx.split(drafter)
    trained = drafter.config.block_size
    if not 0 <= block_size <= trained:
        raise ValueError(
            f"block_size = {block_size}: this drafter drafts 1..{trained} tokens a round "
            "(0 = all of them)"
        )
    size = block_size or trained
    if candidates is None:
        candidates = Candidates(count=drafter.config.candidates)
    return DrafterProposer(graphdef=graphdef, block_size=size, candidates=candidates), params
