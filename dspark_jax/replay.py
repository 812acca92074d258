"""Greedy decoding replayed: how many rounds a drafter would take over an answer that is known.

Greedy output is the target's own whatever the drafter, so one answer serves every cut of the
vocabulary: draft behind each of its tokens once, then compare and count, paired token by token.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dspark_jax.decode.propose import Candidates, candidate_ids, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.target import Target

_MULTIPLE, _CHUNK = 128, 32  # lengths are padded to a multiple; anchors drafted for at once


@dataclasses.dataclass(frozen=True)
class Replay:
    """Sums over the rounds of some answers; ratios are taken once, at the end."""

    rounds: int  # draft-and-verify rounds
    committed: int  # tokens they commit, the bonus included
    survived: tuple[int, ...]  # rounds in which draft position k was accepted
    recalled: tuple[int, ...]  # over all anchors: the target's token is among the candidates
    counted: tuple[int, ...]  # anchors with a token at position k

    @property
    def accepted_length(self) -> float:
        """Committed tokens / rounds."""
        return self.committed / self.rounds

    @property
    def recall(self) -> tuple[float, ...]:
        """Share of the target's tokens that are candidates, by position."""
        pairs = zip(self.recalled, self.counted, strict=True)
        return tuple(hits / max(count, 1) for hits, count in pairs)

    def __add__(self, other: "Replay") -> "Replay":
        """Two answers as one."""
        added = []
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            is_sum = isinstance(a, int)
            added.append(a + b if is_sum else tuple(x + y for x, y in zip(a, b, strict=True)))
        return Replay(*added)


def replay(
    target: Target, drafter: Drafter, tokens: Sequence[int], start: int, cuts: Sequence[Candidates]
) -> list[Replay]:
    """The rounds over one answer, for each cut.

    Args:
      target: whose greedy answer it is.
      drafter: what drafts.
      tokens: prompt and answer.
      start: index of the answer's first token, which comes from the prefill.
      cuts: of the vocabulary.

    Raises:
      ValueError: the answer has fewer than two tokens, so that no round is needed.
    """
    if len(tokens) < start + 2:
        raise ValueError(f"{len(tokens) - start} tokens of answer: a round needs at least two")
    padded = np.zeros(-(-len(tokens) // _MULTIPLE) * _MULTIPLE, np.int32)
    padded[: len(tokens)] = tokens
    where = np.arange(start, len(tokens) - 1)
    anchors = np.pad(where, (0, -len(where) % _CHUNK), mode="edge").reshape(-1, _CHUNK)
    context, lent = _read(target, drafter, jnp.asarray(padded))
    drafts, among = [], []
    for chunk in anchors:
        drafted, found = _drafts(drafter, lent, context, padded, jnp.asarray(chunk), tuple(cuts))
        drafts.append(drafted)
        among.append(found)
    drafts, among = (np.concatenate(x, 1)[:, : len(where)] for x in (drafts, among))
    return [_count(tokens, start, *cut) for cut in zip(drafts, among, strict=True)]


@jax.jit
def _read(target: Target, drafter: Drafter, tokens: Int[Array, "T"]):
    """Context keys and values of all tokens, and what the target lends."""
    _, features, _ = target(tokens[None], drafter.config.target_layer_ids)
    context = drafter.backbone.context(features, jnp.arange(tokens.shape[0])[None])
    return context, Lent(embedding=target.embed_tokens[...], head=target.head)


@functools.partial(jax.jit, static_argnums=5)
def _drafts(drafter, lent, context, tokens, anchors, cuts):
    """Drafts [cuts A K] behind anchors, and whether what follows is among each cut's tokens."""
    where, size = anchors[None], drafter.config.block_size
    valid = jnp.ones(where.shape, bool)
    hidden = drafter.hidden(lent, tokens[where], where, context, where, valid)[0]
    base, first = drafter.heads.base_logits(lent, hidden), tokens[anchors]
    keys = jnp.broadcast_to(jax.random.key(0), (len(anchors), size))
    truth = tokens[jnp.minimum(anchors[:, None] + 1 + jnp.arange(size), len(tokens) - 1)]
    drafts, found = [], []
    for cut in cuts:
        draft = propose(drafter.heads, lent, first, hidden, base, rule(None).choose, keys, cut)
        drafts.append(draft.tokens)
        found.append(_among(drafter, first, hidden, base, truth, cut))
    return jnp.stack(drafts), jnp.stack(found)


def _among(drafter, first, hidden, base, truth, cut: Candidates):
    heads = drafter.heads
    if not cut.count:
        return jnp.isin(truth, heads.tokens(jnp.arange(base.shape[-1])))
    ids, _ = candidate_ids(heads, first, hidden, base, cut)
    return jnp.any(heads.tokens(ids) == truth[..., None], -1)


def _count(tokens: Sequence[int], start: int, drafts: np.ndarray, among: np.ndarray) -> Replay:
    """Rounds over the answer; row i of the drafts stands behind token start + i."""
    size, end = drafts.shape[1], len(tokens)
    truth = np.pad(np.asarray(tokens), (0, size), constant_values=-1)
    ahead = np.arange(start, end - 1)[:, None] + 1 + np.arange(size)
    agreed = np.cumprod(drafts == truth[ahead], 1).sum(1)
    rounds, survived, at = 0, np.zeros(size, int), start
    while at < end - 1:
        accepted = int(agreed[at - start])
        survived[:accepted] += 1
        rounds, at = rounds + 1, min(at + accepted + 1, end - 1)
    inside = ahead < end
    return Replay(
        rounds=rounds,
        committed=end - 1 - start,
        survived=tuple(survived.tolist()),
        recalled=tuple((among & inside).sum(0).tolist()),
        counted=tuple(inside.sum(0).tolist()),
    )
