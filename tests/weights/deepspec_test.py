"""DeepSpec's drafters: parity of cached rounds with the reference, and what is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Confidence, Markov
from dspark_jax.decode.draft import proposer
from dspark_jax.weights import deepspec
from dspark_jax.weights.tensors import CheckpointError

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.glob("dspark_qwen3_*"))
SLOTS, JUNK = 32, 2  # cache slots; rows of a refused draft that a round leaves behind


def assert_close(actual, expected):
    """The tolerance of the goldens."""
    tolerance = 1e-4 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=tolerance)


def greedy(logits, keys):
    """The argmax; the logits travel as its law."""
    del keys
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


@pytest.mark.parametrize("name", NAMES)
def test_cached_rounds_equal_the_reference(name):
    drafter, lent = deepspec.read(GOLDENS / name)
    golden = load_file(GOLDENS / name / "expected.safetensors")
    functions, params = proposer(drafter)
    cache = functions.init_cache(params, 1, SLOTS)
    known = np.pad(golden["target_hidden_states"][:1], ((0, 0), (0, JUNK), (0, 0)))
    keys, done = jax.random.split(jax.random.key(0), (1, functions.block_size)), 0
    for number in range(3):
        expected = {
            field: golden.get(f"round{number}.{field}")
            for field in (
                "start",
                "block_hidden",
                "base_logits",
                "draft_logits",
                "tokens",
                "confidence_logits",
            )
        }
        start = int(expected["start"][0])
        rows = known[:, done : start + JUNK].copy()
        rows[:, start - done :] = 1e3  # of tokens that were not committed
        where = jnp.arange(done, start + JUNK)[None]
        cache = functions.extend(params, jnp.asarray(rows), cache, jnp.asarray([done]), where)
        anchors, slots = jnp.asarray(golden["input_ids"][:1, start]), jnp.asarray([start])
        draft = functions.draft(params, lent, anchors, cache, slots, slots, greedy, keys)
        assert draft.tokens.tolist() == expected["tokens"][:, 1:].tolist()
        assert_close(draft.probs, expected["draft_logits"])
        visible = jnp.arange(SLOTS) < slots[:, None, None]
        hidden = drafter.hidden(
            lent, anchors[:, None], slots[:, None], cache, visible, jnp.ones((1, 1), bool)
        )[:, 0]
        assert_close(hidden, expected["block_hidden"])
        assert_close(drafter.heads.base_logits(lent, hidden), expected["base_logits"])
        assert (drafter.config.confidence is None) == (expected["confidence_logits"] is None)
        if drafter.config.confidence is not None:
            confidence = drafter.heads.confidence(jnp.asarray(expected["tokens"][:, :-1]), hidden)
            assert_close(confidence, expected["confidence_logits"])
        done = start


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
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures = 'Gemma4DSparkModel'"),
        ({"architectures": None}, "architectures = None"),
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
