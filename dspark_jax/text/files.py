"""Tokenizers from files: a Hugging Face folder, or a vocabulary as a GGUF file stores it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dspark_jax.text.tokenizer import Tokenizer

_ROLES = {
    "bos_token": "bos_token",
    "eos_token": "eos_token",
    "pad_token": "pad_token",
    "unk_token": "unknown_token",
}  # their names there, and here


def _split(digits: str) -> list[pre_tokenizers.PreTokenizer]:
    """The words of Llama 3 and Qwen, which differ in how many digits make one."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_WORDS = {  # by the names of llama.cpp
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "qwen2": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as plain values, as a GGUF file stores one.

    Attributes:
      model: kind of tokenizer; "gpt2" is byte-level BPE.
      pre_tokenizer: name of the rule that cuts text into words before the merges.
      tokens: every token's symbol, in id order.
      token_types: llama.cpp's type of each token: 1 normal, 2 unknown, 3 control, 4 user defined.
      merges: BPE merges "left right", best first.
      stop_tokens: ids that end a generation; the first is the end-of-sequence token.
      bos_token, pad_token, unknown_token: ids, or None.
      chat_template: jinja2 source, or None.
      add_bos: whether plain texts begin with the bos token.
    """

    model: str
    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    bos_token: int | None = None
    pad_token: int | None = None
    unknown_token: int | None = None
    chat_template: str | None = None
    add_bos: bool = False


def from_hf(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Reads tokenizer.json and, where present, tokenizer_config.json, generation_config.json,
    config.json and chat_template.jinja or .json. Stop tokens are those of the first file that names
    some: generation_config.json, tokenizer_config.json, config.json.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file cannot be read, or an id in it is not one.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json; save the model's fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer: {error}; fetch it again") from error
    named = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    tokens = {ours: _named_token(backend, named.get(theirs)) for theirs, ours in _ROLES.items()}
    stops = (
        _ids(_json(folder / "generation_config.json"), "generation_config.json")
        or _ids({"eos_token_id": tokens["eos_token"]}, "tokenizer_config.json")
        or _ids(config, "config.json")
        or _ids(config.get("text_config") or {}, "config.json, text_config")
    )
    return Tokenizer(
        backend=backend,
        stop_tokens=stops,
        chat_template=_chat_template(folder, named),
        **tokens,
    )


def from_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a GGUF file's vocabulary.

    Raises:
      ValueError: it is not byte-level BPE, or its rule for cutting words is unknown.
    """
    if vocabulary.model != "gpt2" or vocabulary.pre_tokenizer not in _WORDS:
        raise ValueError(
            f"tokenizer.ggml.model {vocabulary.model!r} with tokenizer.ggml.pre "
            f"{vocabulary.pre_tokenizer!r} is unsupported (model gpt2 with pre of {sorted(_WORDS)} "
            "is); take the tokenizer from the model's Hugging Face folder with `from_hf`"
        )
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (m.split(" ") for m in vocabulary.merges)]
    is_llama = vocabulary.pre_tokenizer == "llama-bpe"
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=is_llama))
    if vocabulary.pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[vocabulary.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    added = [
        AddedToken(token, special=kind != 4, normalized=False)
        for token, kind in kinds
        if kind in (2, 3, 4)
    ]
    backend.add_tokens(added)
    if vocabulary.add_bos and vocabulary.bos_token is not None:
        bos = vocabulary.tokens[vocabulary.bos_token]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos_token)]
        )
    return Tokenizer(
        backend=backend,
        stop_tokens=vocabulary.stop_tokens,
        chat_template=vocabulary.chat_template,
        bos_token=vocabulary.bos_token,
        eos_token=vocabulary.stop_tokens[0] if vocabulary.stop_tokens else None,
        pad_token=vocabulary.pad_token,
        unknown_token=vocabulary.unknown_token,
    )


def _json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; fetch it again") from error


def _named_token(backend: tokenizers.Tokenizer, value: Any) -> int | None:
    """The id of a token named by its text, or by a record with its text."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return None if text is None else backend.token_to_id(text)


def _ids(fields: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """`eos_token_id` of a config: one id, a list of ids, or nothing."""
    value = fields.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(number) is not int or number < 0 for number in values):
        raise ValueError(f"{file}: eos_token_id is {value!r}; give one token id or a list of them")
    return tuple(values)


def _chat_template(folder: Path, named: Mapping[str, Any]) -> str | None:
    """The template: a file of its own first, as Hugging Face reads them, else in the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = _json(folder / "chat_template.json").get("chat_template", named.get("chat_template"))
    if not isinstance(value, list):
        return value
    by_name = {entry["name"]: entry["template"] for entry in value}
    if "default" not in by_name:
        raise ValueError(
            f"{folder}: chat_template has the names {sorted(by_name)}, none of them 'default'; "
            "put the one to use into chat_template.jinja"
        )
    return by_name["default"]
