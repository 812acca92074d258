"""The equivalences the project stands on, each stated as one thing computed in two ways.

They are written against arrays alone, so that they hold eagerly, under `jax.jit`, on a mesh, in
fp32 and in fp64: the mathematics agree, not a kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from dspark_jax.case import Case, narrow
from dspark_jax.config import Convolution, DrafterConfig, Markov
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Heads, Lent, first_order, has_table, rebuilt
from dspark_jax.sampling import Sampling, draw, law
from dspark_jax.train.losses import draft_logits

_FEW = 16  # candidates where a statement needs some
_NARROW = 128  # vocabulary where a statement needs a table over all of it


@dataclasses.dataclass(frozen=True)
class Statement:
    """Two ways to one result."""

    says: str  # in words
    applies: Callable[[DrafterConfig], bool]  # to which drafters
    sides: Callable[[Case], tuple[Any, Any]]  # trees of arrays
    is_exact: bool = False  # bit for bit


def _greedy(logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> tuple[Array, Array]:
    """The best token, and the corrected logits as its "law", so that they can be compared."""
    del keys
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


def _sampled(logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> tuple[Array, Array]:
    """A draw at temperature 1."""
    rows = logits.shape[:1]
    probs = law(
        logits,
        Sampling(temperature=jnp.ones(rows), top_k=jnp.zeros(rows, int), top_p=jnp.ones(rows)),
    )
    return draw(keys, probs), logits


def loop(
    heads: Heads, lent: Lent, anchors: Array, hidden: Array, base: Array, choose, keys: Array
) -> tuple[Array, Array]:
    """The walk as a Python loop over positions: tokens [B K] and corrected logits [B K V]."""
    state, transition = heads.transition(len(anchors), slice(base.shape[-1]), lent.embedding)
    prev, tokens, logits = anchors, [], []
    for k in range(base.shape[1]):
        state, bias = transition(state, prev, hidden[:, k])
        index, corrected = choose(base[:, k] + bias, keys[:, k])
        prev = heads.tokens(index)
        tokens.append(prev)
        logits.append(corrected)
    return jnp.stack(tokens, 1), jnp.stack(logits, 1)


def _parts(case: Case, count: int | None = None):
    """Heads, lent tables, anchors, hidden states and base logits, over all tokens or the first."""
    heads, lent, hidden = case.drafter.heads, case.lent, case.hidden()
    if count is not None:
        heads, lent = narrow(heads, lent, min(count, lent.head.shape[0]))
    anchors = case.anchors % lent.head.shape[0]
    return heads, lent, anchors, hidden, heads.base_logits(lent, hidden)


def _best(base: Array) -> Int[Array, "B K C"]:
    return selector.top_candidates(base, min(_FEW, base.shape[-1]))


def _drafted(heads: Heads, base: Array, laws: Array) -> Float[Array, "B K V"]:
    """Laws over the target's vocabulary, of the tokens that base logits are of."""
    return laws[..., heads.tokens(jnp.arange(base.shape[-1]))]


def pairs_are_the_head(case: Case):
    """The table of candidate pairs against the head's bias over the whole vocabulary."""
    heads, _, anchors, hidden, base = _parts(case)
    ids = _best(base)
    prev = selector.predecessors(anchors, heads.tokens(ids))
    rows = jnp.broadcast_to(hidden[:, :, None], (*prev.shape, hidden.shape[-1]))
    _, transition = heads.transition(prev.size, slice(base.shape[-1]))
    _, bias = transition((), prev.reshape(-1), rows.reshape(prev.size, -1))
    bias = bias.reshape(*prev.shape, -1)
    at = jnp.broadcast_to(ids[:, :, None], (*prev.shape, ids.shape[-1]))
    theirs = jnp.take_along_axis(bias, at, -1)
    unary = jnp.take_along_axis(base, ids, -1)[:, :, None]
    ours = selector.pair_scores(heads.head, anchors, ids, hidden, heads.tokens(ids))
    return unary + ours, unary + theirs


def vmaps_are_an_einsum(case: Case):
    """The four vmaps of `pair_bias` against one contraction."""
    heads, _, anchors, hidden, base = _parts(case)
    ids, head = _best(base), heads.head
    prev = selector.predecessors(anchors, heads.tokens(ids))
    rows = head.rows(prev)
    gates = jnp.broadcast_to(head.gate(prev, hidden[..., None, :]), rows.shape)
    table = jnp.einsum("bkpr,bkpr,bknr->bkpn", rows, gates, head.w2[...][ids])
    return selector.pair_scores(head, anchors, ids, hidden, heads.tokens(ids)), table


def all_candidates_are_the_vocabulary(case: Case):
    """C = V: tokens of a greedy and of a sampled walk, with the same noise."""
    heads, lent, anchors, hidden, base = _parts(case, _NARROW)
    given = (heads, lent, anchors, hidden, base)
    cut = Candidates(count=base.shape[-1])
    ours = [propose(*given, choose, case.keys, cut).tokens for choose in (_greedy, _sampled)]
    theirs = [loop(*given, choose, case.keys)[0] for choose in (_greedy, _sampled)]
    return ours, theirs


def candidates_are_a_mask(case: Case):
    """C < V: tokens and corrected logits against the walk over logits masked to candidates."""
    heads, lent, anchors, hidden, base = _parts(case)
    ids = _best(base)
    kept = jnp.any(jax.nn.one_hot(ids, base.shape[-1], dtype=bool), -2)
    masked = jnp.where(kept, base, -jnp.inf)
    cut = Candidates(count=ids.shape[-1])
    draft = propose(heads, lent, anchors, hidden, base, _greedy, case.keys, cut)
    tokens, logits = loop(heads, lent, anchors, hidden, masked, _greedy, case.keys)
    at = jnp.take_along_axis
    return (draft.tokens, at(draft.probs, heads.tokens(ids), -1)), (tokens, at(logits, ids, -1))


def walks_agree(case: Case):
    """Scan, associative scan and a Python loop over one table, greedy and sampled."""
    heads, lent, anchors, hidden, base = _parts(case)
    ours, theirs = [], []
    for choose in (_greedy, _sampled):
        for walk in ("scan", "associative"):
            cut = Candidates(count=_FEW, walk=walk)
            ours.append(propose(heads, lent, anchors, hidden, base, choose, case.keys, cut).tokens)
            theirs.append(_table_loop(case, heads, anchors, hidden, base, choose))
    return ours, theirs


def _table_loop(case: Case, heads: Heads, anchors, hidden, base, choose) -> Int[Array, "B K"]:
    ids = _best(base)
    logits = jnp.take_along_axis(base, ids, -1)
    scores = jnp.zeros((*ids.shape, ids.shape[-1]))
    if heads.head is not None:
        scores = selector.pair_scores(heads.head, anchors, ids, hidden, heads.tokens(ids))
    rows, index, tokens = jnp.arange(len(anchors)), jnp.zeros_like(anchors), []
    for k in range(ids.shape[1]):
        index, _ = choose(logits[:, k] + scores[rows, k, index], case.keys[:, k])
        tokens.append(heads.tokens(ids[rows, k, index]))
    return jnp.stack(tokens, 1)


def following_is_walking(case: Case):
    """The training loss's logits along a walk's own tokens are those the walk saw."""
    heads, lent, anchors, hidden, base = _parts(case)
    whole = Candidates()
    draft = propose(heads, lent, anchors, hidden, base, _sampled, case.keys, whole)
    prevs = jnp.concatenate([anchors[:, None], draft.tokens[:, :-1]], 1)
    logits = draft_logits(heads, lent, hidden, prevs, slice(base.shape[-1]))[1]
    return _drafted(heads, base, draft.probs), logits


def identity_convolutions_are_none(case: Case):
    """Hidden states with convolutions at their identity against a backbone that has none."""
    config = case.drafter.config
    with_conv = dataclasses.replace(
        config, convolution=config.convolution or Convolution(group_size=1)
    )
    without = dataclasses.replace(config, convolution=None)
    return tuple(case.hidden(rebuilt(case.drafter, c)) for c in (with_conv, without))


def a_zero_head_is_dflash(case: Case):
    """With W2 = 0 the walk takes each position's best base logit."""
    heads, lent, anchors, hidden, base = _parts(case)
    heads = nnx.clone(heads)
    if heads.head is not None:
        heads.head.w2.set_value(jnp.zeros_like(heads.head.w2[...]))
    draft = propose(heads, lent, anchors, hidden, base, _greedy, case.keys, Candidates())
    best = heads.tokens(jnp.argmax(base, -1).astype(jnp.int32))
    return (draft.tokens, _drafted(heads, base, draft.probs)), (best, base)


def conversions_round_trip(case: Case):
    """Markov -> Selector -> Markov: the same tables, hence the same table of pairs."""
    heads, _, anchors, hidden, base = _parts(case)
    there = selector.markov_to_selector(heads.head)
    back = selector.selector_to_markov(there)
    ids = _best(base)
    rows = there.predecessor[selector.predecessors(anchors, ids)]
    gate = jnp.einsum("bkd,rd->bkr", hidden, there.projection)
    formula = jnp.einsum("bkpr,bkr,bknr->bkpn", rows, gate, there.successor[ids])
    table = selector.pair_scores(back, anchors, ids, hidden)
    return (table, nnx.state(back)), (formula, nnx.state(heads.head))


def _gate(*names: str) -> Callable[[DrafterConfig], bool]:
    return lambda c: isinstance(c.head, Markov) and c.head.gate in names


def _is_selector(config: DrafterConfig) -> bool:
    return _gate("linear")(config) and not config.draft_vocab_size


def _always(config: DrafterConfig) -> bool:
    return True


STATEMENTS = (
    Statement(
        "Selector with unit gate == vanilla Markov on the candidates",
        _gate("vanilla"),
        pairs_are_the_head,
    ),
    Statement(
        "Selector with linear gate == linear-gated Markov on the candidates",
        _gate("linear"),
        pairs_are_the_head,
    ),
    Statement(
        "Selector with sigmoid gate == gated Markov on the candidates",
        _gate("gated"),
        pairs_are_the_head,
    ),
    Statement("vmap of vmap == einsum", first_order, vmaps_are_an_einsum),
    Statement(
        "C = V candidate walk == sequential walk on the first 128 tokens (greedy and sampled)",
        _always,
        all_candidates_are_the_vocabulary,
        is_exact=True,
    ),
    Statement(
        "C < V candidate walk == sequential walk on masked logits", _always, candidates_are_a_mask
    ),
    Statement(
        "scan == associative == loop (greedy and sampled)", has_table, walks_agree, is_exact=True
    ),
    Statement("follow == walk along its own path", _always, following_is_walking),
    Statement("identity convolutions == none", _always, identity_convolutions_are_none),
    Statement(
        "zero head == DFlash",
        _always,
        a_zero_head_is_dflash,
    ),
    Statement("Markov -> Selector -> Markov", _is_selector, conversions_round_trip),
)
