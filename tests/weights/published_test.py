"""Published drafters by their shapes: parameters counted abstractly, one of them in full."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from dspark_jax.config import Geometry, Rotary, TargetConfig
from dspark_jax.nn.drafter import Drafter, Lent, check_pair
from dspark_jax.sharding import make_mesh, place
from dspark_jax.weights import deepspec, zlab

SHARED = {
    "num_hidden_layers": 5,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rms_norm_eps": 1e-6,
    "mask_token_id": 151669,
}
QWEN = {
    **SHARED,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
QWEN_4B = {
    **QWEN,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
QWEN_8B = {**QWEN_4B, "hidden_size": 4096, "intermediate_size": 12288}
QWEN_14B = {
    **QWEN_4B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_target_layers": 40,
}
GEMMA_12B = {
    **SHARED,
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "num_target_layers": 48,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "mask_token_id": 4,
    "rope_parameters": {
        "full_attention": {
            "rope_theta": 1e6,
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}


def shapes(hf: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by its published name, the target's copies included."""
    config = deepspec.drafter_config(hf)
    state = nnx.state(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    name = deepspec.namer(config)
    own = {name(".".join(map(str, path))): x.shape for path, x in nnx.to_flat_state(state)}
    table = (config.vocab_size, config.geometry.width)
    return own | {"embed_tokens.weight": table, "lm_head.weight": table}


@pytest.mark.parametrize(
    ("hf", "tensors", "total"),
    [
        (QWEN_4B, 64, 1_393_133_569),
        (QWEN_8B, 64, 2_371_081_729),
        (QWEN_14B, 64, 3_416_263_169),
        (GEMMA_12B, 74, 3_430_444_545),
    ],
    ids=["qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b"],
)
def test_published_drafters_have_their_tensors_and_parameters(hf, tensors, total):
    found = shapes(hf)
    assert len(found) == tensors
    trained = {n: s for n, s in found.items() if not n.endswith("layer_scalar")}  # buffers
    assert sum(int(np.prod(shape)) for shape in trained.values()) == total


BACKBONE = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "layer_types": 5 * ["sliding_attention"],
    "sliding_window": 2048,
    "is_causal": False,
}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
QWEN_27B = {
    **BACKBONE,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        **SELECTOR,
        "block_size": 8,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
}
MUSE_30B = {
    **BACKBONE,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202048,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "dflash_config": {
        **SELECTOR,
        "block_size": 16,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
}


@pytest.mark.parametrize(
    ("hf", "drafted", "total"),
    [(QWEN_27B, 7, 1_924_404_480), (MUSE_30B, 15, 2_772_159_744)],
    ids=["qwen3.8-27b", "muse-30b"],
)
def test_published_selectors_have_their_tensors_and_parameters(hf, drafted, total):
    config = zlab.drafter_config(hf)
    state = nnx.state(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    leaves = jax.tree.leaves(state)
    assert (len(leaves), sum(int(np.prod(x.shape)) for x in leaves)) == (81, total)
    assert (config.block_size, config.windows, config.causal) == (drafted, 5 * (2048,), ())


@pytest.mark.slow
def test_a_drafter_for_qwen3_4b_is_read_placed_and_written(tmp_path):
    """1.4 billion random parameters in bf16, over eight devices, and the same bytes again."""
    draws, source, out = np.random.default_rng(0), tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file(
        {
            name: draws.integers(0x3C00, size=shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in shapes(QWEN_4B).items()
        },
        source / "model.safetensors",
    )
    (source / "config.json").write_text(json.dumps(QWEN_4B))
    drafter, lent = deepspec.read(source, jnp.bfloat16)
    geometry = Geometry(2560, 9728, 32, 8, 128, Rotary(1e6))
    target = TargetConfig("qwen3", 151936, 36, geometry, 40960, tied=True)
    check_pair(drafter, target)
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    graphdef, params = nnx.split(drafter)
    del drafter
    drafter = nnx.merge(graphdef, place(params, mesh))
    del params
    tables = place({"embed_tokens": lent.embedding, "lm_head": lent.head}, mesh)
    query = drafter.backbone.layers[0].self_attn.q_proj.weight[...]
    assert query.shape == (4096, 2560) and query.addressable_shards[0].data.shape == (2048, 1280)
    assert tables["lm_head"].addressable_shards[0].data.shape == (75968, 1280)
    lent = Lent(embedding=tables["embed_tokens"], head=tables["lm_head"])
    deepspec.write(out, drafter, lent, target, jnp.bfloat16)
    assert deepspec.drafter_config(json.loads((out / "config.json").read_text())) == drafter.config
    del drafter, lent, tables, query
    jax.clear_caches()
    files = [safe_open(folder / "model.safetensors", "numpy") for folder in (source, out)]
    assert set(files[0].keys()) == set(files[1].keys())
    for name in shapes(QWEN_4B):
        before, after = (file.get_tensor(name).view(np.uint16) for file in files)
        np.testing.assert_array_equal(before, after)
