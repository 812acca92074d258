"""Drafters: block layouts, what heads add, and what a config may not combine."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dspark_jax.config import Confidence
from dspark_jax.decode.draft import proposer
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.train.losses import draft_logits


@pytest.fixture(scope="module")
def lent():
    """An embedding and lm head."""
    embedding, head = jax.random.normal(jax.random.key(4), (2, 97, 32))
    return Lent(embedding=embedding, head=head)


@jax.jit
def hidden_of(drafter, lent, anchors, valid):
    """Hidden states of blocks behind anchors 2 and 5 of some context."""
    features = jax.random.normal(jax.random.key(2), (1, 8, 64))
    context = drafter.backbone.context(features, jnp.arange(8)[None])
    positions = jnp.asarray([[2, 5]])
    return drafter.hidden(lent, anchors, positions, context, positions, valid)


def with_layout(drafter: Drafter, predict_from_anchor: bool) -> Drafter:
    """The same parameters read under another layout."""
    graphdef, state = nnx.split(drafter)
    config = dataclasses.replace(drafter.config, predict_from_anchor=predict_from_anchor)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, state)


def test_both_layouts_give_one_row_a_drafted_token(tiny_drafter, lent):
    """The one-plus-N block of K tokens is the anchor-first block of K + 1, its first row unread."""
    anchors, valid = jnp.asarray([[7, 9]]), jnp.ones((1, 2), bool)
    behind = with_layout(tiny_drafter, predict_from_anchor=False)
    longer = dataclasses.replace(tiny_drafter.config, block_size=5)
    assert (behind.config.num_inputs, tiny_drafter.config.num_inputs, longer.num_inputs) == (
        5,
        4,
        5,
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(longer, rngs=nnx.Rngs(0))))
    first = nnx.merge(graphdef, nnx.state(tiny_drafter))
    hidden = hidden_of(behind, lent, anchors, valid)
    assert hidden.shape == (1, 2, 4, 32)
    chex.assert_trees_all_equal(hidden, hidden_of(first, lent, anchors, valid)[:, :, 1:])


def test_dummy_blocks_hold_masks_only(tiny_drafter, lent):
    valid = jnp.asarray([[True, False]])
    one = hidden_of(tiny_drafter, lent, jnp.asarray([[7, 9]]), valid)
    other = hidden_of(tiny_drafter, lent, jnp.asarray([[7, 11]]), valid)
    chex.assert_trees_all_equal(one, other)


def test_the_embedding_is_scaled_as_the_target_scales_it(tiny_drafter, lent):
    config = dataclasses.replace(tiny_drafter.config, embedding_scale=3.0)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    scaled = nnx.merge(graphdef, nnx.state(tiny_drafter))
    args = jnp.asarray([[7, 9]]), jnp.ones((1, 2), bool)
    expected = hidden_of(tiny_drafter, lent.replace(embedding=3 * lent.embedding), *args)
    chex.assert_trees_all_close(hidden_of(scaled, lent, *args), expected, atol=1e-5)


def test_the_markov_bias_is_a_product_of_two_rows(tiny_drafter, lent):
    heads = tiny_drafter.heads
    prev, hidden = jnp.asarray([[0, 96, 5, 5]]), jax.random.normal(jax.random.key(0), (1, 4, 32))
    bias = draft_logits(heads, lent, hidden, prev)[1] - heads.base_logits(lent, hidden)
    expected = heads.head.w1[...][prev] @ heads.head.w2[...].T
    chex.assert_trees_all_close(bias, expected, atol=1e-4)


def test_a_head_of_zeros_drafts_as_no_head_does(tiny_drafter, lent):
    """C35: rank 0 and no head are the base logits exactly; so is a head that adds nothing."""
    headless = dataclasses.replace(tiny_drafter.config, head=None, confidence=None)
    plain = Drafter(headless, rngs=nnx.Rngs(0)).heads
    silent = nnx.merge(*nnx.split(tiny_drafter.heads))
    silent.head.w2.set_value(jnp.zeros((97, 4)))
    prev, hidden = jnp.asarray([[0, 96, 5, 5]]), jax.random.normal(jax.random.key(0), (1, 4, 32))
    base = plain.base_logits(lent, hidden)
    chex.assert_trees_all_equal(draft_logits(plain, lent, hidden, prev)[1], base)
    chex.assert_trees_all_equal(draft_logits(silent, lent, hidden, prev)[1], base)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_hidden_then_the_previous_tokens_row(tiny_drafter, key, with_markov):
    config = dataclasses.replace(
        tiny_drafter.config, confidence=Confidence(with_markov=with_markov)
    )
    heads = Drafter(config, rngs=nnx.Rngs(0)).heads
    prev, hidden = jnp.asarray([[1, 96]]), jax.random.normal(key, (1, 2, 32))
    seen = [hidden, heads.head.w1[...][prev]] if with_markov else [hidden]
    proj = heads.confidence_head.proj
    expected = jnp.concatenate(seen, -1) @ proj.weight[0] + proj.bias[0]
    chex.assert_trees_all_close(heads.confidence(prev, hidden), expected, atol=1e-5)


def test_confidence_with_markov_needs_a_markov_head(tiny_drafter):
    config = dataclasses.replace(tiny_drafter.config, head=None)
    with pytest.raises(ValueError, match="confidence.with_markov = True needs a Markov head"):
        Drafter(config, rngs=nnx.Rngs(0))


def test_base_logits_are_multiplied_then_capped_before_the_bias(tiny_drafter, lent, key):
    config = dataclasses.replace(tiny_drafter.config, logit_multiplier=0.1, logit_softcap=2.0)
    heads = Drafter(config, rngs=nnx.Rngs(0)).heads
    hidden = 10 * jax.random.normal(key, (3, 32))
    expected = 2 * jnp.tanh(0.1 * hidden @ lent.head.T / 2)
    chex.assert_trees_all_close(heads.base_logits(lent, hidden), expected, atol=1e-5)


def test_a_head_with_padding_rows_never_drafts_them(tiny_drafter, lent, key):
    """C32: the head has 104 rows, of which the last are the likeliest; the target has 97."""
    config = dataclasses.replace(tiny_drafter.config, vocab_size=104)
    padded = Drafter(config, rngs=nnx.Rngs(0))
    padded.heads.head.w1.set_value(jnp.ones((104, 4)))
    padded.heads.head.w2.set_value(jnp.zeros((104, 4)).at[97:].set(1e6))
    functions, params = proposer(padded)

    @jax.jit
    def draft_behind(anchors, keys):
        cache, first = functions.init_cache(params, 2, 8), jnp.zeros(2, jnp.int32)
        return functions.draft(params, lent, anchors, cache, first, first, greedy, keys)

    def greedy(logits, keys):
        return jnp.argmax(logits, -1).astype(jnp.int32), logits

    draft = draft_behind(jnp.asarray([0, 96]), jax.random.split(key, (2, 4)))
    assert draft.probs.shape == (2, 4, 97)
    assert (draft.tokens < 97).all()
