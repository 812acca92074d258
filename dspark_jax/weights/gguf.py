"""GGUF files as a Hugging Face style config, tensors under Hugging Face names, and a vocabulary.

GGUF is llama.cpp's format. Its converter renames tensors, folds Gemma's "1 +" into the norms and
reorders q and k of the llama architecture for interleaved rotary pairs; all three are undone here,
so that one table of targets serves both formats.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from jaxtyping import Float32

from dspark_jax.text import Vocabulary
from dspark_jax.weights import gguf_config
from dspark_jax.weights.tensors import CheckpointError

_ROOT = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER | _QK_NORM,
    "gemma2": _LAYER | _FOUR_NORMS,
    "gemma3": _LAYER | _QK_NORM | _FOUR_NORMS,
}
_BIASED = ("llama", "qwen2")  # architectures whose projections may have biases


class Tensors(Mapping[str, np.ndarray]):
    """Weights by Hugging Face name, dequantised to float32 [out, in] each time one is asked for.

    The file stays memory-mapped, so that no more than one dequantised copy need exist.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], np.ndarray]]):
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> Float32[np.ndarray, "..."]:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def read(path: str | Path) -> tuple[dict[str, Any], Tensors, Vocabulary]:
    """Reads a GGUF file into (config, tensors, vocabulary).

    The config has the field names of Hugging Face's config.json, rotary settings flat
    (`rope_theta`, `rope_scaling`). Tensors have the names and the meaning of its safetensors.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointError: not GGUF, truncated, or of an architecture or with tensors not known here.
    """
    reader = _open(Path(path))
    try:
        metadata = _metadata(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(metadata, tensors)
        loaders = {
            _hf_name(name, metadata): partial(_load, tensor, _undo(name, metadata, config))
            for name, tensor in tensors.items()
            if name != "rope_freqs.weight"  # in the config, as rope_scaling
        }
        _check_complete(loaders, metadata)
        return config, Tensors(loaders), _vocabulary(metadata)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}; check the path")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole GGUF file: {error}; "
            "fetch or convert it again"
        ) from error


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every metadata field as a plain Python value; an architecture's own without its prefix."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in _LAYERS:
        raise ValueError(
            f"general.architecture is {architecture!r}, but only {sorted(_LAYERS)} can be read "
            "from GGUF; load the safetensors of this model instead"
        )
    return {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    # GGUF lists a shape from the innermost axis outwards.
    shapes = {name: tuple(map(int, reversed(t.shape))) for name, t in tensors.items()}
    factors = tensors.get("rope_freqs.weight")
    return gguf_config.from_metadata(
        metadata, shapes, None if factors is None else dequantised(factors).ravel()
    )


def _hf_name(name: str, metadata: Mapping[str, Any]) -> str:
    if name in _ROOT:
        return _ROOT[name]
    architecture = metadata["general.architecture"]
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    kinds = ("weight", "bias") if architecture in _BIASED else ("weight",)
    is_layer = name.startswith("blk.") and block.isdecimal()
    if is_layer and stem in _LAYERS[architecture] and kind in kinds:
        return f"model.layers.{block}.{_LAYERS[architecture][stem]}.{kind}"
    raise ValueError(
        f"tensor {name!r} is unknown in architecture {architecture!r}; "
        "load the safetensors of this model instead"
    )


def _check_complete(names: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    stems = _LAYERS[metadata["general.architecture"]].values()
    needed = {
        f"model.layers.{layer}.{stem}.weight"
        for layer in range(metadata["block_count"])
        for stem in stems
    } | {"model.norm.weight"}
    missing = sorted(needed - set(names))
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, {missing[0]} first; convert again")


def _undo(
    name: str, metadata: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[[np.ndarray], np.ndarray]:
    """The inverse of what the converter did to this tensor."""
    architecture = metadata["general.architecture"]
    if architecture == "llama" and ".attn_q." in name:
        return partial(unpermute, heads=config["num_attention_heads"])
    if architecture == "llama" and ".attn_k." in name:
        return partial(unpermute, heads=config["num_key_value_heads"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return lambda weight: weight - np.float32(1)
    return lambda weight: weight


def unpermute(
    weight: Float32[np.ndarray, "out *rest"], heads: int
) -> Float32[np.ndarray, "out *rest"]:
    """Rows of q or k from interleaved rotary pairs (llama.cpp) to half and half (Hugging Face)."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _load(tensor: ReaderTensor, undo: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return undo(dequantised(tensor))


def dequantised(tensor: ReaderTensor) -> Float32[np.ndarray, "..."]:
    """One stored tensor as float32 [out, in], of whatever type the library can dequantise."""
    try:
        weight = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name} has quantisation {tensor.tensor_type.name}, which cannot be "
            "dequantised; take a file in F16, Q8_0, Q4_1 or the like"
        ) from error
    return np.asarray(weight, dtype=np.float32)


def _vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    prefix = "tokenizer.ggml."
    tokens = tuple(metadata.get(f"{prefix}tokens", ()))
    stops = [metadata.get(f"{prefix}{name}_token_id") for name in ("eos", "eot", "eom")]
    return Vocabulary(
        model=metadata.get(f"{prefix}model", "none"),
        pre_tokenizer=metadata.get(f"{prefix}pre", "default"),
        tokens=tokens,
        token_types=tuple(metadata.get(f"{prefix}token_type", (1,) * len(tokens))),
        merges=tuple(metadata.get(f"{prefix}merges", ())),
        stop_tokens=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        bos_token=metadata.get(f"{prefix}bos_token_id"),
        pad_token=metadata.get(f"{prefix}padding_token_id"),
        unknown_token=metadata.get(f"{prefix}unknown_token_id"),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=bool(metadata.get(f"{prefix}add_bos_token", False)),
    )
