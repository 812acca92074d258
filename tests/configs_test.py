"""Every run of every config file builds its drafter for the published shapes of its target."""

import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from dspark_jax import recipes
from dspark_jax.config import Convolution
from dspark_jax.config_training import TrainConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.train import initial
from dspark_jax.weights.targets import target_config

FOLDER = Path(__file__).parents[1] / "configs"
NAMES = ["dflash", "dspark", "dspark-gated", "dspark-rnn", "domino", "dflash2"]

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
}
TARGETS = {
    "Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "gemma-3-12b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
RUNS = {
    f"{path.name}:{name}": run
    for path in sorted(FOLDER.glob("*.py"))
    for name, run in recipes.read_all(str(path)).items()
}
# Trainable parameters of the published DSpark drafters (vanilla, rank 256, five layers).
PUBLISHED = {
    "qwen3_4b.py:dspark": 615_221_249,
    "qwen3_8b.py:dspark": 1_126_422_017,
    "qwen3_14b.py:dspark": 1_860_438_529,
}


def test_every_target_has_its_six_runs():
    stems = {spec.split(":")[0] for spec in RUNS} - {"tiny.py", "smollm2.py"}
    assert sorted(stems) == [
        "gemma3_12b.py",
        "qwen3_14b.py",
        "qwen3_4b.py",
        "qwen3_8b.py",
        "smollm2_cpu.py",
        "smollm2_gpu.py",
    ]
    for stem in stems:
        assert [spec.split(":")[1] for spec in RUNS if spec.startswith(f"{stem}:")] == NAMES


@pytest.mark.parametrize("spec", RUNS)
def test_a_run_builds_its_drafter_for_the_published_shapes(spec):
    run, name = RUNS[spec], spec.split(":")[1]
    target = target_config(TARGETS[run.target])
    config = initial.drafter_config(run.drafter, target)
    assert config.geometry.width == target.geometry.width
    assert config.target_layer_ids[-1] < target.num_layers
    abstract = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))]
    assert sum(sizes) == PUBLISHED.get(spec, sum(sizes))
    losses = run.losses
    match name:
        case "dflash" | "domino" | "dflash2":
            assert config.confidence is None and (losses.cross_entropy, losses.l1) == (1, 0)
        case "dspark" | "dspark-gated" | "dspark-rnn":
            assert config.confidence is not None and losses.l1 and losses.confidence
    assert config.predict_from_anchor == (name not in ("dflash", "dflash2"))
    assert (config.convolution, losses.selector) == (
        (Convolution(), 1) if name == "dflash2" else (None, 0)
    )
    assert losses.is_contiguous == (name != "domino")


@pytest.mark.parametrize("spec", [spec for spec, run in RUNS.items() if run.mesh])
def test_a_pods_devices_share_the_work_evenly(spec):
    run = RUNS[spec]
    devices = math.prod(int(part.split("=")[1]) for part in run.mesh.split(","))
    assert not run.batch_size % devices
    assert not run.batch_size * run.num_anchors // devices % run.anchor_chunk


def test_runs_of_one_file_do_not_share_a_folder():
    folders = [run.workdir for run in RUNS.values()]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("qwen3_4b.py", "name one of its runs, as in .*qwen3_4b.py:NAME: dflash, dspark"),
        ("qwen3_4b.py:eagle", "has dflash, dspark"),
        ("tiny.py:dspark", "has one run, without a name"),
        ("none.py", "no such file"),
    ],
)
def test_a_run_that_is_not_there_is_refused_by_name(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        recipes.read(str(FOLDER / name))


def test_a_file_must_define_runs(tmp_path):
    (tmp_path / "empty.py").write_text("configs = {'a': 3}\n")
    with pytest.raises(ValueError, match="must define `config`"):
        recipes.read(str(tmp_path / "empty.py") + ":a")
    assert isinstance(recipes.read(str(FOLDER / "tiny.py")), TrainConfig)
