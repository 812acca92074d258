"""Stand-ins for a target and a drafter, and the plain loop that every decoder must agree with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.base import Draft

SLOTS = 64  # the tiny target's context


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, tokens, positions):
    """Logits of a whole sequence, without a cache."""
    target = nnx.merge(graphdef, params)
    hidden, _, _ = target(tokens, positions=positions)
    return target.logits(hidden)


def plain_greedy(target, prompt, count, positions=None) -> tuple[int, ...]:
    """The target's own continuation: one uncached pass over everything for each token."""
    graphdef, params = nnx.split(target)
    length = len(prompt)
    tokens = np.zeros((1, SLOTS), np.int32)
    where = np.arange(SLOTS, dtype=np.int32)[None].copy()
    tokens[0, :length] = prompt
    if positions is not None:
        where[0, :length] = positions
        where[0, length:] = positions[-1] + 1 + np.arange(SLOTS - length)
    for slot in range(length, length + count):
        logits = np.asarray(forward(graphdef, params, tokens, where))
        tokens[0, slot] = np.argmax(logits[0, slot - 1])
    return tuple(tokens[0, length : length + count].tolist())


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
    """Rounds, and rounds in which each position stood, of one row's script [S K]."""
    rounds, survived = 0, np.zeros(script.shape[1], int)
    length += 1  # the prefill's token
    while length < limit:
        right = (
            script[length - 1] == np.pad(stream, (0, script.shape[1]))[length:][: script.shape[1]]
        )
        accepted = int(np.cumprod(right).sum())
        survived[:accepted] += 1
        rounds += 1
        length = min(length + accepted + 1, limit)
    return rounds, tuple(survived.tolist())


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
