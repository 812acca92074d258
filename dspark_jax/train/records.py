"""Lines of metrics, to metrics.jsonl and as TensorBoard events; none of a lost step remains."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dspark_jax.train.workdir import open_metrics


class Records:
    """Context: writes lines of metrics behind those of the steps that are kept.

    One process of a run writes; the others keep silent.
    """

    def __init__(self, workdir: Path, step: int, tensorboard: bool, writes: bool = True):
        open_events = _event_writer() if tensorboard else None  # if absent, so on all processes
        self._writer = (
            open_events(workdir / "tensorboard", step) if tensorboard and writes else None
        )
        self._file = open_metrics(workdir, step) if writes else None

    def write(self, line: dict) -> None:
        """One line: `step` and what was measured there."""
        if self._file is None:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in scalars({k: v for k, v in line.items() if k != "step"}):
                self._writer.add_scalar(name, value, line["step"])
            self._writer.flush()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Names and numbers of a nested record; positions of a list count from 1."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value, 1)
    else:
        yield name, float(value)
        return
    for part, inner in parts:
        yield from scalars(inner, f"{name}/{part}" if name else str(part))


def _event_writer() -> Callable:
    """(folder, step) -> a writer; TensorBoard drops what earlier files say of later steps."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard = True needs the extra: pip install 'dspark-jax[tensorboard]', "
            "or leave it False: metrics.jsonl holds the same numbers"
        ) from None
    # Files are named by the second: the suffix keeps a quick continuation from overwriting one.
    return lambda folder, step: SummaryWriter(
        str(folder), purge_step=step + 1, filename_suffix=f".{step}"
    )
