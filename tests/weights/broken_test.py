"""Broken checkpoints: each one is a clear error that names the culprit, none a silent load."""

import json
import pickle
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Domino, Geometry, Rotary, TargetConfig
from dspark_jax.nn.drafter import check_pair
from dspark_jax.weights import native, specforge
from dspark_jax.weights.load import load_drafter

from ..conftest import TARGET
from .conftest import drafter_of

GOLDENS = Path(__file__).parent.parent / "goldens"
DSPARK, DFLASH, DFLASH2 = "dspark_qwen3_vanilla", "dflash_qwen3", "dflash2_qwen3"
SPECULATORS, REDUCED = "speculators_dspark_gated", "speculators_dspark_reduced_vocab"
MADE_FOR = TargetConfig(
    family="qwen3",
    vocab_size=96,
    num_layers=8,
    geometry=Geometry(
        width=64, mlp_width=96, heads=4, kv_heads=2, head_dim=16, rotary=Rotary(theta=1e6)
    ),
    max_length=256,
)


def load(folder: Path) -> None:
    """As users do, against the target of the goldens."""
    check_pair(load_drafter(str(folder)), MADE_FOR)


@pytest.fixture
def sound(tmp_path):
    """Copies of checkpoints that load."""

    def build(name: str) -> Path:
        if name == "domino":
            drafter = drafter_of(head=Domino(rank=5, gru_width=6), predict_from_anchor=False)
            specforge.write(tmp_path / name, drafter, TARGET, jnp.float32)
        elif name in ("native", "reduced"):
            drafter = drafter_of(draft_vocab_size=9 if name == "reduced" else 0)
            native.save(tmp_path / name, drafter, jnp.float32, "card")
        else:
            (tmp_path / name).mkdir()
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(GOLDENS / name / file, tmp_path / name / file)
        return tmp_path / name

    return build


def field(*path_and_value):
    """Sets a field, nested by its path; None takes it away."""
    *path, name, value = path_and_value

    def edit(config):
        for step in path:
            config = config[step]
        config.pop(name, None) if value is None else config.update({name: value})

    return edit


def slides(config):
    """A sliding layer, with another rotary than the full one."""
    config |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "rope_local_base_freq": 5e5,
    }


def rope(**fields):
    """Fields of a stretched rotary embedding."""
    return field("rope_parameters", {"rope_theta": 1e6, "factor": 2.0, **fields})


CONFIGS = {
    "unknown architecture": (DSPARK, field("architectures", ["GPT2Model"]), "GPT2Model"),
    "architecture is text": (
        DSPARK,
        field("architectures", "Qwen3DSparkModel"),
        "architectures = ",
    ),
    "no architecture": (DFLASH, field("architectures", None), "architectures = None"),
    "no block size": (DSPARK, field("block_size", None), "no `block_size`"),
    "block size 0": (DSPARK, field("block_size", 0), "block_size = 0"),
    "block size in words": (DSPARK, field("block_size", "seven"), "block_size = 'seven'"),
    "no row in a block": (
        SPECULATORS,
        field("block_size", 0),
        "block_size = 0",
    ),
    "block sizes in conflict": (DFLASH2, field("block_size", 16), "block_size = 16 and 8"),
    "mask ids in conflict": (DFLASH, field("mask_token_id", 3), "mask_token_id = 3 and"),
    "no mask id": (DSPARK, field("mask_token_id", None), "no `mask_token_id`"),
    "mask id out of vocabulary": (DSPARK, field("mask_token_id", 96), "mask_token = 96"),
    "negative mask id": (DFLASH, field("dflash_config", "mask_token_id", -1), "mask_token_id = -1"),
    "tap out of range": (DSPARK, field("target_layer_ids", [1, 3, 48]), "48"),
    "tap of a deeper target": (
        DFLASH,
        field("dflash_config", "target_layer_ids", [1, 3, 8]),
        r"\[8\] are outside the target's",
    ),
    "taps not increasing": (
        DFLASH,
        field("dflash_config", "target_layer_ids", [3, 1, 6]),
        "must increase strictly",
    ),
    "tap twice": (
        SPECULATORS,
        field("aux_hidden_state_layer_ids", [2, 2, 7]),
        "must increase strictly",
    ),
    "tap below the embeddings": (
        SPECULATORS,
        field("aux_hidden_state_layer_ids", [-1, 2, 7]),
        "must increase strictly, from -1",
    ),
    "taps are no list": (DFLASH, field("dflash_config", "target_layer_ids", "1,3"), "'1,3'"),
    "fewer taps than fc has": (DSPARK, field("target_layer_ids", [1, 3]), "fc.weight is"),
    "no width": (DFLASH, field("hidden_size", None), "no `hidden_size`"),
    "width in words": (DFLASH, field("hidden_size", "64"), "hidden_size = '64'"),
    "another width": (DFLASH, field("hidden_size", 32), "fc.weight is"),
    "half a layer": (DFLASH, field("num_hidden_layers", 1.5), "num_hidden_layers = 1.5"),
    "one layer more": (DSPARK, field("num_hidden_layers", 3), "missing tensors: layers.2"),
    "another activation": (DFLASH, field("hidden_act", "relu"), "hidden_act = 'relu'"),
    "biases": (DFLASH, field("attention_bias", True), "attention_bias"),
    "no theta": (DFLASH, field("rope_parameters", None), "rope_theta"),
    "theta in words": (DFLASH, field("rope_parameters", "rope_theta", "big"), "rope_theta = 'big'"),
    "unknown rope": (DFLASH, field("rope_parameters", "rope_type", "spiral"), "'spiral'"),
    "rope is a list": (DFLASH, field("rope_parameters", [1e6]), "rope_parameters = "),
    "pairs side by side": (
        DFLASH,
        field("rope_is_neox_style", False),
        "rope_is_neox_style = False",
    ),
    "a layout of another's": (
        DFLASH,
        field("dflash_config", "sample_from_anchor", True),
        "sample_from_anchor does not say how blocks",
    ),
    "shifted labels": (
        DFLASH,
        field("dflash_config", "shift_label", True),
        "shift_label = True: blocks",
    ),
    "causal queries": (
        DFLASH2,
        field("dflash_config", "dflash_query_causal", True),
        "dflash_query_causal = True: blocks",
    ),
    "a rotary of sliding layers": (DFLASH, slides, "one rotary for all layers"),
    "a rope that is a number": (
        DFLASH,
        field("rope_parameters", {"full_attention": 5}),
        "full_attention = 5: must be an object",
    ),
    "a list of ropes": (DFLASH, field("rope_parameters", "rope_type", ["yarn"]), "rope_type = "),
    "a list of fractions": (
        DFLASH,
        field("partial_rotary_factor", [0.5]),
        "partial_rotary_factor = ",
    ),
    "no frequency": (
        DFLASH,
        rope(rope_type="llama3", low_freq_factor=None),
        "low_freq_factor",
    ),
    "beta in words": (DFLASH, rope(rope_type="yarn", beta_fast="32"), "beta_fast = '32'"),
    "theta 0": (DFLASH, field("rope_parameters", "rope_theta", 0), "rope_theta = 0.0: must be"),
    "a number too large": (DFLASH, field("rms_norm_eps", 10**400), "rms_norm_eps = 1000"),
    "no number": (DFLASH, field("rms_norm_eps", float("nan")), "rms_norm_eps = nan"),
    "heads that cannot be shared": (
        DFLASH,
        field("num_key_value_heads", 3),
        "heads = 4, kv_heads = 3",
    ),
    "layers without end": (DFLASH, field("num_hidden_layers", 10**9), r"1\.\.1024"),
    "our own with no number": (
        "native",
        field("geometry", "norm_eps", float("nan")),
        "norm_eps: nan is not",
    ),
    "our own with a number too large": (
        "native",
        field("geometry", "norm_eps", 10**400),
        "norm_eps: 1000",
    ),
    "our own without end": ("native", field("num_layers", 10**9), "at most 1024"),
    "unknown layer type": (DFLASH, field("layer_types", ["full", "full"]), "layer_types"),
    "sliding without a window": (
        DFLASH,
        field("layer_types", ["sliding_attention"] * 2),
        "sliding_window",
    ),
    "unknown head": (DSPARK, field("markov_head_type", "tree"), "'tree'"),
    "layer types are a number": (DFLASH, field("layer_types", 2), "layer_types = 2"),
    "layer types in words": (DSPARK, field("layer_types", "full"), "layer_types = 'full'"),
    "a multiplier in words": (
        DFLASH,
        field("dflash_config", "output_multiplier", "half"),
        "output_multiplier = 'half'",
    ),
    "a cap that is a list": (
        DFLASH,
        field("dflash_config", "final_logit_softcapping", [30]),
        "final_logit_softcapping = ",
    ),
    "causal in words": (DFLASH, field("is_causal", "no"), "is_causal = 'no'"),
    "confidence in words": (
        DSPARK,
        field("enable_confidence_head", "yes"),
        "enable_confidence_head = 'yes'",
    ),
    "a layout in words": (SPECULATORS, field("sample_from_anchor", "yes"), "sample_from_anchor"),
    "negative rank": (DSPARK, field("markov_rank", -1), "markov_rank = -1"),
    "no rank": (SPECULATORS, field("markov_rank", None), "no `markov_rank`"),
    "a rank the tables have not": (DSPARK, field("markov_rank", 5), "markov_w1.weight is"),
    "nested config is a list": (DFLASH, field("dflash_config", []), "dflash_config = "),
    "first version with the second's fields": (
        DFLASH2,
        field("architectures", ["DFlashDraftModel"]),
        "selector_rank.* are DFlash2DraftModel's",
    ),
    "second version without a selector": (
        DFLASH,
        field("architectures", ["DFlash2DraftModel"]),
        "no `selector_rank`",
    ),
    "unknown algorithm": (SPECULATORS, field("speculators_model_type", "eagle3"), "'eagle3'"),
    "another backbone": (
        SPECULATORS,
        field("transformer_layer_config", "model_type", "mamba"),
        "'mamba'",
    ),
    "layout against the proposal": (
        SPECULATORS,
        field("sample_from_anchor", False),
        "leave the layout open",
    ),
    "draft vocabulary larger than the target's": (
        SPECULATORS,
        field("draft_vocab_size", 98),
        "draft_vocab_size = 98",
    ),
    "draft vocabulary of another size": (REDUCED, field("draft_vocab_size", 39), "d2t is"),
    "domino without its layout": (
        "domino",
        field("dflash_config", "shift_label", None),
        "shift_label = None leaves the layout open",
    ),
    "domino without its width": (
        "domino",
        field("dflash_config", "gru_hidden_dim", None),
        "no `gru_hidden_dim`",
    ),
    "our own with a field too many": ("native", field("colour", "red"), "unknown fields colour"),
    "our own with a field too few": ("native", field("block_size", None), "block_size"),
    "our own with a wrong type": ("native", field("block_size", "4"), "block_size: '4'"),
    "our own with an unknown head": ("native", field("head", "kind", "Tree"), "kind = 'Tree'"),
    "our own with unordered taps": ("native", field("target_layer_ids", [2, 0]), "must increase"),
    "quantised, and said so": (
        DSPARK,
        field("quantization_config", {"quant_method": "fp8"}),
        "quantization_config",
    ),
}


@pytest.mark.parametrize(("name", "edit", "complaint"), CONFIGS.values(), ids=CONFIGS)
def test_a_broken_config_is_refused(name, edit, complaint, sound):
    folder = sound(name)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=complaint):
        load(folder)


FC, W2 = "fc.weight", "markov_head.markov_w2.weight"
TENSORS = {
    "missing tensor": (DSPARK, {FC: None}, f"missing tensors: {FC}"),
    "missing embedding": (DSPARK, {"embed_tokens.weight": None}, "missing tensors: embed_tokens"),
    "an embedding of another shape": (
        DSPARK,
        {"embed_tokens.weight": (3, 5)},
        r"embed_tokens.weight is float32 \(3, 5\), expected floats \(96, 64\)",
    ),
    "a quantised lm head": (DSPARK, {"lm_head.weight": np.int8}, "lm_head.weight is int8"),
    "missing norm": (DFLASH, {"hidden_norm.weight": None}, "missing tensors: hidden_norm.weight"),
    "extra tensor": (DSPARK, {"mtp.fc.weight": (2, 2)}, "unclaimed tensors: mtp.fc.weight"),
    "embedding where none belongs": (
        DFLASH,
        {"embed_tokens.weight": (96, 64)},
        "unclaimed tensors: embed_tokens.weight",
    ),
    "seven experts' tensors": (
        DFLASH,
        {f"layers.0.experts.{i}": (2,) for i in range(7)},
        "unclaimed tensors: layers.0.experts.0, .*experts.6",
    ),
    "wrong shape": (DSPARK, {FC: (64, 64)}, r"fc.weight is \(64, 64\)"),
    "transposed": (DFLASH, {FC: "transposed"}, "fc.weight is"),
    "whole numbers": (DSPARK, {FC: np.int32}, "fc.weight holds int32"),
    "quantised without scales": (DFLASH, {FC: np.int8}, "fc.weight holds int8"),
    "fp8 without scales": (DFLASH, {FC: jnp.float8_e4m3fn}, "fc.weight holds F8_E4M3"),
    "quantised with scales": (
        DFLASH,
        {FC: np.int8, "fc.weight_scale": (1,)},
        "unclaimed tensors: fc.weight_scale",
    ),
    "one codebook": (
        DFLASH2,
        {"candidate_selector.successor_codebook": None},
        "missing tensors: candidate_selector.successor_codebook",
    ),
    "no map of a reduced vocabulary": (REDUCED, {"d2t": None, "t2d": None}, "d2t and t2d"),
    "half a map": (REDUCED, {"t2d": None}, "missing tensors: t2d"),
    "a map of floats": (REDUCED, {"d2t": np.float32}, "d2t is float32"),
    "a map that disagrees": (REDUCED, {"t2d": "flipped"}, "d2t and t2d disagree"),
    "a map past the vocabulary": (REDUCED, {"d2t": "shifted"}, "d2t and t2d disagree"),
    "a reduced head of another size": (REDUCED, {"lm_head.weight": (41, 64)}, "lm_head.weight is"),
    "ids that are floats": (
        "reduced",
        {"heads.draft_tokens": np.float32},
        "holds float32",
    ),
    "a codebook twice": (
        DFLASH2,
        {"candidate_selector.successor_codebook.weight": (96, 12)},
        "are two tensors for candidate_selector.successor_codebook",
    ),
    "a read-out twice": (
        "domino",
        {"logit_head.embed_proj.2.weight": (97, 5)},
        "are two tensors for embed_proj.2.weight",
    ),
    "domino without its read-out": ("domino", {"embed_proj.2.weight": None}, "embed_proj.2.weight"),
}


@pytest.mark.parametrize(("name", "edits", "complaint"), TENSORS.values(), ids=TENSORS)
def test_broken_tensors_are_refused(name, edits, complaint, sound):
    folder = sound(name)
    tensors = load_file(folder / "model.safetensors")
    for tensor, edit in edits.items():
        old = tensors.pop(tensor, None)
        if isinstance(edit, tuple):
            tensors[tensor] = np.ones(edit, np.float32)
        elif edit == "transposed":
            tensors[tensor] = np.ascontiguousarray(old.T)
        elif edit == "flipped":
            tensors[tensor] = ~old
        elif edit == "shifted":
            tensors[tensor] = old + 60
        elif edit is not None:
            tensors[tensor] = old.astype(edit)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        load(folder)


def cut(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def index(**weight_map):
    """The weights behind an index; a `here` is the file itself."""

    def edit(folder: Path) -> None:
        names = load_file(folder / "model.safetensors")
        shutil.copyfile(folder / "model.safetensors", folder / "here")
        mapped = dict.fromkeys(names, "here") | weight_map
        text = json.dumps({"weight_map": mapped})
        (folder / "model.safetensors.index.json").write_text(text)

    return edit


def twice(folder: Path) -> None:
    """Two files behind an index; the second holds a tensor of the first too."""
    tensors = load_file(folder / "model.safetensors")
    first, second = sorted(tensors)[:-3], [*sorted(tensors)[-3:], FC]
    weight_map = dict.fromkeys(second, "b.safetensors") | dict.fromkeys(first, "a.safetensors")
    for file, names in (("a.safetensors", first), ("b.safetensors", second)):
        save_file({name: tensors[name] for name in names}, folder / file)
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def config(text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "config.json").write_bytes(data)


def weights(data: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def only(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


FILES = {
    "truncated weights": (cut, "model.safetensors"),
    "empty weights": (weights(b""), "model.safetensors"),
    "a header longer than the file": (weights(b"\xff" * 16), "model.safetensors"),
    "a pickle": (weights(pickle.dumps({"a": 1})), "model.safetensors"),
    "a pointer of git lfs": (weights(b"version https://git-lfs.github.com/spec/v1"), "safetensors"),
    "no weights": (only("model.safetensors"), "model.safetensors: no such file"),
    "no config": (only("config.json"), "config.json: no such file"),
    "bad JSON": (config("{"), "config.json: not valid JSON"),
    "a list": (config("[]"), "config.json: holds a list"),
    "no UTF-8": (config(b"\xff\xfe{}"), "config.json: not valid JSON"),
    "nested too deeply": (config("[" * 100_000), "config.json"),
    "an empty object": (config("{}"), "architectures = None"),
    "an index that leaves the folder": (index(x="../../etc/passwd"), "outside the folder"),
    "an index with an absolute path": (index(x="/etc/passwd"), "outside the folder"),
    "an index to a file that is not there": (index(x="b.safetensors"), "b.safetensors: no such"),
    "an index to a tensor that is not there": (index(x="here"), r"do not hold: \['x'\]"),
    "an index to a name that is too long": (index(x="b" * 300), "cannot be read"),
    "a tensor in two files": (
        twice,
        r"does not map to b.saf.*\['fc.weight'\]",
    ),
    "an index without a map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "no `weight_map`",
    ),
}


@pytest.mark.parametrize(("edit", "complaint"), FILES.values(), ids=FILES)
def test_broken_files_are_refused(edit, complaint, sound):
    folder = sound(DSPARK)
    edit(folder)
    with pytest.raises(ValueError, match=complaint):
        load(folder)


@pytest.mark.parametrize("name", [DSPARK, DFLASH, DFLASH2, "domino", "native"])
def test_what_they_were_broken_from_loads(name, sound):
    load_drafter(str(sound(name)))
