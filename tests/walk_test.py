"""One scan for training and inference: `walk` is a Python loop, `follow` is `walk` taught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.verify import rule
from dspark_jax.sampling import draw
from dspark_jax.walk import Steps, follow, walk

BATCH, SIZE, WIDTH, VOCABULARY = 3, 4, 32, 97
TOLERANCE = 1e-5


def running(state, prev, hidden):
    """A head that remembers the whole prefix: a decaying sum of what it saw."""
    state = 0.5 * state + jax.nn.one_hot(prev, VOCABULARY) + hidden.mean(-1, keepdims=True)
    return state, jnp.roll(state, 1, -1)


@pytest.fixture(params=["none", "markov", "stateful"])
def head(request, tiny_drafter):
    """Initial state and transition."""
    if request.param == "stateful":
        return jnp.zeros((BATCH, VOCABULARY)), running
    if request.param == "markov":
        return tiny_drafter.heads.transition(BATCH, slice(VOCABULARY))
    return (), lambda state, prev, hidden: (state, jnp.zeros(()))


@pytest.fixture
def slots(key):
    """Base logits, hidden states and keys of a block."""
    return Steps(
        logits=jax.random.normal(key, (SIZE, BATCH, VOCABULARY)),
        hidden=jax.random.normal(jax.random.fold_in(key, 1), (SIZE, BATCH, WIDTH)),
        keys=jax.random.split(jax.random.fold_in(key, 2), (SIZE, BATCH)),
    )


def greedy(logits, keys):
    return jnp.argmax(logits, -1).astype(jnp.int32), None


def sampled(logits, keys):
    probs = jax.nn.softmax(logits)
    return draw(keys, probs), probs


ANCHOR = jnp.asarray([5, 0, 96], jnp.int32)


def looped(transition, choose, state, anchor, slots):
    """The definition: position after position."""
    prev, tokens, laws = anchor, [], []
    for k in range(SIZE):
        state, bias = transition(state, prev, slots.hidden[k])
        prev, law = choose(slots.logits[k] + bias, slots.keys[k])
        tokens.append(prev)
        laws.append(law)
    return jnp.stack(tokens), None if laws[0] is None else jnp.stack(laws)


@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["jit", "no jit"])
@pytest.mark.parametrize("choose", [greedy, sampled])
def test_a_walk_is_a_loop_over_positions(head, slots, choose, run):
    state, transition = head
    tokens, laws = run(lambda slots: walk(transition, choose, state, ANCHOR, slots))(slots)
    expected_tokens, expected_laws = looped(transition, choose, state, ANCHOR, slots)
    np.testing.assert_array_equal(tokens, expected_tokens)
    assert (laws is None) == (choose is greedy)
    if laws is not None:
        np.testing.assert_allclose(laws, expected_laws, atol=TOLERANCE)


@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["jit", "no jit"])
def test_following_a_walks_own_path_gives_its_logits(head, slots, run):
    state, transition = head

    def seen(logits, keys):
        return greedy(logits, keys)[0], logits

    tokens, logits = run(lambda slots: walk(transition, seen, state, ANCHOR, slots))(slots)
    prevs = jnp.concatenate([ANCHOR[None], tokens[:-1]])
    biases = run(lambda prevs: follow(transition, state, prevs, slots.hidden))(prevs)
    biases = biases.reshape(SIZE, *biases.shape[1:] or (1, 1))  # no head: one zero a position
    np.testing.assert_allclose(slots.logits + biases, logits, atol=TOLERANCE)


def test_the_first_position_follows_the_anchor(slots):
    """A head that forbids repeating its predecessor."""

    def never_twice(state, prev, hidden):
        return state, -1e9 * jax.nn.one_hot(prev, VOCABULARY)

    same = slots.replace(logits=jnp.broadcast_to(slots.logits[:1], slots.logits.shape))
    best, second = (jnp.argsort(-same.logits[0], -1)[:, i].astype(jnp.int32) for i in (0, 1))
    tokens, _ = walk(never_twice, greedy, (), best, same)
    np.testing.assert_array_equal(tokens, jnp.stack([second, best, second, best]))


def test_ties_go_to_the_lowest_id_at_every_position(slots):
    tied = slots.replace(logits=jnp.zeros_like(slots.logits).at[..., [7, 3, 50]].set(1.0))
    tokens, _ = walk(lambda s, p, h: (s, jnp.zeros(())), rule(None).choose, (), ANCHOR, tied)
    assert np.all(tokens == 3)
