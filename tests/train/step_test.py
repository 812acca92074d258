"""The training step, and what training and decoding must share."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import Convolution, Domino, DrafterConfig, Markov, Recurrent
from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.decode.draft import proposer
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors, initial, optimizer, step
from dspark_jax.train.step import Knowledge, TrainState

from ..conftest import DRAFTER

TOKENS = jnp.asarray([[5, 17, 3, 88, 41, 2, 60, 9, 33, 71, 12, 50]])


@pytest.fixture(scope="module")
def known(tiny_target):
    """What the tiny target says about TOKENS."""
    batch = Batch(tokens=TOKENS, loss_mask=jnp.ones(TOKENS.shape, bool))
    return jax.jit(step.ask, static_argnums=2)(tiny_target, batch, (0, 2))


def blocks_behind(chosen: tuple[int, ...], block_size: int):
    """Blocks of TOKENS behind some anchors, everything supervised."""
    batch = Batch(tokens=TOKENS, loss_mask=jnp.ones(TOKENS.shape, bool))
    at = jnp.asarray([chosen])
    return anchors.cut(batch, at, jnp.ones(at.shape, bool), block_size)


def test_a_block_learns_from_features_before_its_anchor_alone(tiny_drafter, known):
    """T01: overlapping blocks behind 3 and 5 leak nothing to each other."""
    blocks = blocks_behind((3, 5), 4)

    def loss_of(features, block, anchors_there):
        here = (jnp.arange(2) == block)[None, :, None]
        some = blocks.replace(counted=blocks.counted & here, valid=anchors_there)
        told = known.replace(features=features)
        return step.loss(tiny_drafter, told, some, TOKENS, Losses(), 2)[0]

    both = jnp.ones((1, 2), bool)
    gradient = jax.jit(jax.value_and_grad(loss_of))
    for block, anchor in enumerate((3, 5)):
        value, felt = gradient(known.features, block, both)
        felt = jnp.abs(felt[0]).max(-1)
        assert (felt[:anchor] > 0).all()
        assert not felt[anchor:].any()
        alone, _ = gradient(known.features, block, jnp.arange(2)[None] == block)
        chex.assert_trees_all_close(value, alone, rtol=1e-6)


def random_drafter(config: DrafterConfig) -> Drafter:
    """A drafter of random parameters, made by NumPy: nothing to compile."""
    random = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))

    def draw(x):
        noise = random.normal(size=x.shape).astype(np.float32)
        return jnp.asarray(noise / 8 if len(x.shape) > 1 else 1 + noise / 8)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def log_law_in_training(drafter, known, blocks):
    """Log-probability of every token at every position, read off the loss itself.

    With the cross entropy as only term and one position counted, the loss is the negative
    log-probability of that position's label.
    """
    only_cross_entropy = Losses(cross_entropy=1.0, l1=0.0, confidence=0.0, decay=0.0)
    _, count, size = blocks.labels.shape

    def entry(place, token):
        one = (jnp.arange(count * size) == place).reshape(1, count, size)
        asked = blocks.replace(counted=one, labels=jnp.full_like(blocks.labels, token))
        loss, _ = step.loss(drafter, known, asked, TOKENS, only_cross_entropy, count)
        return -loss * (1 + 1e-6)

    places, tokens = jnp.arange(count * size), jnp.arange(97)
    table = jax.vmap(jax.vmap(entry, (None, 0)), (0, None))(places, tokens)
    return table.reshape(count, size, 97)


@jax.jit
def log_law_in_decoding(target, drafter, chosen, forced):
    """The same from the decoding path: cached target, cached context, the walk."""
    count, length = chosen.shape[0], TOKENS.shape[1]
    functions, params = proposer(drafter)
    tokens, first = jnp.repeat(TOKENS, count, 0), jnp.zeros((count,), jnp.int32)
    cache, context = target.init_cache(count, 16), functions.init_cache(params, count, 16)
    for start in range(0, length, 4):
        slots, where = first + start, jnp.broadcast_to(start + jnp.arange(4), (count, 4))
        part = tokens[:, start : start + 4]
        _, features, cache = target(part, drafter.config.target_layer_ids, cache, slots)
        context = functions.extend(params, features, context, slots, where)
    keys = jax.random.wrap_key_data(  # keys carry the tokens to choose
        jnp.stack([forced, forced], -1).astype(jnp.uint32), impl="threefry2x32"
    )

    def choose(logits, keys):
        return jax.random.key_data(keys)[..., 0].astype(jnp.int32), logits

    lent = step.ask(target, Batch(tokens=TOKENS, loss_mask=TOKENS > 0), ()).lent
    anchor_tokens = TOKENS[0, chosen]
    draft = functions.draft(params, lent, anchor_tokens, context, chosen, chosen, choose, keys)
    return jax.nn.log_softmax(draft.probs)


@pytest.mark.parametrize(
    ("head", "predict_from_anchor", "convolution", "window"),
    [
        (None, False, None, None),
        pytest.param(None, True, None, None, marks=pytest.mark.slow),
        (Markov(rank=4), True, None, None),
        (Markov(rank=4), False, None, 5),
        (Markov(rank=4, gate="gated"), True, None, None),
        (Markov(rank=4, gate="linear"), False, Convolution(kernel_size=2, group_size=8), None),
        (Recurrent(rank=4), True, None, None),
        (Domino(rank=4, gru_width=6, pure_prefix=1), False, None, None),
    ],
)
def test_training_and_decoding_draft_alike(
    tiny_target, tiny_drafter, known, head, predict_from_anchor, convolution, window
):
    """T02, F09: the same law at every position of a block, whichever path computes it.

    Behind the anchors 3 and 7 there are tokens at, within and beyond the window of five.
    """
    config = dataclasses.replace(
        tiny_drafter.config,
        num_layers=1,
        predict_from_anchor=predict_from_anchor,
        head=head,
        confidence=None,
        convolution=convolution,
        windows=() if window is None else (window,),
    )
    drafter = random_drafter(config)
    chosen = (0, 3, 7)
    blocks = blocks_behind(chosen, 4)
    training = jax.jit(log_law_in_training)(drafter, known, blocks)
    decoding = log_law_in_decoding(tiny_target, drafter, jnp.asarray(chosen), blocks.labels[0])
    assert float(jnp.std(training)) > 0.5
    chex.assert_trees_all_close(training, decoding, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_teacher_is_the_targets_own_law(tiny_target, tiny_drafter, softcap):
    """T07: a strong final norm tells final-normed states from raw ones."""
    config = dataclasses.replace(tiny_target.config, logit_softcap=softcap)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))
    target = nnx.merge(graphdef, nnx.state(tiny_target))
    target.norm.weight.set_value(jnp.linspace(-3.0, 8.0, 32))
    batch = Batch(tokens=TOKENS, loss_mask=TOKENS > 0)
    told = jax.jit(step.ask, static_argnums=2)(target, batch, (0, 2))
    capped = dataclasses.replace(tiny_drafter.config, logit_softcap=softcap)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(capped, rngs=nnx.Rngs(0))))
    heads = nnx.merge(graphdef, nnx.state(tiny_drafter)).heads
    own = jax.jit(lambda t: t.logits(t(TOKENS)[0]))(target)
    chex.assert_trees_all_close(
        heads.base_logits(told.lent, told.hidden), own, atol=1e-5, rtol=1e-5
    )


def test_no_gradient_reaches_the_target(tiny_target, tiny_drafter):
    """T08: the whole step, with the target as a variable."""
    blocks = blocks_behind((3, 5), 4)
    graphdef, state = nnx.split(tiny_target)

    def objective(state):
        batch = Batch(tokens=TOKENS, loss_mask=TOKENS > 0)
        told = step.ask(nnx.merge(graphdef, state), batch, (0, 2))
        return step.loss(tiny_drafter, told, blocks, TOKENS, Losses(), 2)[0]

    for gradient in jax.tree.leaves(jax.jit(jax.grad(objective))(state)):
        assert not jnp.any(gradient)


def random_batch(lengths: tuple[int, ...], width: int) -> tuple[Batch, Knowledge]:
    """Rows of several lengths, padded with zeros, and made-up knowledge of them."""
    keys = jax.random.split(jax.random.key(11), 5)
    inside = jnp.arange(width) < jnp.asarray(lengths)[:, None]
    shape = (len(lengths), width)
    batch = Batch(
        tokens=jax.random.randint(keys[0], shape, 0, 97) * inside,
        loss_mask=inside & (jnp.arange(width) >= 2),
    )
    lent = step.Lent(
        embedding=jax.random.normal(keys[1], (97, 32)), head=jax.random.normal(keys[2], (97, 32))
    )
    known = Knowledge(
        features=jax.random.normal(keys[3], (*shape, 64)) * inside[..., None],
        hidden=jax.random.normal(keys[4], (*shape, 32)) * inside[..., None],
        lent=lent,
    )
    return batch, known


def test_mixed_lengths_train_as_their_rows_do_alone(tiny_drafter):
    """C34, T09: dummy blocks weigh nothing, and the denominator is that of the whole batch."""
    batch, known = random_batch((6, 20), 20)
    config = dataclasses.replace(tiny_drafter.config, num_layers=1)
    graphdef, params = nnx.split(random_drafter(config))

    @functools.partial(jax.jit, static_argnames="chunk")
    def gradient(params, batch, known, chosen, valid, chunk):
        blocks = anchors.cut(batch, chosen, valid, 4)

        def objective(params):
            trained = nnx.merge(graphdef, params)
            return step.loss(trained, known, blocks, batch.tokens, Losses(), chunk)[0]

        weight = jnp.sum(anchors.weights(blocks.counted, Losses().decay))
        return weight, jax.value_and_grad(objective)(params)

    chosen, valid = anchors.sample(jax.random.key(0), batch.loss_mask, 8)
    assert valid.sum(1).tolist() == [3, 8]
    _, together = gradient(params, batch, known, chosen, valid, chunk=4)
    chex.assert_tree_all_finite(together)

    def alone(row: int, length: int, count: int):
        rows = jax.tree.map(
            lambda x: x[row : row + 1, :length], (batch, known.features, known.hidden)
        )
        told = known.replace(features=rows[1], hidden=rows[2])
        here = slice(row, row + 1), slice(count)
        return gradient(params, rows[0], told, chosen[here], valid[here], chunk=count)

    (first, short), (second, long) = alone(0, 6, 3), alone(1, 20, 8)
    pooled = jax.tree.map(lambda a, b: (first * a + second * b) / (first + second), short, long)
    chex.assert_trees_all_close(together, pooled, rtol=2e-4, atol=1e-6)


def test_parts_of_a_batch_one_after_another_give_its_gradient(micro_target):
    """T10: their weights differ, and only the sum of all divides."""
    recipe = DrafterRecipe(
        num_layers=1, block_size=2, mask_token=30, target_layer_ids=(0, 1), head=Markov(rank=3)
    )
    graphdef, params = nnx.split(
        random_drafter(initial.drafter_config(recipe, micro_target.config))
    )
    chain = optax.sgd(1.0)
    state = TrainState(
        step=jnp.asarray(3), params=params, optimizer=chain.init(params), key=jax.random.key(0)
    )
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, 30)
    batch = Batch(tokens=tokens, loss_mask=jnp.arange(12) >= jnp.asarray([[2], [9], [4], [10]]))

    def run(count: int):
        config = TrainConfig(
            data="",
            workdir="",
            drafter=recipe,
            losses=Losses(dpace=0.3),
            num_anchors=4,
            anchor_chunk=4,
            batch_size=4,
            accumulate=count,
        )
        step_of = functools.partial(step.train_step, chain, graphdef, config, split=None)
        after, metrics = jax.jit(step_of)(state, micro_target, batch)
        return jax.tree.map(jnp.subtract, params, after.params), metrics

    (one, seen), (other, measured) = run(1), run(2)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(one))
    chex.assert_trees_all_close(other, one, rtol=1e-5, atol=1e-5 * largest)
    chex.assert_trees_all_close(measured, seen, rtol=1e-5)
    assert float(seen["gradient_norm"]) > 0.1


def test_a_batch_without_supervision_changes_nothing_but_the_count(micro_target):
    """T04: loss 0, gradient 0, all finite, the step counted."""
    recipe = DrafterRecipe(
        num_layers=1, block_size=2, mask_token=30, target_layer_ids=(0, 1), head=Markov(rank=3)
    )
    config = initial.drafter_config(recipe, micro_target.config)
    graphdef, params = nnx.split(random_drafter(config))
    chain = optimizer.build(Optimizer(), 10)
    state = TrainState(
        step=jnp.asarray(3, jnp.int32),
        params=params,
        optimizer=chain.init(params),
        key=jax.random.key(0),
    )
    batch = Batch(tokens=jnp.repeat(TOKENS % 31, 2, 0), loss_mask=jnp.zeros((2, 12), bool))
    run_config = TrainConfig(
        data="", workdir="", drafter=recipe, num_anchors=4, anchor_chunk=4, batch_size=2
    )
    run = functools.partial(step.train_step, chain, graphdef, run_config, split=None)
    after, metrics = jax.jit(run)(state, micro_target, batch)
    assert float(metrics["loss"]) == 0
    assert float(metrics["gradient_norm"]) == 0
    assert int(after.step) == 4
    chex.assert_trees_all_equal(after.params, params)
    chex.assert_tree_all_finite(after.optimizer)
    assert float(optax.tree.norm(optax.tree.get(after.optimizer, "mu"))) == 0


def test_peak_memory_does_not_grow_with_the_anchors(optimised):
    """T09: 8 times the blocks of seven over 151,936 tokens; attention and logits exist in parts."""
    vocab_size, width, length = 151_936, 128, 512
    config = dataclasses.replace(
        DRAFTER,
        geometry=dataclasses.replace(DRAFTER.geometry, width=width, heads=8, mlp_width=384),
        vocab_size=vocab_size,
        block_size=7,
        head=Markov(rank=256),
    )
    tokens, table, rows, features = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, length), jnp.int32),
            ((vocab_size, width), jnp.float32),
            ((1, length, width), jnp.float32),
            ((1, length, config.feature_width), jnp.float32),
        )
    )
    drafter = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))

    def temporary(count: int) -> int:
        at = jax.ShapeDtypeStruct((1, count), jnp.int32)

        def objective(drafter, table, rows, features, tokens, at):
            lent = step.Lent(embedding=table, head=table)
            known = Knowledge(features=features, hidden=rows, lent=lent)
            batch = Batch(tokens=tokens, loss_mask=tokens >= 0)
            blocks = anchors.cut(batch, at, at >= 0, config.block_size)
            return step.loss(drafter, known, blocks, tokens, Losses(), chunk=64)

        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        lowered = gradient.lower(drafter, table, rows, features, tokens, at)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(64), temporary(512)
    assert few > 64 * 7 * vocab_size * 4
    assert many < 1.3 * few
