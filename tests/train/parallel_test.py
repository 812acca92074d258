"""What a mesh computes is what one device computes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from dspark_jax.config import Confidence, Domino, Markov, Recurrent
from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.sharding import make_mesh
from dspark_jax.train.losses import Supervision
from dspark_jax.train.parallel import Vocabulary
from dspark_jax.train.sweep import block_loss
from dspark_jax.train.vocabulary import Subset

from ..conftest import DRAFTER, sharpened

N, K, D, V = 16, 4, 32, 96
LOSSES = Losses(base=0.6, selector=0.8, candidates=14, dpace=0.4)
HEADS = {
    "none": {"head": None, "confidence": Confidence(with_markov=False)},
    "gated": {"head": Markov(rank=4, gate="gated")},
    "rnn": {"head": Recurrent(rank=4)},
    "domino": {"head": Domino(rank=5, gru_width=6), "confidence": None},
}


@pytest.mark.parametrize("ties", [False, True])
def test_a_split_vocabulary_is_a_whole_one(ties):
    """Sums, laws, look-ups, the best tokens, and gradients through them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3, V)).astype(np.float32)
    x = np.round(x) if ties else x
    x[0, :90] = -np.inf
    ids = jnp.asarray(random.integers(90, V, (3, 5)))

    def all_of(vocabulary, x, ids):
        log_probs = vocabulary.log_softmax(x)
        found = vocabulary.pick(log_probs, ids)
        parts = vocabulary.sum(jnp.exp(log_probs)), found, vocabulary.argmax(x)
        best = vocabulary.pick(x, vocabulary.top_k(x, 14))
        return jnp.sum(found * jnp.arange(5)), (*parts, best)

    def run(vocabulary):
        return jax.value_and_grad(lambda x: all_of(vocabulary, x, ids), has_aux=True)

    split = jax.shard_map(
        run(Vocabulary("tensor")),
        mesh=make_mesh("tensor=8"),
        in_specs=P(None, "tensor"),
        out_specs=((P(), (P(), P(), P(), P())), P(None, "tensor")),
    )
    chex.assert_trees_all_close(jax.jit(split)(x), jax.jit(run(Vocabulary()))(x), atol=1e-6)


def inputs(name: str):
    config = dataclasses.replace(DRAFTER, vocab_size=V, mask_token=V - 1, **HEADS[name])
    heads = sharpened(Heads(config, jnp.float32, rngs=nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(1), 6)
    counted = jnp.arange(K) < jax.random.randint(keys[0], (N, 1), 0, K + 1)
    given = Supervision(
        prevs=jax.random.randint(keys[1], (N, K), 0, V),
        labels=jax.random.randint(keys[2], (N, K), 0, V),
        counted=counted,
        weights=counted * jnp.exp(-jnp.arange(K) / 4),
        target_hidden=jax.random.normal(keys[3], (N, K, D)),
    )
    embedding, head = 0.3 * jax.random.normal(keys[4], (2, V, D))
    return heads, jax.random.normal(keys[5], (N, K, D)), given, Lent(embedding=embedding, head=head)


def gradient(name: str, mesh, subset=None):
    """Loss, tally, gradients of heads and hidden states."""
    heads, hidden, given, lent = inputs(name)
    if subset is not None:
        lent = lent.replace(head=lent.head[subset.tokens])
        given = given.replace(labels=given.labels % subset.tokens.shape[0])

    def loss(heads, hidden):
        return block_loss(LOSSES, heads, hidden, given, lent, 2, subset, 0.4, mesh)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(heads, hidden)


MESHES = ("data=2,fsdp=2,tensor=2", "data=8", "tensor=8")
CASES = [(name, MESHES[0]) for name in ("gated", "domino")]
MORE = [(name, mesh) for name in HEADS for mesh in MESHES if (name, mesh) not in CASES]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("name", "mesh"), CASES + SLOW)
def test_the_loss_on_a_mesh_is_that_of_one_device(name, mesh):
    expected, found = gradient(name, None), gradient(name, make_mesh(mesh))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_sampled_vocabulary_is_split_too():
    subset = Subset(tokens=jnp.arange(3, 83, dtype=jnp.int32), log_share=jnp.linspace(0.0, 1.0, 80))
    found = gradient("gated", make_mesh("data=4,tensor=2"), subset)
    chex.assert_trees_all_close(found, gradient("gated", None, subset), rtol=1e-5, atol=1e-6)


def test_a_vocabulary_that_does_not_split_is_refused():
    subset = Subset(tokens=jnp.arange(81, dtype=jnp.int32), log_share=jnp.zeros(81))
    with pytest.raises(ValueError, match="tensor = 2 must divide the 81 tokens"):
        gradient("gated", make_mesh("tensor=2"), subset)
