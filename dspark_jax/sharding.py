"""Meshes, and one table from parameter paths to partitions; modules know nothing of devices.

Axes: `data` and `fsdp` split the rows of a batch, `fsdp` also the parameters and the optimizer's
state at rest, `tensor` splits heads, MLP widths and the vocabulary.
"""

import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # what the rows of a batch are split over

# First match wins. Weights are [out, in]: q, k, v, gate and up split their outputs, o and down
# their inputs, so that each pair needs one reduction. Correction heads are not split over `tensor`:
# at rank 256 they are small, and splitting their tables costs one collective a walk step.
TABLE: tuple[tuple[str, P], ...] = (
    (r"heads\.head\.(w1|w2|input_gates|state_gates|.*\.weight)$", P("fsdp", None)),
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$", P("tensor", "fsdp")),
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.bias$", P("tensor")),
    (r"\.(o_proj|down_proj)\.weight$", P("fsdp", "tensor")),
    (r"\.mlp\.(gate_proj|up_proj|down_proj)$", P("tensor", "fsdp", None)),  # experts
    (r"(^|\.)(embed_tokens|lm_head)$", P("tensor", "fsdp")),
    (r"\.fc\.weight$", P("fsdp", None)),
    (r"", P()),
)


def make_mesh(text: str) -> Mesh:
    """A mesh from a text such as "data=2,fsdp=2,tensor=2"; axes not named have size 1.

    Raises:
      ValueError: unknown axes, or not as many devices as the product says.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        axis, is_new = axis.strip(), sizes.get(axis.strip()) == 1
        if not is_new or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(f"mesh = {text!r}: axes are {AXES}, as in 'data=2,fsdp=2,tensor=2'")
        sizes[axis] = int(size)
    wanted, found = math.prod(sizes.values()), jax.device_count()
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


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where each array of a tree of parameters (or of an optimizer's state) belongs."""

    def one(path, leaf):
        name = re.sub(r"\.value$", "", jax.tree_util.keystr(path, simple=True, separator="."))
        return NamedSharding(mesh, partition(name, leaf.shape, mesh))

    return jax.tree.map_with_path(one, tree)


def place(params: Any, mesh: Mesh) -> Any:
    """Parameters on the mesh, as the table says; every process holds them whole before."""
    return jax.tree.map(put, params, shardings(params, mesh))


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array that this process holds whole, or that is there already, where it belongs."""
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def place_rows(batch: Any, rows: int, mesh: Mesh) -> Any:
    """A batch's arrays of that many rows, split over `data` and `fsdp`; the others whole.

    Raises:
      ValueError: the rows cannot be split evenly.
    """
    check_rows(rows, mesh)

    def one(leaf):
        is_rows = leaf.ndim > 0 and leaf.shape[0] == rows
        return jax.device_put(leaf, NamedSharding(mesh, P(ROWS) if is_rows else P()))

    return jax.tree.map(one, batch)


def row_parts(mesh: Mesh | None) -> int:
    """How many parts the rows of a batch are split into."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)


def check_rows(rows: int, mesh: Mesh, name: str = "batch_size") -> None:
    """Raises a ValueError if the mesh cannot split that many rows evenly."""
    parts = row_parts(mesh)
    if rows % parts:
        raise ValueError(f"{name} = {rows} must be a multiple of the mesh's data * fsdp = {parts}")
