"""Meshes and the partition table; sharded decoding equals one device."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.decode.engine import Request, engine
from dspark_jax.sharding import make_mesh, partition


@pytest.mark.parametrize("text", ["rows=2", "data", "data=0", "data=x", "data=64"])
def test_a_bad_mesh_is_named(text):
    with pytest.raises(ValueError, match="mesh"):
        make_mesh(text)


def test_missing_axes_have_size_one():
    assert dict(make_mesh("tensor=4").shape) == {"data": 1, "fsdp": 1, "tensor": 4}


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("target.layers.3.self_attn.q_proj.weight", (8, 32), P("tensor", "fsdp")),
        ("target.layers.3.self_attn.o_proj.weight", (32, 8), P("fsdp", "tensor")),
        ("target.layers.3.mlp.down_proj", (4, 32, 8), P("tensor", "fsdp", None)),
        ("target.embed_tokens", (96, 32), P("tensor", "fsdp")),
        ("target.embed_tokens", (97, 32), P(None, "fsdp")),  # not divisible: whole
        ("proposer.heads.head.w1", (96, 4), P("fsdp", None)),
        ("target.norm.weight", (32,), P()),
    ],
)
def test_the_table_splits_what_divides(path, shape, spec):
    assert partition(path, shape, make_mesh("tensor=4")) == spec


@pytest.mark.parametrize(
    ("mesh", "temperature"),
    [
        ("data=2,tensor=2", 0.0),
        pytest.param("data=2,tensor=2", 1.0, marks=pytest.mark.slow),
        ("data=4", 1.0),
        pytest.param("data=4", 0.0, marks=pytest.mark.slow),
    ],
)
def test_sharded_decoding_equals_one_device(tiny_target, tiny_drafter, mesh, temperature):
    lengths = (3, 9, 17, 30)
    tokens = [tuple(map(int, np.arange(n) * 7 % 90)) for n in lengths]
    requests = [
        Request(tokens=t, max_new_tokens=12, temperature=temperature, seed=i)
        for i, t in enumerate(tokens)
    ]
    options = {"chunk": 16, "smallest_bucket": 64}
    one = engine(tiny_target, tiny_drafter, **options).generate(requests)
    many = engine(tiny_target, tiny_drafter, mesh=make_mesh(mesh), **options)
    is_split = [not x.sharding.is_fully_replicated for x in jax.tree.leaves(many.models)]
    assert any(is_split) == ("tensor" in mesh)
    assert many.generate(requests) == one
