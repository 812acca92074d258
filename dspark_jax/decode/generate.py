"""Prefill, then rounds of draft, verify, commit until every row is done.

All of it is pure and jitted: `prefill`, `advance` (one round, for streaming) and `finish` (a
`lax.while_loop` over rounds). Rows advance by their own lengths. Caches are positional: whatever
lies behind a row's length is never visible and is overwritten before it could be, so that rolling
back a refused draft is nothing but not advancing the length.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.base import Cache, Draft, Params, Proposer, TargetFunctions, Verdict
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Lent
from dspark_jax.nn.target import Target
from dspark_jax.sampling import Sampling, fold

_DRAFT, _VERIFY = 0, 1  # purposes of randomness, folded into a round's keys


@dataclasses.dataclass(frozen=True)
class ModelTarget:
    """A `Target` as plain functions; its parameters are arguments, its structure is static."""

    graphdef: nnx.GraphDef
    target_layer_ids: tuple[int, ...]

    def init_cache(self, params: Params, batch: int, slots: int) -> Cache:
        """An empty cache."""
        return self._merge(params).init_cache(batch, slots)

    def states(self, params, tokens, cache, slots, positions):
        """Hidden states, context features and the written cache."""
        return self._merge(params)(tokens, self.target_layer_ids, cache, slots, positions)

    def logits(self, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Next-token logits."""
        return self._merge(params).logits(hidden)

    def lend(self, params: Params) -> Lent:
        """Embedding and lm head."""
        target = self._merge(params)
        return Lent(embedding=target.embed_tokens[...], head=target.head)

    def _merge(self, params: Params) -> Target:
        return nnx.merge(self.graphdef, params)


@chex.dataclass(frozen=True)
class Models:
    """Parameters of both sides, which travel as arguments.

    Attributes:
      target: of the target.
      proposer: of the drafter.
    """

    target: Params
    proposer: Params


@chex.dataclass(frozen=True)
class Requests:
    """What does not change while a batch is decoded.

    Attributes:
      sampling: None = every row is greedy.
      limits: length at which a row must stop.
      offsets: rotary position minus slot, beyond the prompt.
      keys: randomness of each row.
      stop_tokens: ids that end a row; -1 = none.
      widths: drafted tokens of a round that may stand; None = all.
    """

    sampling: Sampling | None
    limits: Int[Array, "B"]
    offsets: Int[Array, "B"]
    keys: Key[Array, "B"]
    stop_tokens: Int[Array, "N"]
    widths: Int[Array, "B"] | None = None


@chex.dataclass(frozen=True)
class Progress:
    """Where a batch stands.

    Attributes:
      tokens: prompt and committed tokens, by slot; what lies behind `lengths` is void.
      lengths: committed tokens, prompt included; the last one is the anchor.
      done: rows that take no more tokens.
      rounds: rounds a row took part in.
      survived: rounds in which draft position k was accepted and committed.
      target_cache: of the target, every slot before the anchor.
      context: the proposer's, every slot before the anchor.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, "B"]
    done: Bool[Array, "B"]
    rounds: Int[Array, "B"]
    survived: Int[Array, "B K"]
    target_cache: Cache
    context: Cache


@chex.dataclass(frozen=True)
class Commit:
    """Tokens a round adds.

    Attributes:
      tokens: accepted draft tokens and the bonus, then void.
      counts: how many of them are committed.
      done: rows that are finished.
    """

    tokens: Int[Array, "B N"]
    counts: Int[Array, "B"]
    done: Bool[Array, "B"]


@functools.partial(
    jax.jit, static_argnames=("target", "proposer", "chunk"), donate_argnames=("tokens",)
)
def prefill(
    target: TargetFunctions,
    proposer: Proposer,
    chunk: int,
    models: Models,
    requests: Requests,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    lengths: Int[Array, "B"],
) -> tuple[Progress, Commit]:
    """Runs the prompts in chunks of one fixed shape and commits each row's first token.

    Args:
      target: the target's functions.
      proposer: the proposer's functions.
      chunk: tokens a pass; divides S.
      models: parameters.
      requests: the batch.
      tokens: prompts, by slot.
      positions: rotary positions of prompt tokens.
      lengths: prompt lengths, at least 1; rows already at their limit are done from the start.
    """
    last, (cache, context) = _run_prompts(
        target, proposer, chunk, models, tokens, positions, lengths
    )
    batch = tokens.shape[0]
    progress = Progress(
        tokens=tokens,
        lengths=lengths,
        done=lengths >= requests.limits,
        rounds=jnp.zeros((batch,), jnp.int32),
        survived=jnp.zeros((batch, proposer.block_size), jnp.int32),
        target_cache=cache,
        context=context,
    )
    logits = target.logits(models.target, last)[:, None]
    nothing = Draft(tokens=jnp.zeros((batch, 0), jnp.int32), probs=None)
    keys = fold(fold(requests.keys, lengths - 1), _VERIFY)
    verdict = rule(requests.sampling).accept(nothing, logits, keys)
    return commit(requests, progress, nothing.tokens, verdict)


def _run_prompts(
    target: TargetFunctions,
    proposer: Proposer,
    chunk: int,
    models: Models,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    lengths: Int[Array, "B"],
) -> tuple[Array, tuple[Cache, Cache]]:
    """Hidden states of the last prompt tokens, and the filled caches, as many chunks as needed."""
    batch, slots = tokens.shape
    caches = (
        target.init_cache(models.target, batch, slots),
        proposer.init_cache(models.proposer, batch, slots),
    )

    def run(start, caches):
        cache, context = caches
        part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, 1)
        first = jnp.full((batch,), start, jnp.int32)
        where = jax.lax.dynamic_slice_in_dim(positions, start, chunk, 1)
        hidden, features, cache = target.states(models.target, part, cache, first, where)
        context = proposer.extend(models.proposer, features, context, first, where)
        return hidden, (cache, context)

    def body(i, carry):
        last, caches = carry
        hidden, caches = run(i * chunk, caches)
        inside = lengths - 1 - i * chunk
        here = hidden[jnp.arange(batch), jnp.clip(inside, 0, chunk - 1)]
        is_here = ((inside >= 0) & (inside < chunk))[:, None]
        return jnp.where(is_here, here, last), caches

    shape = jax.eval_shape(lambda: run(0, caches)[0][:, 0])
    chunks = (jnp.max(lengths) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, body, (jnp.zeros(shape.shape, shape.dtype), caches))


def advance_round(
    target: TargetFunctions,
    proposer: Proposer,
    models: Models,
    requests: Requests,
    progress: Progress,
) -> tuple[Progress, Commit]:
    """One round: draft behind the anchor, verify with the target, commit."""
    size = proposer.block_size
    slots = progress.lengths - 1
    positions = (slots + requests.offsets)[:, None] + jnp.arange(size + 1)
    rows = jnp.arange(slots.shape[0])
    anchors = progress.tokens[rows, slots]
    round_keys = fold(requests.keys, slots)
    draft_keys = fold(round_keys, _DRAFT)
    position_keys = jax.vmap(lambda k: fold(draft_keys, k), out_axes=1)(jnp.arange(size))
    decide = rule(requests.sampling)
    draft = proposer.draft(
        models.proposer,
        target.lend(models.target),
        anchors,
        progress.context,
        slots,
        positions[:, 0],
        decide.choose,
        position_keys,
    )
    block = jnp.concatenate([anchors[:, None], draft.tokens], 1)
    hidden, features, cache = target.states(
        models.target, block, progress.target_cache, slots, positions
    )
    logits, verify_keys = target.logits(models.target, hidden), fold(round_keys, _VERIFY)
    verdict = decide.accept(draft, logits, verify_keys, requests.widths)
    context = proposer.extend(models.proposer, features, progress.context, slots, positions)
    progress = progress.replace(
        target_cache=cache, context=context, rounds=progress.rounds + ~progress.done
    )
    progress, added = commit(requests, progress, draft.tokens, verdict)
    kept = jnp.minimum(verdict.accepted, added.counts)[:, None] > jnp.arange(size)
    return progress.replace(survived=progress.survived + kept), added


def commit(
    requests: Requests, progress: Progress, draft: Int[Array, "B K"], verdict: Verdict
) -> tuple[Progress, Commit]:
    """Writes accepted tokens and the bonus, cut at the first stop token and at the limit."""
    size = draft.shape[1] + 1
    index = jnp.arange(size)
    padded = jnp.pad(draft, ((0, 0), (0, 1)))
    new = jnp.where(index < verdict.accepted[:, None], padded, verdict.bonus[:, None])
    is_stop = jnp.isin(new, requests.stop_tokens)
    room = requests.limits - progress.lengths
    counts = jnp.minimum(verdict.accepted + 1, room)
    first_stop = jnp.where(jnp.any(is_stop, 1), jnp.argmax(is_stop, 1), size)
    stopped = first_stop < counts
    counts = jnp.where(progress.done, 0, jnp.minimum(counts, first_stop + 1))
    lengths = progress.lengths + counts
    done = progress.done | stopped | (lengths >= requests.limits)
    rows = jnp.arange(new.shape[0])[:, None]
    slots = jnp.where(
        index < counts[:, None], progress.lengths[:, None] + index, progress.tokens.shape[1]
    )
    tokens = progress.tokens.at[rows, slots].set(new, mode="drop")
    progress = progress.replace(tokens=tokens, lengths=lengths, done=done)
    return progress, Commit(tokens=new, counts=counts, done=done)


advance = jax.jit(
    advance_round, static_argnames=("target", "proposer"), donate_argnames=("progress",)
)


@functools.partial(jax.jit, static_argnames=("target", "proposer"), donate_argnames=("progress",))
def finish(
    target: TargetFunctions,
    proposer: Proposer,
    models: Models,
    requests: Requests,
    progress: Progress,
) -> Progress:
    """Rounds until every row is done, in one program without a host in between."""

    def body(progress):
        return advance_round(target, proposer, models, requests, progress)[0]

    return jax.lax.while_loop(lambda progress: ~jnp.all(progress.done), body, progress)
