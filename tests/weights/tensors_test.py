"""Broken checkpoints: the error names the file, the tensor and what is wrong."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.nn.layers import Linear
from dspark_jax.weights.tensors import CheckpointError, fill, paths, read_folder, read_json

INDEX, FILE = "model.safetensors.index.json", "model.safetensors"
WEIGHT, BIAS = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)


def build() -> Linear:
    return Linear(3, 2, True, jnp.float32, rngs=nnx.Rngs(0))


def test_parameters_take_the_tensors_of_their_published_names():
    tensors = {"fc.weight": WEIGHT, "fc.bias": BIAS, "unused": BIAS}
    module = fill(build, tensors, lambda path: f"fc.{path}", jnp.bfloat16, ignored=["unused"])
    assert {path: value.dtype for path, value in paths(module).items()} == {
        "weight": jnp.bfloat16,
        "bias": jnp.bfloat16,
    }
    assert module.weight[...].astype(jnp.float32).tolist() == WEIGHT.tolist()


def test_several_tensors_are_stacked_on_a_new_axis():
    tensors = {"a": WEIGHT[0], "b": WEIGHT[1], "bias": BIAS}
    module = fill(build, tensors, lambda p: ["a", "b"] if p == "weight" else p, jnp.float32)
    assert module.weight[...].tolist() == WEIGHT.tolist()


def test_all_complaints_come_at_once():
    tensors = {"weight": WEIGHT.T, "other": BIAS}
    with pytest.raises(CheckpointError) as error:
        fill(build, tensors, lambda path: path, jnp.float32)
    assert str(error.value) == (
        "missing tensors: bias; unclaimed tensors: other; "
        "wrong tensors: weight is (3, 2), expected (2, 3)"
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "config.json: no such file"),
        ("{", "config.json: not valid JSON"),
        (b"\xff\xfe", "config.json: not valid JSON"),
        ("[1]", "config.json: holds a list, expected a JSON object"),
    ],
)
def test_a_config_that_is_no_json_object_is_named(tmp_path, content, complaint):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=complaint):
        read_json(path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"{FILE}: no such file"):
        read_folder(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    save_file({"weight": WEIGHT}, tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{FILE}: not a readable safetensors file"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        (None, "has no `weight_map` object"),
        (["a"], "has no `weight_map` object"),
        ({"weight": "a.safetensors", "bias": "a.safetensors"}, "do not hold: \\['bias'\\]"),
        ({"weight": "b.safetensors"}, "b.safetensors: no such file"),
        ({"weight": "../a.safetensors"}, "outside the folder: \\['../a.safetensors'\\]"),
        ({"weight": "/etc/passwd"}, "outside the folder: \\['/etc/passwd'\\]"),
        ({"weight": "sub/a.safetensors"}, "outside the folder"),
        ({"weight": ".."}, "no such file"),
        ({"weight": ""}, "no such file"),
    ],
)
def test_a_broken_index_is_named(tmp_path, weight_map, complaint):
    save_file({"weight": WEIGHT}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=complaint):
        read_folder(tmp_path)
