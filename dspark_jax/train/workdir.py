"""A run's work folder: what it was started with, so that a resumed run is the same; its metrics."""

import hashlib
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from dspark_jax.config import DrafterConfig, as_dict
from dspark_jax.config_training import TrainConfig
from dspark_jax.folders import replace
from dspark_jax.train.data import Corpus, Stored

# What may differ between a run and its continuation: it changes no parameter beyond rounding.
_MAY_CHANGE = {
    "train.mesh",
    "train.accumulate",
    "train.anchor_chunk",
    "train.data",
    "train.threads",
    "train.workdir",
    "train.log_every",
    "train.evaluate_every",
    "train.term_gradients",
    "train.tensorboard",
    "train.save_every",
    "train.keep",
    "train.max_cache_bytes",
    "train.cache",
    "train.export_dtype",
}


def digest(corpus: Corpus) -> str:
    """A fingerprint of every token and mask, in order."""
    if isinstance(corpus.conversations, Stored):
        return corpus.conversations.fingerprint
    total = hashlib.sha256()
    for conversation in corpus.conversations:
        total.update(conversation.tokens.tobytes())
        total.update(conversation.loss_mask.tobytes())
    return total.hexdigest()


def pinned(workdir: Path) -> dict[str, Any] | None:
    """What the run of this folder was started with; None if it is new."""
    path = workdir / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def pin(workdir: Path, config: TrainConfig, drafter: DrafterConfig, corpus: Corpus) -> None:
    """Stores the resolved config; a resumed run must have the same, field by field.

    Raises:
      ValueError: names every field that differs.
    """
    resolved = json.loads(
        json.dumps(
            {
                "train": as_dict(config),
                "drafter": as_dict(drafter),
                "corpus": digest(corpus),
            }
        )
    )
    before = pinned(workdir)
    if before is None:
        workdir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(resolved, indent=1) + "\n"
        replace(workdir / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
    elif changed := differences(_comparable(before), _comparable(resolved), _MAY_CHANGE):
        raise ValueError(
            f"{workdir} holds a run with other settings: {'; '.join(changed)}. "
            "Use the same settings to resume, or another workdir"
        )


def _comparable(resolved: dict[str, Any]) -> dict[str, Any]:
    """The target by its folder's name alone: disks are mounted elsewhere."""
    train = resolved["train"]
    return {**resolved, "train": {**train, "target": Path(train["target"]).name}}


def differences(
    old: dict[str, Any], new: dict[str, Any], may_change: Set[str], prefix: str = ""
) -> list[str]:
    """Fields that differ; those an older version did not write are taken as they are."""
    found = []
    for name in sorted(set(old) | set(new)):
        was, now, path = old.get(name), new.get(name), prefix + name
        if isinstance(was, dict) and isinstance(now, dict):
            found += differences(was, now, may_change, path + ".")
        elif name in old and was != now and path not in may_change:
            found.append(f"{path} was {was!r}, is {now!r}")
    return found


def open_metrics(workdir: Path, step: int):
    """The metrics file, for appending; lines behind `step`, of work that was lost, are dropped."""
    path = workdir / "metrics.jsonl"
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        replace(path, lambda path: path.write_text("".join(kept), encoding="utf-8"))
    return path.open("a", encoding="utf-8")
