"""Meshes, and one table from parameter paths to partitions; modules know nothing of devices.

Axes: `data` splits the rows of a batch, `tensor` splits heads, MLP widths and the vocabulary.
"""

import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "tensor")

# First match wins. Weights are [out, in]: q, k, v, gate and up split their outputs, o and down
# their inputs, so that each pair needs one reduction. Markov tables are replicated: at rank 256
# they are small, and splitting them costs one collective a walk step.
TABLE: tuple[tuple[str, P], ...] = (
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$", P("tensor", None)),
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.bias$", P("tensor")),
    (r"\.(o_proj|down_proj)\.weight$", P(None, "tensor")),
    (r"\.mlp\.(gate_proj|up_proj|down_proj)$", P("tensor", None, None)),  # experts
    (r"(^|\.)(embed_tokens|lm_head)$", P("tensor", None)),
    (r"", P()),
)


def make_mesh(text: str) -> Mesh:
    """A mesh from a text such as "data=2,tensor=4".

    Raises:
      ValueError: unknown axes, or not as many devices as the product says.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        axis, is_new = axis.strip(), sizes.get(axis.strip()) == 1
        if not is_new or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(f"mesh = {text!r}: expected axes of {AXES}, as in 'data=2,tensor=4'")
        sizes[axis] = int(size)
    wanted, found = sizes["data"] * sizes["tensor"], jax.device_count()
    if wanted > found:
        raise ValueError(
            f"mesh = {text!r} needs {wanted} devices, {found} are there "
            "(on a CPU set JAX_NUM_CPU_DEVICES)"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=jax.devices()[:wanted],
    )


def partition(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Partition of one parameter; a dimension its axis does not divide stays whole."""
    spec = next(spec for pattern, spec in TABLE if re.search(pattern, path))
    sizes = zip(spec, shape, strict=False)
    return P(*(a if a is None or n % mesh.shape[a] == 0 else None for a, n in sizes))


def place(params: Any, mesh: Mesh) -> Any:
    """Parameters on the mesh, as the table says."""

    def put(path, leaf):
        name = re.sub(r"\.value$", "", jax.tree_util.keystr(path, simple=True, separator="."))
        return jax.device_put(leaf, NamedSharding(mesh, partition(name, leaf.shape, mesh)))

    return jax.tree.map_with_path(put, params)


def place_rows(batch: Any, rows: int, mesh: Mesh) -> Any:
    """A batch's arrays of that many rows, split over `data`; the others whole.

    Raises:
      ValueError: the rows cannot be split evenly.
    """
    if rows % mesh.shape["data"]:
        raise ValueError(
            f"batch_size = {rows} must be a multiple of the mesh's data = {mesh.shape['data']}"
        )

    def put(leaf):
        is_rows = leaf.ndim > 0 and leaf.shape[0] == rows
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if is_rows else P()))

    return jax.tree.map(put, batch)
