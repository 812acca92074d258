"""An audit finds what training and decoding do not share, and nothing where they share all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.audit import Audit, audit
from dspark_jax.nn.drafter import Drafter
from dspark_jax.train.data import Conversation


@pytest.fixture(scope="module")
def samples(tiny_target):
    """A conversation the target answered greedily, and one of random tokens."""

    @jax.jit
    def answer(target, tokens):
        def add(at, tokens):
            logits = target.logits(target(tokens)[0][0, at - 1])
            return tokens.at[0, at].set(jnp.argmax(logits).astype(jnp.int32))

        return jax.lax.fori_loop(4, 48, add, tokens)

    prompt = jnp.asarray([[3, 1, 4, 15] + [0] * 44], jnp.int32)
    tokens = np.asarray(answer(tiny_target, prompt))
    noise = np.random.default_rng(0).integers(97, size=20).astype(np.int32)
    return [
        Conversation(tokens=row, loss_mask=np.arange(len(row)) >= start)
        for row, start in ((tokens[0], 4), (noise, 5))
    ]


def misled(drafter: Drafter, **changes) -> Drafter:
    """The same parameters under another config."""
    config = dataclasses.replace(drafter.config, **changes)
    wanted = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(wanted), nnx.state(drafter))


def test_both_paths_of_one_drafter_draft_the_same(tiny_target, tiny_drafter, samples):
    """T15, T26: token by token; and what follows an anchor is what its author would say."""
    found = audit(tiny_target, tiny_drafter, tiny_drafter, samples[:1])
    assert found.anchors == 48 - 4 - 1
    assert found.counted == (43, 42, 41, 40)
    assert found.same == found.counted
    assert found.trained == found.decoded
    assert found.expected == found.anchors
    assert found.passed
    both = audit(tiny_target, tiny_drafter, tiny_drafter, samples)
    assert both.anchors == 43 + 14
    assert both.expected < both.anchors  # the target did not write the second sample


@pytest.mark.parametrize(
    "changes",
    [
        {"predict_from_anchor": False},
        pytest.param({"target_layer_ids": (1, 3)}, marks=pytest.mark.slow),
        pytest.param({"mask_token": 95}, marks=pytest.mark.slow),
    ],
)
def test_a_drafter_run_in_another_way_than_trained_is_found(
    tiny_target, tiny_drafter, samples, changes
):
    """T15: another layout, features shifted by a layer, another mask."""
    found = audit(tiny_target, tiny_drafter, misled(tiny_drafter, **changes), samples)
    assert not found.passed
    assert found.same[0] < found.counted[0]


def counts(trained: int, decoded: int, differ: int, same: int = 200) -> Audit:
    counted = (200,)
    return Audit(
        anchors=200,
        expected=200,
        counted=counted,
        trained=(trained,),
        decoded=(decoded,),
        differ=(differ,),
        same=(same,),
    )


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (counts(150, 150, 0), True),
        (counts(150, 146, 8), True),  # near ties that fell the other way
        (counts(150, 10, 140), False),
        (counts(2, 0, 2, same=20), False),  # knows nothing, yet drafts otherwise
    ],
)
def test_noise_is_no_difference(found, passed):
    assert found.passed == passed


def test_an_audit_without_anchors_or_of_other_blocks_is_refused(tiny_target, tiny_drafter, samples):
    silent = [samples[0].replace(loss_mask=np.zeros(48, bool))]
    with pytest.raises(ValueError, match="none of 1 samples has two supervised tokens in a row"):
        audit(tiny_target, tiny_drafter, tiny_drafter, silent)
    with pytest.raises(ValueError, match="block_size = 3 of the decoded drafter, 4 trained with"):
        audit(tiny_target, tiny_drafter, misled(tiny_drafter, block_size=3), samples)
    reduced = nnx.eval_shape(
        lambda: Drafter(
            dataclasses.replace(tiny_drafter.config, draft_vocab_size=9), rngs=nnx.Rngs(0)
        )
    )
    for pair in ((reduced, tiny_drafter), (tiny_drafter, reduced)):
        with pytest.raises(ValueError, match="draft_vocab_size = 9: only drafters of the whole"):
            audit(tiny_target, *pair, samples)
