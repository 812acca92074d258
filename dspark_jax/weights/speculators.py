"""speculators' dflash, dspark and dflash2 checkpoints: a nested Qwen3 config, layer ids plus one.

Tensors are named as DeepSpec and z-lab name them. A reduced draft vocabulary brings its own lm
head, `t2d` (which tokens of the target it holds) and `d2t` (offsets: id = place + d2t[place]).
Their trainer measures sliding windows from the anchor, engines from each row, as is done here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from dspark_jax.config import Domino, DrafterConfig, TargetConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights import deepspec, export, zlab
from dspark_jax.weights.targets import qwen3_geometry
from dspark_jax.weights.tensors import (
    CheckpointError,
    fill,
    flag,
    part,
    read_folder,
    read_json,
    required,
    whole,
    wholes,
)

KINDS = ("dflash", "dspark", "dflash2")
_VERSION = "0.9.0"  # of the library whose fields these are
_CLASSES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
_TOKENS = "draft_tokens"  # stands for both tables
_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")  # of training, in early files
_OWN = {"heads.lm_head": "lm_head.weight", "heads.draft_tokens": _TOKENS}


def drafter_config(hf: Mapping[str, Any]) -> DrafterConfig:
    """Reads config.json."""
    kind = required(hf, "speculators_model_type")
    if kind not in KINDS:
        raise CheckpointError(
            f"speculators_model_type = {kind!r}: supported are {', '.join(KINDS)}"
        )
    layer, from_anchor = _layer(hf), _from_anchor(hf, kind)
    vocabulary, drafted = whole(layer, "vocab_size"), whole(hf, "draft_vocab_size")
    if drafted > vocabulary or (kind == "dflash2" and drafted < vocabulary):
        raise CheckpointError(
            f"draft_vocab_size = {drafted}: {kind} drafts at most the target's {vocabulary} tokens"
            + (", and no fewer" if kind == "dflash2" else "")
        )
    windows = zlab.windows(layer)
    non_causal = flag(hf, "sliding_window_non_causal")
    is_causal = kind != "dflash2" if non_causal is None else not non_causal
    causal = tuple(is_causal and window is not None for window in windows)
    config = DrafterConfig(
        geometry=qwen3_geometry(layer),
        vocab_size=vocabulary,
        num_layers=whole(layer, "num_hidden_layers"),
        block_size=whole(hf, "block_size", 1 if from_anchor else 2) - (not from_anchor),
        target_layer_ids=tuple(i - 1 for i in wholes(hf, "aux_hidden_state_layer_ids")),
        mask_token=whole(hf, "mask_token_id", 0),
        predict_from_anchor=from_anchor,
        windows=windows if any(windows) else (),
        causal=causal if any(causal) else (),
        draft_vocab_size=drafted if drafted < vocabulary else 0,
    )
    return dataclasses.replace(config, **_head(hf, kind))


def _layer(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config of the backbone."""
    layer = part(hf, "transformer_layer_config")
    if layer.get("model_type") != "qwen3":
        raise CheckpointError(
            f"transformer_layer_config.model_type = {layer.get('model_type')!r}: supported is qwen3"
        )
    width, other = whole(layer, "hidden_size"), hf.get("target_hidden_size")
    if other not in (None, width):
        raise CheckpointError(f"target_hidden_size = {other}, hidden_size = {width}: must agree")
    return layer


def _head(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fields of a drafter's config that its kind adds."""
    if kind == "dspark":
        return {"head": deepspec.markov_head(hf), "confidence": deepspec.confidence(hf)}
    return {} if kind == "dflash" else zlab.selector(hf)


def _from_anchor(hf: Mapping[str, Any], kind: str) -> bool:
    """The block's layout: said outright, or told by the number of proposed tokens.

    dflash and dflash2 were always anchor and masks before the field came; dspark's default is one
    thing in the library and another in engines, so that nothing may be assumed.
    """
    rows, said = whole(hf, "block_size"), flag(hf, "sample_from_anchor")
    methods = part(hf, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    meanings = (
        f"True: {rows} rows draft {rows} tokens, the anchor's included; "
        f"False: {rows} rows draft {rows - 1}, the anchor's not"
    )
    if said is None and kind == "dspark":
        said = {rows: True, rows - 1: False}.get(tokens)
    elif said is None:
        said = False
    if said is None or tokens not in (None, rows if said else rows - 1):
        raise CheckpointError(
            f"sample_from_anchor = {hf.get('sample_from_anchor')}, block_size = {rows}, "
            f"speculative_tokens = {tokens} leave the layout open ({meanings}): copy the folder "
            "and set sample_from_anchor in its config.json"
        )
    if said and kind == "dflash2":
        raise CheckpointError("sample_from_anchor = True: dflash2's blocks are anchor and masks")
    return said


def is_second(config: DrafterConfig) -> bool:
    """Whether this is written as dflash2."""
    return config.convolution is not None or getattr(config.head, "gate", None) == "linear"


def namer(config: DrafterConfig) -> Callable[[str], str]:
    """Speculators' name of each of our parameter paths."""
    plain = zlab.name if is_second(config) else deepspec.namer(config)
    return lambda path: _OWN.get(path) or plain(path)


def read(folder: Path, dtype: DTypeLike = jnp.float32) -> tuple[Drafter, dict[str, Array]]:
    """A drafter of one of the three kinds, and the target's tables if it ships them."""
    config, tensors = drafter_config(read_json(folder / "config.json")), read_folder(folder)
    drafted, shape = config.draft_vocab_size, (config.vocab_size, config.geometry.width)
    # Where it drafts fewer tokens, the lm head is its own.
    known = deepspec.TABLES[:1] if drafted else deepspec.TABLES
    copies = {n: deepspec.take_table(tensors, n, shape) for n in known if n in tensors}
    offsets, held = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if drafted or offsets is not None or held is not None:
        tokens = _draft_tokens(offsets, held, drafted or config.vocab_size, config.vocab_size)
        tensors |= {_TOKENS: tokens} if drafted else {}
    build = lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype)  # noqa: E731
    return fill(build, tensors, namer(config), dtype, _VERIFIER), copies


def _draft_tokens(
    offsets: Array | None, held: Array | None, drafted: int, vocabulary: int
) -> np.ndarray:
    """Ids of the draft vocabulary, which both tables must name in ascending order."""
    if offsets is None or held is None:
        absent = " and ".join(n for n, t in (("d2t", offsets), ("t2d", held)) if t is None)
        raise CheckpointError(f"missing tensors: {absent}, the map between the vocabularies")
    offsets, held = np.asarray(offsets), np.asarray(held)
    if offsets.shape != (drafted,) or held.shape != (vocabulary,) or offsets.dtype.kind != "i":
        raise CheckpointError(
            f"d2t is {offsets.dtype} {offsets.shape}, t2d {held.dtype} {held.shape}: expected "
            f"offsets of {drafted} draft tokens and one flag for each of {vocabulary} tokens"
        )
    tokens = np.arange(drafted) + offsets
    if not np.array_equal(tokens, np.flatnonzero(held)):
        raise CheckpointError(
            "d2t and t2d disagree: place + d2t[place] must run through the tokens that t2d marks, "
            f"ascending within 0..{vocabulary - 1}"
        )
    return tokens.astype(np.int32)


def write(
    folder: Path,
    drafter: Drafter,
    target: TargetConfig,
    dtype: DTypeLike,
    card: str = "",
    target_name: str = "target",
) -> None:
    """Writes a drafter as dflash2 if it has a linear gate, as dspark or dflash otherwise.

    Without a head and not from the anchor it is dflash. Identity convolutions are written where a
    Selector stands without any.

    Raises:
      CheckpointError: the format cannot hold it, with every reason.
    """
    kind = _kind(drafter.config)
    export.refuse(f"speculators {kind}", objections(drafter.config, target))
    drafter = zlab.with_convolutions(drafter) if kind == "dflash2" else drafter
    c = drafter.config
    layer = export.backbone_fields(c, target.max_length, dtype)
    said = {"dspark": _markov_fields, "dflash2": zlab.selector_fields}.get(kind, lambda c: {})
    fields = {
        "architectures": [f"{_CLASSES[kind]}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "dtype": layer.pop("dtype"),
        "tie_word_embeddings": False,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "block_size": c.num_inputs,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "mask_token_id": c.mask_token,
        "sample_from_anchor": c.predict_from_anchor,
        "sliding_window_non_causal": not any(c.causal) and (any(c.windows) or kind == "dflash2"),
        "target_hidden_size": None,
        **said(c),
        "speculators_config": _proposal(kind, c.block_size, target, target_name),
        "transformer_layer_config": layer,
    }
    export.write(folder, fields, _tensors(drafter, dtype), card)


def _kind(c: DrafterConfig) -> str:
    if is_second(c):
        return "dflash2"
    is_bare = c.head is None and c.confidence is None and not c.predict_from_anchor
    return "dflash" if is_bare else "dspark"


def _markov_fields(c: DrafterConfig) -> dict[str, Any]:
    return {
        "markov_rank": 0 if c.head is None else c.head.rank,
        "markov_head_type": "vanilla" if c.head is None else getattr(c.head, "gate", "rnn"),
        "enable_confidence_head": c.confidence is not None,
        "confidence_head_with_markov": c.confidence is not None and c.confidence.with_markov,
    }


def _proposal(kind: str, tokens: int, target: TargetConfig, name: str) -> dict[str, Any]:
    """What engines read: how many tokens are proposed, and for which target."""
    family = target.family.removesuffix("_text").split("_")
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": tokens,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {
            "architectures": ["".join(part.capitalize() for part in family) + "ForCausalLM"],
            "name_or_path": name,
        },
    }


def _tensors(drafter: Drafter, dtype: DTypeLike) -> dict[str, Array | np.ndarray]:
    tensors = export.tensors_of(drafter, namer(drafter.config), dtype)
    if drafter.config.draft_vocab_size:
        tokens = np.asarray(tensors.pop(_TOKENS), np.int64)
        held = np.zeros(drafter.config.vocab_size, bool)
        held[tokens] = True
        tensors |= {"d2t": tokens - np.arange(tokens.size), "t2d": held}
    return tensors


def objections(c: DrafterConfig, target: TargetConfig) -> list[str]:
    """Why this format cannot hold a drafter; nothing = it can."""
    reasons = [*export.unlike_qwen3(c), *export.last_tap(c, target)]
    unsaid = {"embedding_scale": None, "logit_multiplier": 1.0, "logit_softcap": None}
    reasons += [f"{n} = {getattr(c, n)}" for n, plain in unsaid.items() if getattr(c, n) != plain]
    if len(set(c.windows) - {None}) > 1:
        reasons.append(f"windows = {c.windows}: one size for all sliding layers")
    sliding = tuple(window is not None for window in c.windows)
    if c.causal and c.causal != sliding:
        reasons.append(f"causal = {c.causal}: said of all sliding layers, never of full ones")
    if not is_second(c):
        if isinstance(c.head, Domino):
            reasons.append(f"head = {c.head}")
        return reasons + ([f"candidates = {c.candidates}"] if c.candidates else [])
    if getattr(c.head, "gate", None) != "linear":
        reasons.append(f"head = {c.head} with convolutions: dflash2's is a linear gate")
    if c.predict_from_anchor:
        reasons.append("predict_from_anchor = True: dflash2's blocks are the anchor and masks")
    if c.confidence is not None:
        reasons.append(f"confidence = {c.confidence}: dflash2 has none")
    if c.draft_vocab_size:
        reasons.append(f"draft_vocab_size = {c.draft_vocab_size}: dflash2 drafts all tokens")
    return reasons
