"""Answered conversations: JSON lines held in memory, or a folder of shards read as they are needed.

Samples that teach nothing are left out, and counted by reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from dspark_jax import jsonl
from dspark_jax.manifest import MANIFEST, Manifest
from dspark_jax.shards import Shards
from dspark_jax.train.data import Conversation, Corpus, Stored, select

Render = Callable[..., tuple[list[int], list[bool]]]  # (messages, finished=) -> tokens, loss mask


def read(
    path: Path,
    render: Render | None,
    vocab_size: int,
    max_length: int,
    min_supervised: int,
    target: str = "",
    template: str = "",
) -> Corpus:
    """Reads a folder of shards, or JSON lines.

    A line gives `tokens` and `reply_start` (index of the first answer token), or `messages`,
    which `render` turns into tokens and a mask; `finished` = false says that the last answer was
    cut short. Of shards the masks are looked at once; the tokens stay on disk.

    Args:
      path: of the folder or file.
      render: the target's chat template.
      vocab_size: of the target.
      max_length: tokens behind which a conversation is cut.
      min_supervised: supervised tokens a conversation must have left.
      target: its name or folder, which shards must be made by.
      template: fingerprint of its template and tokenizer, which shards must be made with.

    Raises:
      ValueError: a line is malformed, ids are outside the vocabulary, shards are of another
        target, or nothing is left.
    """

    def verdict(conversation: Conversation) -> str | None:
        return why_not(conversation.loss_mask, max_length, min_supervised)

    if path.is_dir():
        shards = Shards(path)
        _check_fit(path, shards.manifest, target, template, vocab_size)
        corpus = _stored(shards, vocab_size, max_length, verdict)
    else:
        lines = jsonl.read(path, "data", lambda row: _conversation(row, render, vocab_size))
        corpus = _held(lines, max_length, verdict)
    if not corpus.conversations:
        raise ValueError(
            f"{path}: none of its conversations can be trained on: {summary(corpus)}; "
            "lower min_supervised, raise max_length, or check the answers"
        )
    return corpus


def summary(corpus: Corpus) -> str:
    """How many conversations are kept, and how many are left out for which reason."""
    out = [f"{count} left out: {reason}" for reason, count in sorted(corpus.dropped.items())]
    return "; ".join([f"{len(corpus.conversations)} conversations", *out])


def why_not(mask: Bool[np.ndarray, "T"], max_length: int, min_supervised: int) -> str | None:
    """Why a conversation cannot be trained on; None = it can."""

    def has_anchor(mask):  # an anchor and its label are both supervised
        return bool((mask[1:] & mask[:-1]).any())

    left = mask[:max_length]
    if left.sum() >= min_supervised and has_anchor(left):
        return None
    if mask.sum() < min_supervised:
        return f"fewer than {min_supervised} supervised tokens"
    if not has_anchor(mask):
        return "no two supervised tokens in a row"
    return f"too little of its answers within max_length = {max_length}"


def _held(
    conversations: Iterable[Conversation],
    max_length: int,
    verdict: Callable[[Conversation], str | None],
) -> Corpus:
    kept, dropped = [], Counter()
    for conversation in conversations:
        if reason := verdict(conversation):
            dropped[reason] += 1
        else:
            kept.append(_cut(conversation, max_length))
    return Corpus(conversations=kept, dropped=dict(dropped))


def _stored(
    shards: Shards,
    vocab_size: int,
    max_length: int,
    verdict: Callable[[Conversation], str | None],
) -> Corpus:
    def load(index: int) -> Conversation:
        sample = shards[index]
        try:
            _check_tokens(sample.tokens, vocab_size)
        except ValueError as error:
            raise ValueError(f"{shards.folder}, sample {index}: {error}") from None
        return Conversation(tokens=sample.tokens, loss_mask=sample.loss_mask)

    kept, dropped = [], Counter()
    for index in range(len(shards)):
        conversation = load(index)
        if reason := verdict(conversation):
            dropped[reason] += 1
        else:
            kept.append(index)
    everything = Stored(
        load=lambda index: _cut(load(index), max_length),
        lengths=np.minimum(shards.lengths, max_length),
        fingerprint=f"{shards.fingerprint} cut to {max_length}",
    )
    chosen = np.asarray(kept, np.int64)
    return Corpus(conversations=select(everything, chosen), dropped=dict(dropped))


def _check_fit(
    folder: Path, manifest: Manifest, target: str, template: str, vocab_size: int
) -> None:
    """Samples must be the target's own answers, in its own template."""
    made, wanted = (
        {"target": Path(name).name, "template": fingerprint, "vocab_size": size}
        for name, fingerprint, size in (
            (manifest.target, manifest.template, manifest.vocab_size),
            (target, template, vocab_size),
        )
    )
    differing = [f for f in made if made[f] != wanted[f]]
    if differing:
        said = "; ".join(f"{f} = {made[f]!r}, this run has {wanted[f]!r}" for f in differing)
        raise ValueError(
            f"{folder / MANIFEST}: made with {said}. A drafter learns its own target's answers: "
            "prepare them with the run's target, or train for the one that gave them"
        )


def _cut(conversation: Conversation, max_length: int) -> Conversation:
    return conversation.replace(
        tokens=conversation.tokens[:max_length], loss_mask=conversation.loss_mask[:max_length]
    )


def _conversation(row: dict, render: Render | None, vocab_size: int) -> Conversation:
    if "tokens" in row and "reply_start" in row:
        tokens, start = np.asarray(row["tokens"]), row["reply_start"]
        if type(start) is not int or not start >= 0:
            raise ValueError(f"`reply_start` = {start!r}: must be an index into `tokens`")
        mask = np.arange(tokens.size) >= start
    elif "messages" in row and render is not None:
        tokens, mask = map(np.asarray, render(row["messages"], finished=row.get("finished", True)))
    else:
        raise ValueError("has neither `tokens` with `reply_start` nor `messages`")
    _check_tokens(tokens, vocab_size)
    return Conversation(tokens=tokens.astype(np.int32), loss_mask=mask.astype(bool))


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind != "i":
        raise ValueError("`tokens` must be a non-empty list of whole numbers")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"token ids {tokens.min()}..{tokens.max()} are outside the target's 0..{vocab_size - 1}"
        )
