"""Norms of each term's gradient, and the one term whose way to the backbone can be closed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Drafter
from dspark_jax.train import anchors, step
from dspark_jax.train.gradients import term_norms

from ..conftest import DRAFTER, sharpened

TOKENS = jnp.asarray([[5, 17, 3, 88, 41, 2, 60, 9, 33, 71, 12, 50]])
LOSSES = Losses(cross_entropy=0.3, l1=0.9, base=0.5, confidence=0.7, dpace=0.2)


@pytest.fixture(scope="module")
def drafter():
    """One layer."""
    config = dataclasses.replace(DRAFTER, num_layers=1)
    return sharpened(jax.jit(lambda: Drafter(config, rngs=nnx.Rngs(1)))())


@pytest.fixture(scope="module")
def objective(tiny_target):
    """The loss of eight blocks of TOKENS."""
    batch = Batch(tokens=TOKENS, loss_mask=jnp.ones(TOKENS.shape, bool))
    known = jax.jit(step.ask, static_argnums=2)(tiny_target, batch, (0, 2))
    at = jnp.arange(8)[None]
    blocks = anchors.cut(batch, at, at >= 0, 4)
    return lambda drafter, losses, share: step.loss(
        drafter, known, blocks, TOKENS, losses, 8, None, share
    )


def test_norms_are_those_of_the_terms_as_they_enter_the_sum(objective, drafter):
    """T27: each against the gradient of a loss that has this term alone, at Domino's share."""
    share = jnp.asarray(0.25)

    @jax.jit
    def both(drafter):
        def alone(losses, share):
            gradient = jax.grad(objective, has_aux=True)(drafter, losses, share)[0]
            return optax.tree.norm(gradient)

        off = dataclasses.replace(LOSSES, cross_entropy=0.0, l1=0.0, confidence=0.0)
        expected = {
            "base": 0.25 * alone(dataclasses.replace(off, cross_entropy=0.3), jnp.asarray(1.0)),
            "l1": alone(dataclasses.replace(off, l1=0.9), share),
        }
        return term_norms(objective, drafter, LOSSES, share), expected

    found, expected = both(drafter)
    assert found.keys() == {"cross_entropy", "base", "l1", "confidence"}
    assert all(norm > 0 for norm in found.values())
    for name, norm in expected.items():
        np.testing.assert_allclose(found[name], norm, rtol=1e-5)


def test_the_confidence_term_reaches_the_backbone_only_if_it_may(objective, drafter):
    """T27: hidden states a hundred times too large must not have to wreck what drafts."""

    @jax.jit
    def norms(drafter):
        weight = drafter.backbone.norm.weight
        weight.set_value(100 * weight[...])
        found = []
        for reaches in (True, False):
            losses = Losses(cross_entropy=0.0, l1=0.0, confidence_to_backbone=reaches)
            gradient = jax.grad(objective, has_aux=True)(drafter, losses, jnp.asarray(0.0))[0]
            parts = gradient.backbone, gradient.heads.confidence_head
            found.append([optax.tree.norm(part) for part in parts])
        return found

    (backbone, head), (closed, same_head) = norms(drafter)
    assert backbone > 0
    assert closed == 0
    assert head == same_head > 0
