"""The loss against its formula, in chunks of any size, and what no gradient may reach."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import Domino, DrafterConfig
from dspark_jax.config_training import DrafterRecipe, Losses, TrainConfig
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train import anchors
from dspark_jax.train import losses as module
from dspark_jax.train.losses import Supervision
from dspark_jax.train.parallel import Vocabulary
from dspark_jax.train.sweep import block_loss

from ..conftest import DRAFTER

N, K, D, V = 12, 4, 32, 97
WHOLE = Vocabulary()
LOSSES = Losses(cross_entropy=0.3, l1=0.7, confidence=1.3)
EVERYTHING = dataclasses.replace(LOSSES, base=0.6, selector=0.8, candidates=5, dpace=0.4)


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
    total, tally = jax.jit(module.chunk_loss, static_argnums=(0, 1))(
        LOSSES, WHOLE, tiny_drafter.heads, hidden, given, lent, None
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
    np.testing.assert_allclose(tally.weight, w.sum(), rtol=1e-6)
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


def gradient(drafter, hidden, given, lent, chunk, scale=1.0, losses=LOSSES):
    """Loss, tally, and the gradient with respect to heads and hidden states."""

    def total(heads, hidden):
        value, tally = block_loss(losses, heads, hidden, given, lent, chunk, None, 0.6)
        return scale * value, tally

    step = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(step)(drafter.heads, hidden)


@pytest.mark.parametrize(
    ("losses", "chunk"), [(LOSSES, 1), (LOSSES, 3), (LOSSES, N), (EVERYTHING, 3)]
)
def test_any_chunk_gives_the_unchunked_loss_and_gradient(
    tiny_drafter, hidden, given, lent, losses, chunk
):
    """One global denominator, D-PACE's too, which is known only when every chunk has been seen."""

    def total(heads, hidden):
        value, tally = module.chunk_loss(losses, WHOLE, heads, hidden, given, lent, None, 0.6)
        mean = 1 / (jax.lax.stop_gradient(tally.weight) + 1e-6)
        sums = module.TERMS
        return value * mean, tally.replace(**{name: tally[name] * mean for name in sums})

    whole = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    expected = whole(tiny_drafter.heads, hidden)
    actual = gradient(tiny_drafter, hidden, given, lent, chunk, losses=losses)
    chex.assert_trees_all_close(actual[0], expected[0], rtol=1e-5)
    chex.assert_trees_all_close(actual[1], expected[1], rtol=1e-4, atol=1e-6)


def test_the_gradient_scales_with_what_is_done_to_the_loss(tiny_drafter, hidden, given, lent):
    one = gradient(tiny_drafter, hidden, given, lent, 3)[1]
    three = gradient(tiny_drafter, hidden, given, lent, 3, 3.0)[1]
    chex.assert_trees_all_close(three, jax.tree.map(lambda g: 3 * g, one), rtol=1e-5)


def test_a_perfect_draft_is_as_long_as_its_block(tiny_drafter, given, lent):
    """F08: with four slots the term is minus four, and short of that it teaches."""
    heads = nnx.merge(*nnx.split(tiny_drafter.heads))
    heads.head.w2.set_value(jnp.zeros((V, 4)))
    every = given.replace(counted=jnp.ones((N, K), bool), weights=jnp.ones((N, K)))
    alone = Losses(cross_entropy=0.0, l1=0.0, confidence=0.0, length=1.0)

    def total(hidden, losses):
        return module.chunk_loss(losses, WHOLE, heads, hidden, every, lent, None)[0]

    run = jax.jit(jax.value_and_grad(total), static_argnums=1)
    perfect, _ = run(every.target_hidden, alone)
    np.testing.assert_allclose(perfect, -4.0 * N, rtol=1e-5)
    worse, gradient = run(0.5 * every.target_hidden, alone)
    assert worse > perfect and float(jnp.abs(gradient).max()) > 0


def test_a_perfect_draft_is_accepted_whole(tiny_drafter, given, lent):
    """Same hidden states and no bias: the draft's law is the target's."""
    heads = nnx.merge(*nnx.split(tiny_drafter.heads))
    heads.head.w2.set_value(jnp.zeros((V, 4)))
    counted = jnp.ones((N, K), bool)
    every = given.replace(counted=counted, weights=counted / (N * K))
    _, tally = jax.jit(module.chunk_loss, static_argnums=(0, 1))(
        LOSSES, WHOLE, heads, every.target_hidden, every, lent, None
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
        return module.chunk_loss(LOSSES, WHOLE, tiny_drafter.heads, constant, held, lent, None)[0]

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(lent, given.target_hidden)
    assert not jnp.any(gradients[0].head)
    assert not jnp.any(gradients[1])


def test_the_lent_head_gets_no_gradient_at_all(tiny_drafter, hidden, given, lent):
    def total(lent):
        return block_loss(LOSSES, tiny_drafter.heads, hidden, given, lent, 3)[0]

    assert not jnp.any(jax.jit(jax.grad(total))(lent).head)


def test_peak_memory_does_not_grow_with_the_blocks(tiny_drafter, optimised):
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
            return block_loss(Losses(), heads, hidden, given, lent, chunk)[0]

        step = jax.jit(jax.grad(total, argnums=(0, 1)))
        compiled = step.lower(heads, given.target_hidden, given, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = chunk * K * vocabulary * 4
    few, many = temporary(2 * chunk), temporary(64 * chunk)
    kept = 64 * chunk * K * width * 4
    assert few > logits
    assert many - few < 4 * kept < logits


def waves(amplitude: float, omega: float, phase: float, *shape: int) -> jax.Array:
    """The fill of the closed-form cases: element m, from 1, is A sin(omega m + phase)."""
    m = np.arange(1, np.prod(shape) + 1)
    return jnp.asarray((amplitude * np.sin(omega * m + phase)).reshape(shape), jnp.float32)


TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 2, 6, 5, 3, 0]])
TOY = Lent(embedding=waves(1.0, 0.5, 0.2, 7, 4), head=waves(1.0, 0.8, 0.9, 7, 4))


def toy_loss(head, losses: Losses, is_shifted: bool, has_hole: bool, share: float = 0.0):
    """The toy of Domino's specification: two blocks behind anchors 1 and 5 of ten tokens."""
    config = DrafterConfig(
        geometry=dataclasses.replace(DRAFTER.geometry, width=4),
        vocab_size=7,
        num_layers=1,
        block_size=4 if is_shifted else 3,
        target_layer_ids=(0,),
        mask_token=0,
        predict_from_anchor=is_shifted,
        head=head,
    )
    heads = Heads(config, jnp.float32, rngs=nnx.Rngs(0))
    if head is not None:
        heads.head.input_gates.set_value(waves(0.6, 0.7, 0.1, 9, 4))
        heads.head.state_gates.set_value(waves(0.6, 1.1, 0.3, 9, 3))
        heads.head.bottleneck.weight.set_value(waves(0.8, 0.9, 0.5, 2, 7))
        heads.head.w2.set_value(waves(1.0, 1.3, 0.7, 7, 2))
    hidden = waves(1.0, 0.33, 0.4, 2, 4, 4)[:, 0 if is_shifted else 1 :]
    mask = jnp.ones((1, 10), bool).at[0, 4].set(not has_hole)
    batch, at = Batch(tokens=TOKENS, loss_mask=mask), jnp.asarray([[1, 5]])
    blocks = anchors.cut(batch, at, jnp.ones((1, 2), bool), config.block_size, False)
    decay = losses.decay if losses.dpace is None else 0.0
    given = Supervision(
        prevs=blocks.prevs[0],
        labels=blocks.labels[0],
        counted=blocks.counted[0],
        weights=anchors.weights(blocks.counted[0], decay),
        target_hidden=hidden,
    )
    run = jax.jit(block_loss, static_argnums=(0, 5))
    return run(losses, heads, hidden, given, TOY, 1, None, share)


PLAIN = Losses(cross_entropy=1.0, l1=0.0, confidence=0.0, decay=2.0, is_contiguous=False)


@pytest.mark.parametrize(
    ("is_shifted", "has_hole", "final", "base", "mixed"),
    [
        (True, False, 3.219720, 2.808190, 3.116838),
        (False, False, 2.407867, 2.315687, 2.384822),
        (True, True, 3.229041, 2.783318, 3.117610),
        (False, True, 2.458193, 2.377556, 2.438034),
    ],
)
def test_dominos_closed_form_cases_hold(is_shifted, has_hole, final, base, mixed):
    """Both alignments, a hole in the supervision, lambda at 0.25."""
    head = Domino(rank=2, gru_width=3, pure_prefix=1)
    losses = dataclasses.replace(PLAIN, base=1.0)
    value, tally = toy_loss(head, losses, is_shifted, has_hole, 0.25)
    np.testing.assert_allclose(
        [tally.cross_entropy, tally.base, value], [final, base, mixed], atol=2e-6
    )


def test_dflash_and_dpace_closed_form_cases_hold():
    """D-PACE's normaliser is the sum of its weights."""
    for has_hole, loss in ((False, 2.315688), (True, 2.377556)):
        np.testing.assert_allclose(toy_loss(None, PLAIN, False, has_hole)[0], loss, atol=2e-6)
    value, tally = toy_loss(None, dataclasses.replace(PLAIN, dpace=0.5), False, False)
    np.testing.assert_allclose(value, 2.247147, atol=2e-6)
    np.testing.assert_allclose(tally.weight, 7.628008 / 2.247147, rtol=1e-5)
    cross_entropy = jnp.asarray([[1.583114, 2.690783, 1.713460], [2.310570, 3.430917, 2.466039]])
    weights = module.dpace_weights(cross_entropy, jnp.ones((2, 3)), 0.5)
    expected = [[1.114324, 0.511657, 0.189885], [0.987187, 0.437585, 0.153892]]
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    _, tally = toy_loss(None, dataclasses.replace(PLAIN, dpace=0.0), False, False)
    reached = np.cumprod(np.exp(-np.asarray(cross_entropy)), 1)  # alpha 0: nothing is added
    np.testing.assert_allclose(tally.weight, (reached * [1, 2, 3]).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "steps", "values"),
    [
        (0.5, 100, {0: 1, 25: 0.5, 50: 0, 75: 0}),
        (1.0, 7, {3: 4 / 7}),
        (0.0, 9, {0: 1, 1: 0}),
        (None, 9, {0: 1, 8: 1}),
    ],
)
def test_dominos_lambda_falls_as_its_schedule_says(ratio, steps, values):
    losses = dataclasses.replace(PLAIN, base=1.0, base_decay=ratio)
    for step, value in values.items():
        found = module.base_share(losses, jnp.asarray(step), steps)
        np.testing.assert_allclose(found, value, atol=1e-6)


@pytest.mark.parametrize("missing", ["mask", "inject"])
def test_the_selector_term_is_its_formula(key, missing):
    """DFlash-2, section 7: over the five best base logits, the label masked or injected."""
    base, bias = jax.random.normal(key, (2, 3, K, 11))
    labels = jax.random.randint(jax.random.fold_in(key, 2), (3, K), 0, 11)
    losses = Losses(selector=1.0, candidates=5, missing=missing)
    found = jax.jit(module.selector_loss, static_argnums=0)(losses, base, base + bias, labels)
    logits, absent = np.asarray(base + bias), 0
    for n, k in np.ndindex(3, K):
        ids = np.argsort(-np.asarray(base[n, k]))[:5].tolist()
        label = int(labels[n, k])
        if label not in ids:
            absent += 1
            ids[-1] = label
        expected = np.log(np.exp(logits[n, k, ids]).sum()) - logits[n, k, label]
        is_left_out = missing == "mask" and label not in np.argsort(-np.asarray(base[n, k]))[:5]
        np.testing.assert_allclose(found[n, k], 0 if is_left_out else expected, atol=1e-5)
    assert 0 < absent < 3 * K


@pytest.mark.parametrize("fields", [{"base": 1.5}, {"dpace": -0.1}, {"candidates": 0}])
def test_losses_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match=f"losses.{next(iter(fields))} = "):
        Losses(**fields)


def test_a_selector_is_trained_on_as_many_candidates_as_it_is_walked_over():
    given = {"data": "data.jsonl", "workdir": "run", "losses": Losses(selector=1.0, candidates=8)}
    with pytest.raises(ValueError, match=r"losses.candidates = 8, drafter.candidates = 16: "):
        TrainConfig(**given, drafter=DrafterRecipe(candidates=16))
    for candidates in (0, 8):
        TrainConfig(**given, drafter=DrafterRecipe(candidates=candidates))
