"""The ways that are timed against each other form the same loss and gradient."""

import chex
import jax

from dspark_jax import bench_loss


def test_every_way_forms_the_same_gradient():
    """The chunked loss is a mean over the labels; the others are sums."""
    given = bench_loss.inputs(vocab_size=60, width=8, rank=2, blocks=4, block_size=2)
    found = {name: way(*given) for name, way in bench_loss.gradients(chunk=2).items()}
    whole, ours, remat = ((found[name][0][0], found[name][1]) for name in found)
    chex.assert_trees_all_close(remat, whole, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(jax.tree.map(lambda x: 8 * x, ours), whole, rtol=1e-4, atol=1e-6)
