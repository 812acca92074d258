"""DeepSpec's drafters: what their fields mean, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Confidence, Markov
from dspark_jax.weights import deepspec
from dspark_jax.weights.tensors import CheckpointError

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture
def hf():
    """A config.json of the format."""
    return json.loads((GOLDENS / "dspark_qwen3_vanilla" / "config.json").read_text())


def test_fields_are_read_as_deepspec_means_them(hf):
    config = deepspec.drafter_config(hf)
    assert (config.block_size, config.num_inputs) == (7, 7)
    assert config.predict_from_anchor
    assert config.target_layer_ids == (1, 3, 6)
    assert config.mask_token == 95
    assert config.head == Markov(rank=12)
    assert config.confidence == Confidence(with_markov=True)


def test_rank_zero_has_no_head_and_still_predicts_from_the_anchor(hf):
    config = deepspec.drafter_config({**hf, "markov_rank": 0})
    assert config.head is None
    assert config.confidence == Confidence(with_markov=False)
    assert config.predict_from_anchor


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"markov_rank": -1}, "markov_rank = -1"),
        ({"markov_rank": None}, "no `markov_rank`"),
        ({"markov_head_type": "new"}, "markov_head_type = 'new'"),
        ({"mask_token_id": None}, "no `mask_token_id`"),
        ({"block_size": None}, "no `block_size`"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"target_layer_ids": [1, 3, 8]}, "must increase strictly within -1..7"),
        ({"target_layer_ids": [3, 1]}, "must increase strictly"),
        ({"target_layer_ids": [-2, 1]}, "must increase strictly"),
        ({"target_layer_ids": []}, "must increase strictly"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(hf, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        deepspec.drafter_config({**hf, **changes})


@pytest.mark.parametrize(
    ("gone", "added", "complaint"),
    [
        ("embed_tokens.weight", None, "missing tensors: embed_tokens.weight"),
        ("lm_head.weight", None, "missing tensors: lm_head.weight"),
        ("markov_head.markov_w2.weight", None, "missing tensors: markov_head.markov_w2.weight"),
        (None, "layers.0.layer_scalar", "unclaimed tensors: layers.0.layer_scalar"),
    ],
)
def test_a_wrong_tensor_is_named(hf, tmp_path, gone, added, complaint):
    tensors = load_file(GOLDENS / "dspark_qwen3_vanilla" / "model.safetensors")
    tensors.pop(gone, None)
    if added is not None:
        tensors[added] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(CheckpointError, match=complaint):
        deepspec.read(tmp_path)
