"""Stand-ins for a target and a drafter, and the plain loop that every decoder must agree with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.base import Draft
from dspark_jax.decode import generate
from dspark_jax.decode.engine import Engine
from dspark_jax.decode.generate import Models, Progress, Requests
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.sampling import Sampling

SLOTS = 64  # the tiny target's context
RAGGED = (3, 7, 12, 18)  # prompt lengths of a batch


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, tokens, positions, slot):
    """Logits behind one slot of whole sequences, without a cache."""
    target = nnx.merge(graphdef, params)
    hidden, _, _ = target(tokens, positions=positions)
    return target.logits(hidden[:, slot])


def all_positions(length: int, positions=None) -> np.ndarray:
    """Rotary positions of every slot; generated tokens go on from the prompt's last position."""
    where = np.arange(SLOTS, dtype=np.int32)
    if positions is not None:
        where[:length] = positions
        where[length:] = positions[-1] + 1 + np.arange(SLOTS - length)
    return where


def plain_greedy(target, prompts, positions=None) -> np.ndarray:
    """Prompts and the target's own continuations, by slot: an uncached pass for each token."""
    graphdef, params = nnx.split(target)
    lengths = np.asarray([len(prompt) for prompt in prompts])
    rows = len(lengths) if len(lengths) == 1 else 16  # two shapes
    tokens = np.zeros((rows, SLOTS), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    where = np.tile(all_positions(lengths[0], positions), (rows, 1))
    for slot in range(lengths.min(), SLOTS):
        best = np.argmax(forward(graphdef, params, tokens, where, slot - 1), -1)
        going = np.flatnonzero(slot >= lengths)
        tokens[going, slot] = best[going]
    return tokens[: len(lengths)]


def begin(
    engine: Engine,
    prompts: np.ndarray,
    lengths: np.ndarray,
    new: int,
    sampling: Sampling | None = None,
    keys=None,
    positions: np.ndarray | None = None,
    widths: np.ndarray | None = None,
) -> tuple[Requests, Progress]:
    """A batch behind its prefill, so that rounds can be run one by one. Prompts are padded."""
    batch, slots = prompts.shape
    lengths = np.asarray(lengths, np.int32)
    where = np.tile(np.arange(slots, dtype=np.int32), (batch, 1))
    where = where if positions is None else np.asarray(positions, np.int32)
    requests = Requests(
        sampling=sampling,
        limits=jnp.asarray(lengths + new),
        offsets=jnp.asarray(where[np.arange(batch), lengths - 1] + 1 - lengths),
        keys=jax.vmap(jax.random.key)(jnp.arange(batch)) if keys is None else keys,
        stop_tokens=jnp.asarray([-1], jnp.int32),
        widths=None if widths is None else jnp.asarray(widths, jnp.int32),
    )
    progress, _ = generate.prefill(
        engine.target,
        engine.proposer,
        engine.chunk,
        engine.models,
        requests,
        jnp.asarray(prompts, jnp.int32),
        jnp.asarray(where),
        jnp.asarray(lengths),
    )
    return requests, progress


def finish(engine: Engine, requests: Requests, progress: Progress) -> Progress:
    """The remaining rounds."""
    return generate.finish(engine.target, engine.proposer, engine.models, requests, progress)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Drafts, certain of each token, what its parameters hold for the row and the slot."""

    block_size: int

    def init_cache(self, params, batch, slots):
        """Nothing to remember."""
        return ()

    def extend(self, params, features, cache, slots, positions):
        """Nothing to remember."""
        return cache

    def draft(self, params, lent, anchors, cache, slots, positions, choose, keys):
        """The script's line."""
        return Draft(tokens=params[jnp.arange(slots.shape[0]), slots], probs=None)


def oracle(streams: np.ndarray, size: int) -> np.ndarray:
    """A script [B S K] that is always right about streams [B S] of prompts and continuations."""
    slots = np.arange(streams.shape[1])[:, None] + 1 + np.arange(size)
    return np.pad(streams, ((0, 0), (0, size)))[:, slots].astype(np.int32)


def half(streams: np.ndarray, size: int) -> np.ndarray:
    """Right about two tokens, wrong about the others."""
    script = oracle(streams, size)
    script[:, :, 2:] = (script[:, :, 2:] + 1) % 97
    return script


def stubborn(streams: np.ndarray, size: int) -> np.ndarray:
    """Always token 5."""
    return np.full((*streams.shape, size), 5, np.int32)


def adversary(streams: np.ndarray, size: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(0).integers(97, size=(*streams.shape, size), dtype=np.int32)


def replay(script: np.ndarray, stream: np.ndarray, length: int, limit: int):
    """Rounds, and rounds in which each position was committed, of one row's script [S K]."""
    rounds, survived = 0, np.zeros(script.shape[1], int)
    truth = oracle(stream[None], script.shape[1])[0]
    length += 1  # the prefill's token
    while length < limit:
        accepted = int(np.cumprod(script[length - 1] == truth[length - 1]).sum())
        survived[: min(accepted, limit - length)] += 1
        rounds += 1
        length = min(length + accepted + 1, limit)
    return rounds, tuple(survived.tolist())


def padded(prompt, slots: int = SLOTS) -> np.ndarray:
    """A prompt as a batch of one row of slots."""
    return np.pad(np.asarray(prompt, np.int32), (0, slots - len(prompt)))[None]


def _node(tokens, slots, vocabulary: int):
    """Row of a table for the prefix that ends at each slot; the prompt is slot 0 alone."""
    nodes = [jnp.zeros_like(slots)]
    for slot in (1, 2, 3):
        nodes.append(nodes[-1] * vocabulary + 1 + tokens[:, slot, None])
    return jnp.select([slots == i for i in range(3)], nodes[:3], nodes[3])


def _write(tokens, new, slots):
    where = slots[:, None] + jnp.arange(new.shape[1])
    rows = jnp.arange(new.shape[0])[:, None]
    return tokens.at[rows, where].set(new, mode="drop"), where


@dataclasses.dataclass(frozen=True)
class TableTarget:
    """A target whose parameters are next-token logits, one row for each prefix of length 0..3.

    Prefixes start behind a prompt of one token and are numbered breadth first; longer ones count
    as their first three tokens. Its context features are the tokens themselves.
    """

    vocabulary: int

    def init_cache(self, params, batch, slots):
        """Tokens by slot."""
        return jnp.zeros((batch, slots), jnp.int32)

    def states(self, params, tokens, cache, slots, positions):
        """The hidden state is the prefix."""
        cache, where = _write(cache, tokens, slots)
        hidden = _node(cache, where, self.vocabulary)[..., None]
        return hidden, tokens[..., None].astype(jnp.float32), cache

    def logits(self, params, hidden):
        """The prefix's row."""
        return params[hidden[..., 0]]

    def lend(self, params):
        """Nothing to lend."""
        return ()


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """A drafter with a table of its own, numbered alike; draws token by token through `choose`."""

    vocabulary: int
    block_size: int

    def init_cache(self, params, batch, slots):
        """Tokens by slot, as the target's features tell them."""
        return jnp.zeros((batch, slots), jnp.int32)

    def extend(self, params, features, cache, slots, positions):
        """Takes the tokens down."""
        return _write(cache, features[..., 0].astype(jnp.int32), slots)[0]

    def draft(self, params, lent, anchors, cache, slots, positions, choose, keys):
        """One draw a position, each fed on."""
        tokens, where = _write(cache, anchors[:, None], slots)
        chosen, laws = [], []
        for k in range(self.block_size):
            node = _node(tokens, where, self.vocabulary)[:, 0]
            token, law = choose(params[node], keys[:, k])
            tokens, where = _write(tokens, token[:, None], slots + k + 1)
            chosen.append(token)
            laws.append(law)
        probs = None if laws[0] is None else jnp.stack(laws, 1)
        return Draft(tokens=jnp.stack(chosen, 1), probs=probs)


@dataclasses.dataclass(frozen=True)
class HeadDrafter:
    """A real head's walk over hidden states [S K D] that its parameters hold for each slot."""

    graphdef: nnx.GraphDef
    block_size: int
    candidates: Candidates

    def init_cache(self, params, batch, slots):
        """Nothing to remember."""
        return ()

    def extend(self, params, features, cache, slots, positions):
        """Nothing to remember."""
        return cache

    def draft(self, params, lent, anchors, cache, slots, positions, choose, keys):
        """The product's own walk."""
        heads, own, hidden = nnx.merge(self.graphdef, params[0]), params[1], params[2][slots]
        base = heads.base_logits(own, hidden)
        return propose(heads, own, anchors, hidden, base, choose, keys, self.candidates)


def table_engine(proposer, target_table, proposer_params) -> Engine:
    """An engine over a table target with eight slots."""
    vocabulary = target_table.shape[1]
    return Engine(
        target=TableTarget(vocabulary),
        proposer=proposer,
        models=Models(
            target=jnp.asarray(target_table), proposer=jax.tree.map(jnp.asarray, proposer_params)
        ),
        vocab_size=vocabulary,
        max_length=8,
        chunk=8,
        smallest_bucket=8,
    )
