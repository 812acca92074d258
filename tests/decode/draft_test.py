"""The drafter inside the loop sees what it would see from scratch, at the right positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Markov
from dspark_jax.decode import generate
from dspark_jax.decode.draft import NoProposer, proposer
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Lent
from dspark_jax.sampling import Sampling, draw, law

from . import doubles
from .conftest import PROMPTS, VOCABULARY

SKIPPING = (0, 1, 2, 3, 4, 5, 40, 41, 42, 43, 44, 45)


def best(logits, keys):
    """A greedy choice that reports the logits it saw as its law."""
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


@functools.partial(jax.jit, static_argnums=(0, 1))
def drafted_in_loop(target, drafter, models, progress, positions):
    """Draft tokens and corrected logits, from the loop's own context cache."""
    slots = progress.lengths - 1
    anchors = progress.tokens[jnp.arange(slots.shape[0]), slots]
    keys = jax.random.split(jax.random.key(0), (slots.shape[0], drafter.block_size))
    lent = target.lend(models.target)
    return drafter.draft(
        models.proposer, lent, anchors, progress.context, slots, positions, best, keys
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_from_scratch(target_graph, drafter_graph, models, tokens, positions, slot, drafts):
    """Corrected logits from an uncached pass over the tokens before the anchor, drafts given."""
    target = nnx.merge(target_graph, models.target)
    drafter = nnx.merge(drafter_graph, models.proposer)
    _, features, _ = target(tokens, drafter.config.target_layer_ids, positions=positions)
    hidden = drafter.hidden(
        Lent(embedding=target.embed_tokens[...], head=target.head),
        tokens[:, slot][:, None],
        positions[:, slot][:, None],
        drafter.backbone.context(features, positions),
        jnp.full((1, 1), slot),
        jnp.ones((1, 1), bool),
    )[:, 0]
    prevs = jnp.concatenate([tokens[:, slot][:, None], drafts[:, :-1]], 1)
    head = drafter.heads.head
    return hidden @ target.head.T + head.w1[...][prevs] @ head.w2[...].T


@pytest.mark.parametrize("positions", [None, SKIPPING], ids=["plain", "skipping"])
def test_drafts_after_refusals_equal_drafts_from_scratch(
    shallow_target, build_drafter, drafted, positions
):
    """Context holds target features of committed tokens alone, wherever the prompt's ids are."""
    engine, prompt = drafted(block_size=4), PROMPTS[12]
    where = doubles.all_positions(len(prompt), positions)[None]
    requests, progress = doubles.begin(
        engine, doubles.padded(prompt), [len(prompt)], 40, positions=where
    )
    graphs = [nnx.split(module)[0] for module in (shallow_target, build_drafter(block_size=4))]
    counts = []
    for _ in range(40):
        slot = int(progress.lengths[0]) - 1
        tokens = np.where(np.arange(doubles.SLOTS) <= slot, progress.tokens, 0)
        draft = drafted_in_loop(
            engine.target, engine.proposer, engine.models, progress, where[:, slot]
        )
        expected = logits_from_scratch(*graphs, engine.models, tokens, where, slot, draft.tokens)
        np.testing.assert_allclose(draft.probs, expected, atol=1e-4)
        progress, commit = generate.advance(
            engine.target, engine.proposer, engine.models, requests, progress
        )
        counts.append(int(commit.counts[0]))
        if commit.done[0]:
            break
    assert set(counts) & {2, 3, 4}, "no block was accepted in part"
    expected = doubles.plain_greedy(shallow_target, [prompt], positions)[0]
    slots = np.arange(doubles.SLOTS) < progress.lengths[0]
    np.testing.assert_array_equal(progress.tokens[0][slots], expected[slots])


def test_q_is_the_law_of_the_corrected_logits(shallow_target, tiny_drafter, key):
    how = Sampling(
        temperature=jnp.asarray([0.7, 1.7]), top_k=jnp.asarray([0, 5]), top_p=jnp.asarray([1, 0.9])
    )

    def reporting(logits, keys):
        return draw(keys, law(logits, how)), logits

    @functools.partial(jax.jit, static_argnums=0)
    def drafted(choose, lent):
        anchors, hidden = jnp.asarray([3, 4], jnp.int32), jax.random.normal(key, (2, 4, 32))
        base, keys = hidden @ lent.head.T, jax.random.split(key, (2, 4))
        cut = Candidates()
        return propose(tiny_drafter.heads, lent, anchors, hidden, base, choose, keys, cut)

    lent = Lent(embedding=shallow_target.embed_tokens[...], head=shallow_target.head)
    reported, draft = drafted(reporting, lent), drafted(rule(how).choose, lent)
    np.testing.assert_array_equal(draft.tokens, reported.tokens)
    for k in range(4):
        np.testing.assert_allclose(draft.probs[:, k], law(reported.probs[:, k], how), atol=1e-5)
    assert np.all(np.take_along_axis(draft.probs, draft.tokens[..., None], -1) > 0)


def test_padding_rows_of_a_heads_tables_are_never_drafted(shallow_target, build_drafter):
    """Tables of 104 rows over a vocabulary of 97; the padding would win every argmax."""
    drafter = build_drafter(head=Markov(rank=4), vocab_size=104)
    drafter.heads.head.w1[...] = jnp.ones((104, 4))
    drafter.heads.head.w2[...] = jnp.zeros((104, 4)).at[VOCABULARY:].set(100.0)
    functions, params = proposer(drafter)
    lent = Lent(embedding=shallow_target.embed_tokens[...], head=shallow_target.head)

    @jax.jit
    def run(params, lent):
        anchors, nowhere = jnp.asarray([3, 4], jnp.int32), jnp.zeros((2,), jnp.int32)
        context = functions.init_cache(params, 2, 8)
        keys = jax.random.split(jax.random.key(1), (2, 4))
        return functions.draft(params, lent, anchors, context, nowhere, nowhere, best, keys)

    draft = run(params, lent)
    assert draft.probs.shape == (2, 4, VOCABULARY)
    assert np.all(draft.tokens < VOCABULARY)


def test_embedding_and_head_are_lent_not_copied(shallow_target, drafted):
    engine = drafted(block_size=4)
    shapes = [x.shape for x in jax.tree.leaves(engine.models.proposer)]
    assert shallow_target.embed_tokens[...].shape not in shapes
    lent = engine.target.lend(engine.models.target)
    for ours, theirs in [
        (lent.embedding, shallow_target.embed_tokens[...]),
        (lent.head, shallow_target.head),
    ]:
        assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


def test_no_drafter_is_a_proposer_of_nothing():
    functions, params = proposer(None)
    assert functions == NoProposer()
    anchors = jnp.zeros((3,), jnp.int32)
    draft = functions.draft(params, (), anchors, (), anchors, anchors, best, None)
    assert draft.tokens.shape == (3, 0)
