"""The loss against its formula, in chunks of any size, and what no gradient may reach."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train import losses as module
from dspark_jax.train.losses import Supervision

N, K, D, V = 12, 4, 32, 97
LOSSES = Losses(cross_entropy=0.3, l1=0.7, confidence=1.3)


def supervision(key: jax.Array, blocks: int = N, width: int = D) -> Supervision:
    """Random labels, of which some do not count."""
    keys = jax.random.split(key, 4)
    counted = jnp.arange(K) < jax.random.randint(keys[0], (blocks, 1), 0, K + 1)
    weights = counted * jnp.exp(-jnp.arange(K) / 4)
    return Supervision(
        prevs=jax.random.randint(keys[1], (blocks, K), 0, V),
        labels=jax.random.randint(keys[2], (blocks, K), 0, V),
        counted=counted,
        weights=weights / weights.sum(),
        target_hidden=jax.random.normal(keys[3], (blocks, K, width)),
    )


@pytest.fixture(scope="module")
def given():
    return supervision(jax.random.key(1))


@pytest.fixture(scope="module")
def hidden():
    return jax.random.normal(jax.random.key(2), (N, K, D))


@pytest.fixture(scope="module")
def lent():
    embedding, head = 0.3 * jax.random.normal(jax.random.key(3), (2, V, D))
    return Lent(embedding=embedding, head=head)


def test_the_loss_is_its_formula(tiny_drafter, hidden, given, lent):
    total, tally = jax.jit(module.chunk_loss, static_argnums=0)(
        LOSSES, tiny_drafter.heads, hidden, given, lent, None
    )
    heads = tiny_drafter.heads
    w1, w2 = np.asarray(heads.head.w1[...]), np.asarray(heads.head.w2[...])
    head, h, w = (np.asarray(x, np.float64) for x in (lent.head, hidden, given.weights))
    prev_rows = w1[np.asarray(given.prevs)]

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    draft = softmax(h @ head.T + prev_rows @ w2.T)
    target = softmax(np.asarray(given.target_hidden) @ head.T)
    label = np.take_along_axis(draft, np.asarray(given.labels)[..., None], -1)[..., 0]
    l1 = np.abs(draft - target).sum(-1)
    proj = heads.confidence_head.proj
    z = np.concatenate([h, prev_rows], -1) @ np.asarray(proj.weight[0]) + float(proj.bias[0])
    accept = np.clip(1 - l1 / 2, 0, 1)
    terms = {
        "cross_entropy": -(w * np.log(label)).sum(),
        "l1": (w * l1).sum(),
        "confidence": (w * (np.logaddexp(0, z) - z * accept)).sum(),
    }
    expected = sum(getattr(LOSSES, name) * value for name, value in terms.items())
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for name, value in terms.items():
        np.testing.assert_allclose(tally[name], value, rtol=1e-5)
    counted = np.asarray(given.counted)
    agree = draft.argmax(-1) == target.argmax(-1)
    survival = {"expected": accept * counted, "greedy": agree * counted}
    np.testing.assert_allclose(tally.accepted, (accept * counted).sum(0), rtol=1e-5)
    np.testing.assert_allclose(tally.agreed, (agree * counted).sum(0))
    np.testing.assert_allclose(tally.counted, counted.sum(0))
    np.testing.assert_allclose(tally.blocks, counted[:, 0].sum())
    for name, values in survival.items():
        length = counted[:, 0].sum() + np.cumprod(values, -1).sum()
        np.testing.assert_allclose(tally[name], length, rtol=1e-5)


def gradient(drafter, hidden, given, lent, chunk, scale=1.0):
    """Loss, tally, and the gradient with respect to heads and hidden states."""

    def total(heads, hidden):
        value, tally = module.block_loss(LOSSES, heads, hidden, given, lent, chunk)
        return scale * value, tally

    step = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(step)(drafter.heads, hidden)


@pytest.mark.parametrize("chunk", [1, 3, N])
def test_any_chunk_gives_the_unchunked_loss_and_gradient(tiny_drafter, hidden, given, lent, chunk):
    def total(heads, hidden):
        return module.chunk_loss(LOSSES, heads, hidden, given, lent, None)

    whole = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    expected = whole(tiny_drafter.heads, hidden)
    actual = gradient(tiny_drafter, hidden, given, lent, chunk)
    chex.assert_trees_all_close(actual[0], expected[0], rtol=1e-5)
    chex.assert_trees_all_close(actual[1], expected[1], rtol=1e-4, atol=1e-6)


def test_the_gradient_scales_with_what_is_done_to_the_loss(tiny_drafter, hidden, given, lent):
    one = gradient(tiny_drafter, hidden, given, lent, 3)[1]
    three = gradient(tiny_drafter, hidden, given, lent, 3, 3.0)[1]
    chex.assert_trees_all_close(three, jax.tree.map(lambda g: 3 * g, one), rtol=1e-5)


def test_a_perfect_draft_is_accepted_whole(tiny_drafter, given, lent):
    """Same hidden states and no bias: the draft's law is the target's."""
    heads = nnx.merge(*nnx.split(tiny_drafter.heads))
    heads.head.w2.set_value(jnp.zeros((V, 4)))
    counted = jnp.ones((N, K), bool)
    every = given.replace(counted=counted, weights=counted / (N * K))
    _, tally = jax.jit(module.chunk_loss, static_argnums=0)(
        LOSSES, heads, every.target_hidden, every, lent, None
    )
    np.testing.assert_allclose(tally.l1, 0, atol=1e-6)
    np.testing.assert_allclose(tally.accepted, [N] * K, rtol=1e-6)
    assert tally.agreed.tolist() == [N] * K
    np.testing.assert_allclose(tally.expected / tally.blocks, K + 1, rtol=1e-6)
    assert float(tally.greedy / tally.blocks) == K + 1


def test_no_gradient_reaches_the_teacher(tiny_drafter, given, lent):
    """T08: with a constant draft, the lm head matters through the target's law alone."""
    constant = jnp.zeros((N, K, D))

    def total(lent, target_hidden):
        held = given.replace(target_hidden=target_hidden)
        return module.chunk_loss(LOSSES, tiny_drafter.heads, constant, held, lent, None)[0]

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(lent, given.target_hidden)
    assert not jnp.any(gradients[0].head)
    assert not jnp.any(gradients[1])


def test_the_lent_head_gets_no_gradient_at_all(tiny_drafter, hidden, given, lent):
    def total(lent):
        return module.block_loss(LOSSES, tiny_drafter.heads, hidden, given, lent, 3)[0]

    assert not jnp.any(jax.jit(jax.grad(total))(lent).head)


def test_peak_memory_does_not_grow_with_the_blocks(tiny_drafter):
    """T09: logits exist for one chunk; only the gradient of the hidden states is kept."""
    vocabulary, width, chunk = 4096, 8, 4
    geometry = dataclasses.replace(tiny_drafter.config.geometry, width=width)
    config = dataclasses.replace(tiny_drafter.config, geometry=geometry, vocab_size=vocabulary)
    heads = nnx.eval_shape(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(0)))

    def temporary(blocks: int) -> int:
        given = jax.eval_shape(lambda: supervision(jax.random.key(0), blocks, width))
        table = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)

        def total(heads, hidden, given, table):
            lent = Lent(embedding=table, head=table)
            return module.block_loss(Losses(), heads, hidden, given, lent, chunk)[0]

        step = jax.jit(jax.grad(total, argnums=(0, 1)))
        compiled = step.lower(heads, given.target_hidden, given, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = chunk * K * vocabulary * 4
    few, many = temporary(2 * chunk), temporary(64 * chunk)
    kept = 64 * chunk * K * width * 4
    assert few > logits
    assert many - few < 4 * kept < logits
