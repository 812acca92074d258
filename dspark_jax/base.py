"""Records that travel between stages, and the callables stages are built from.

Axes, one letter each, everywhere: B batch, T context tokens, S cache slots, A anchors, K block
positions, C candidates, V vocabulary, D width, F feature width, R head rank.

Slots and positions: slot s of a cache belongs to the s-th token of a row; its rotary position is
s too, unless the caller's prompt skips positions.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import chex
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

Params = Any  # a pytree of arrays
HostArray = Array | np.ndarray  # batches are made on the host
Cache = Any  # a pytree of arrays, indexed by slot on one axis


@chex.dataclass(frozen=True)
class Batch:
    """Conversations for training.

    Attributes:
      tokens: ids, padded with zeros on the right.
      loss_mask: True on tokens the target itself wrote (answers and their end-of-turn).
      features: the target's context features, None = not computed yet.
      hidden: the target's final-normed hidden states, None likewise.
      segments: 1, 2, ... where several conversations share a row, 0 on padding; None = one a row.
    """

    tokens: Int[HostArray, "B T"]
    loss_mask: Bool[HostArray, "B T"]
    features: Float[HostArray, "B T F"] | None = None
    hidden: Float[HostArray, "B T D"] | None = None
    segments: Int[HostArray, "B T"] | None = None


@chex.dataclass(frozen=True)
class Blocks:
    """Training blocks cut behind sampled anchors.

    Attributes:
      anchors: index of each block's last known token, ascending; 0 for dummies.
      valid: False for dummy blocks.
      prevs: the token before each predicted one (teacher forcing).
      labels: the token each position predicts.
      counted: True where the label is supervised and all labels before it are.
      starts: first slot of each token's conversation; None = 0.
    """

    anchors: Int[Array, "B A"]
    valid: Bool[Array, "B A"]
    prevs: Int[Array, "B A K"]
    labels: Int[Array, "B A K"]
    counted: Bool[Array, "B A K"]
    starts: Int[Array, "B T"] | None = None


@chex.dataclass(frozen=True)
class Draft:
    """Tokens a drafter proposes behind the anchor.

    Attributes:
      tokens: the proposal, in order.
      probs: the law each token was drawn from; None when each is certain (greedy).
    """

    tokens: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None


@chex.dataclass(frozen=True)
class Verdict:
    """What the target says about a draft.

    Attributes:
      accepted: draft tokens that stand, counted from the left.
      bonus: the target's token behind them.
    """

    accepted: Int[Array, "B"]
    bonus: Int[Array, "B"]


Choose = Callable[..., tuple[Int[Array, "B"], Any]]  # (logits, slot keys) -> token, its law
Transition = Callable[..., tuple[Any, Array]]  # (state, prev, x) -> state, bias


@runtime_checkable
class TargetFunctions(Protocol):
    """A target as plain functions. Implementations are hashable: they are static under jit."""

    def init_cache(self, params: Params, batch: int, slots: int) -> Cache:
        """An empty cache."""
        ...

    def states(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: Cache,
        slots: Int[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> tuple[Array, Array, Cache]:
        """Runs tokens at slots[b], slots[b]+1, ...: hidden [B T ...], features [B T F], cache."""
        ...

    def logits(self, params: Params, hidden: Array) -> Float[Array, "... V"]:
        """Next-token logits of hidden states."""
        ...

    def lend(self, params: Params) -> Params:
        """What the proposer borrows: embedding and lm head."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """A source of drafts as plain functions; hashable, as above."""

    block_size: int

    def init_cache(self, params: Params, batch: int, slots: int) -> Cache:
        """An empty context cache."""
        ...

    def extend(
        self,
        params: Params,
        features: Array,
        cache: Cache,
        slots: Int[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> Cache:
        """Writes the context features of tokens at slots[b], slots[b]+1, ... ."""
        ...

    def draft(
        self,
        params: Params,
        lent: Params,
        anchors: Int[Array, "B"],
        cache: Cache,
        slots: Int[Array, "B"],
        positions: Int[Array, "B"],
        choose: Choose,
        keys: Key[Array, "B K"],
    ) -> Draft:
        """Proposes the block behind anchors at slots[b]; context is every slot before it."""
        ...
