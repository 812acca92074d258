"""Hidden states -> Draft: the walk over the vocabulary, or over calibrated candidates.

Any first-order drafter can be run as a Selector without retraining: the k best base logits of each
position are its candidates, and their pairs' biases are looked up. Recurrent heads have their
vocabulary cut to the candidates, but not their steps.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.base import Choose, Draft
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Heads, Lent, first_order, has_table
from dspark_jax.walk import Steps, walk, walk_table, walk_table_associative


@dataclasses.dataclass(frozen=True)
class Candidates:
    """How a block's vocabulary is cut before the walk."""

    count: int = 0  # C, candidates a position; 0 = the whole vocabulary
    method: selector.TopK = "exact"  # how the best logits are found
    walk: Literal["scan", "associative"] = "scan"  # how a table is walked
    widen: int = 0  # also each predecessor's best successors, this many

    def __post_init__(self):
        if self.count < 0 or self.widen < 0:
            raise ValueError(f"candidates = {self.count}, widen = {self.widen}: must be >= 0")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.count and value != field.default:
                raise ValueError(f"{field.name} = {value!r} needs candidates: set candidates too")


def propose(
    heads: Heads,
    lent: Lent,
    anchors: Int[Array, "B"],
    hidden: Float[Array, "B K D"],
    base: Float[Array, "B K V"],
    choose: Choose,
    keys: Key[Array, "B K"],
    cut: Candidates,
) -> Draft:
    """Walks one block a row.

    Args:
      heads: the drafter's.
      lent: the target's embedding and lm head.
      anchors: the last committed tokens.
      hidden: final-normed hidden states.
      base: base logits, of the vocabulary or of the tokens the drafter can draft.
      choose: (logits, keys) -> index and law.
      keys: randomness of each position.
      cut: which candidates.
    """
    vocabulary = (base if heads.draft_tokens is None else lent.head.T).shape[-1]
    across = _position_first(base), _position_first(hidden), keys.T
    if not cut.count:
        state, transition = heads.transition(
            anchors.shape[0], slice(base.shape[-1]), lent.embedding
        )
        steps = Steps(logits=across[0], hidden=across[1], keys=across[2])
        tokens, laws = walk(transition, _named(choose, heads), state, anchors, steps)
        among = None if heads.draft_tokens is None else heads.draft_tokens[...]
        return _draft(tokens, laws, among, vocabulary)
    ids, is_new = candidate_ids(heads, anchors, hidden, base, cut)
    among = _position_first(heads.tokens(ids))
    logits = _position_first(jnp.where(is_new, jnp.take_along_axis(base, ids, -1), -jnp.inf))
    if has_table(heads.config):
        scores = _position_first(_scores(heads, anchors, hidden, ids))
        run = walk_table if cut.walk == "scan" else walk_table_associative
        index, laws = run(choose, logits, scores, across[2])
        tokens = jnp.take_along_axis(among, index[..., None], -1)[..., 0]
        return _draft(tokens, laws, among, vocabulary)
    state, transition = heads.restricted_transition(anchors.shape[0], lent.embedding)
    given = across[1], _position_first(ids)
    steps = Steps(logits=logits, hidden=given, keys=across[2], candidates=among)
    tokens, laws = walk(transition, choose, state, anchors, steps)
    return _draft(tokens, laws, among, vocabulary)


def candidate_ids(
    heads: Heads,
    anchors: Int[Array, "B"],
    hidden: Float[Array, "B K D"],
    base: Float[Array, "B K V"],
    cut: Candidates,
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """Places in the base logits that a block may walk over, ascending; False on repetitions.

    Raises:
      ValueError: the cut asks for what this head has not.
    """
    if cut.widen and not first_order(heads.config):
        raise ValueError(
            f"widen = {cut.widen} needs a Markov head's transition bias, not {heads.config.head}"
        )
    if cut.walk == "associative" and not has_table(heads.config):
        raise ValueError(
            f"walk = {cut.walk!r} needs a head that sees the previous token alone, or none, not "
            f"{heads.config.head}: its steps cannot be composed"
        )
    ids = selector.top_candidates(base, min(cut.count, base.shape[-1]), cut.method)
    if not cut.widen:
        return ids, jnp.ones_like(ids, bool)
    given = heads.head, anchors, ids, hidden, base.shape[-1], cut.widen
    return selector.widened(*given, heads.tokens(ids))


def _named(choose: Choose, heads: Heads) -> Choose:
    """Chooses ids of the target, which heads look at, where logits are of fewer tokens."""
    if heads.draft_tokens is None:
        return choose

    def chosen(logits, keys):
        index, law = choose(logits, keys)
        return heads.tokens(index), law

    return chosen


def _scores(heads, anchors, hidden, ids) -> Float[Array, "B K C C"]:
    if heads.head is None:
        return jnp.zeros((*ids.shape, ids.shape[-1]))
    return selector.pair_scores(heads.head, anchors, ids, hidden, heads.tokens(ids))


def _position_first(x: Array) -> Array:
    return jnp.swapaxes(x, 0, 1)


def _draft(
    tokens: Int[Array, "K B"],
    laws: Float[Array, "K B C"] | None,
    among: Int[Array, "*K_B C"] | None,
    vocabulary: int,
) -> Draft:
    """Rows first again; laws over some tokens are spread over the vocabulary, zero elsewhere."""
    if laws is not None and among is not None:
        positions, rows = jnp.indices(tokens.shape)
        empty = jnp.zeros((*tokens.shape, vocabulary), laws.dtype)
        laws = empty.at[positions[..., None], rows[..., None], among].add(laws)
    return Draft(tokens=tokens.T, probs=None if laws is None else _position_first(laws))
