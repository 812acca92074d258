"""The loss of many blocks, a chunk at a time on each device, its gradient formed on the way.

The lm head is frozen, so each chunk's gradient with respect to hidden states and heads is formed
in the forward sweep and kept; the backward pass only scales it. Nothing is computed twice, and
peak memory does not grow with the anchors.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train.losses import Supervision, Tally, averaged, chunk_loss
from dspark_jax.train.parallel import Frozen, Vocabulary, over_devices, zeros
from dspark_jax.train.vocabulary import Subset


def block_loss(
    losses: Losses,
    heads: Heads,
    hidden: Float[Array, "N K D"],
    given: Supervision,
    lent: Lent,
    chunk: int,
    subset: Subset | None = None,
    share: Float[Array, ""] | float = 0.0,
    mesh: Mesh | None = None,
    is_sum: bool = False,
) -> tuple[Float[Array, ""], Tally]:
    """The loss of all blocks, `chunk` blocks a device at a time (a divisor of their number).

    With a `subset`, labels are places in it and the lent head holds its rows alone. What is a sum
    of a part of the blocks is `averaged` by the caller, once all parts are added.
    """
    vocabulary = Vocabulary(None if mesh is None else "tensor")
    term = functools.partial(_row_loss, losses, vocabulary)
    frozen = lent, subset, jnp.asarray(share, jnp.float32)
    heads, rows = _without_rows(heads, given.prevs)
    sums = _sweep(term, chunk, mesh, heads, (hidden, rows), given, frozen)
    return sums if is_sum else averaged(*sums)


def _without_rows(
    heads: Heads, prevs: Int[Array, "N K"]
) -> tuple[Heads, Float[Array, "N K R"] | None]:
    """Heads without W1, and its rows of the predecessors.

    A sweep then sums no gradient of W1's size: the rows' gradients go to their places once.
    """
    if not hasattr(heads.head, "w1"):
        return heads, None
    rows = heads.head.rows(prevs)
    return _with_rows(heads, rows[:0, 0]), rows


def _with_rows(heads: Heads, rows: Float[Array, "places R"]) -> Heads:
    graphdef, params = nnx.split(heads)

    def one(path, leaf):
        return rows if "'w1'" in jax.tree_util.keystr(path) else leaf

    return nnx.merge(graphdef, jax.tree.map_with_path(one, params))


def _row_loss(losses, vocabulary, heads, hidden, given, lent, subset, share):
    """`chunk_loss` of blocks that bring their rows of W1: each predecessor is its own token."""
    hidden, rows = hidden
    if rows is not None:
        heads = _with_rows(heads, rows.reshape(-1, rows.shape[-1]))
        given = given.replace(prevs=jnp.arange(given.prevs.size).reshape(given.prevs.shape))
    return chunk_loss(losses, vocabulary, heads, hidden, given, lent, subset, share)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sweep(term, chunk, mesh, heads, hidden, given, frozen):
    """Sum of term(heads, hidden[i], given[i], *frozen) over chunks i; `hidden` is a tree."""
    return _sweep_forward(term, chunk, mesh, heads, hidden, given, frozen)[0]


def _sweep_forward(term, chunk, mesh, heads, hidden, given, frozen: Frozen):
    sweep = functools.partial(_gradient_sweep, term, chunk)
    share = over_devices(sweep, mesh, heads, frozen)
    (value, d_heads), d_hidden = share(heads, hidden, given, frozen)
    return value, (d_heads, d_hidden)


def _sweep_backward(term, chunk, mesh, kept, cotangent):
    del term, chunk, mesh
    d_heads, d_hidden = jax.tree.map(lambda g: g * cotangent[0].astype(g.dtype), kept)
    return d_heads, d_hidden, None, None


_sweep.defvjp(_sweep_forward, _sweep_backward)


def _gradient_sweep(term, chunk, heads, hidden, given, frozen: Frozen):
    """((value, d_heads), d_hidden) of some blocks; values and gradients of heads are summed."""
    gradient = jax.value_and_grad(term, argnums=(0, 1), has_aux=True)

    def body(total, chunk):
        value, (d_heads, d_hidden) = gradient(heads, *chunk, *frozen)
        return jax.tree.map(jnp.add, total, (value, d_heads)), d_hidden

    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, given))
    one = jax.tree.map(lambda x: x[0], chunks)
    value, (d_heads, _) = jax.eval_shape(lambda one: gradient(heads, *one, *frozen), one)
    sums, d_hidden = jax.lax.scan(body, zeros((value, d_heads)), chunks)
    return sums, jax.tree.map(lambda d, x: d.reshape(x.shape), d_hidden, hidden)
