"""The work folder of a preparation: every row is accounted for once, whenever it was stopped.

Rows may end in any order. Each is written to a journal at once; when all rows of the next stretch
have ended, their samples become a shard, in the order of the rows. So the shards depend on the
rows alone, and a run that is killed loses no more than the rows it was busy with.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax import shards
from dspark_jax.folders import lock, replace
from dspark_jax.manifest import MANIFEST, Manifest
from dspark_jax.prepare.sample import Outcome
from dspark_jax.shards import Sample
from dspark_jax.train.workdir import differences

JOURNAL = "journal.jsonl"
_PROGRESS = {"consumed", "dropped", "complete", "shards"}  # of the manifest; the rest are settings
_MAY_CHANGE = {"source.prompts"}  # the name of the file; its content may not


class Ledger:
    """Which rows have ended, and with what.

    Attributes:
      folder: of manifest, journal and shards.
      manifest: as it stands in the folder.
    """

    def __init__(self, folder: Path, settings: Manifest, rows: int, shard_size: int):
        """Begins a preparation, or goes on with the folder's.

        Args:
          folder: where to; made if there is none.
          settings: a manifest without progress.
          rows: to be accounted for.
          shard_size: rows of a shard.

        Raises:
          ValueError: the folder was begun with other settings, named field by field, or has lost
            them; or another process works on it.
        """
        self.folder, self._rows, self._size = folder, rows, shard_size
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder)
        try:
            self.manifest = _resume(folder, settings)
            self._ended = _read_journal(folder / JOURNAL, self.manifest.consumed)
            self._rewrite()
            self._finalise()
        except BaseException:
            os.close(self._lock)
            raise

    def missing(self) -> Iterator[int]:
        """Rows without an outcome, in order."""
        for row in range(self.manifest.consumed, self._rows):
            if row >= self.manifest.consumed and row not in self._ended:
                yield row

    @property
    def ended(self) -> int:
        """Rows that are accounted for."""
        return self.manifest.consumed + len(self._ended)

    def add(self, row: int, outcome: Outcome) -> None:
        """Accounts for a row."""
        self._journal.write(_line(row, outcome))
        self._journal.flush()
        self._ended[row] = outcome
        self._finalise()

    def close(self) -> None:
        """Lets go of the folder."""
        self._journal.close()
        os.close(self._lock)

    def _finalise(self) -> None:
        """Writes the shards whose rows have all ended."""
        while not self.manifest.complete:
            start = self.manifest.consumed
            stop = min(start + self._size, self._rows)
            if not all(row in self._ended for row in range(start, stop)):
                return
            outcomes = [self._ended[row] for row in range(start, stop)]
            samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
            dropped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
            is_last = stop == self._rows
            self.manifest = shards.add_shard(
                self.folder,
                dataclasses.replace(self.manifest, complete=is_last),
                samples,
                stop,
                dropped,
            )
            for row in range(start, stop):
                del self._ended[row]
            self._journal.close()
            self._rewrite()

    def _rewrite(self) -> None:
        """A journal of what is in no shard yet."""
        lines = "".join(_line(row, outcome) for row, outcome in self._ended.items())
        path = self.folder / JOURNAL
        replace(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))
        self._journal = path.open("a", encoding="utf-8")


def _resume(folder: Path, settings: Manifest) -> Manifest:
    if not (folder / MANIFEST).exists():
        if (folder / JOURNAL).exists():  # a kill leaves none: the manifest comes first
            raise ValueError(
                f"{folder / JOURNAL} holds answers, but which settings gave them is lost with "
                f"{MANIFEST}: delete it to ask its rows again, or name another folder"
            )
        settings.save(folder)
        return settings
    found = Manifest.load(folder)
    changed = differences(_settings(found), _settings(settings), _MAY_CHANGE)
    if changed:
        raise ValueError(
            f"{folder} was begun with other settings: {'; '.join(changed)}. "
            "Use the same settings to go on, or another folder"
        )
    return found


def _settings(manifest: Manifest) -> dict[str, Any]:
    row = dataclasses.asdict(dataclasses.replace(manifest, shards=()))
    return {name: value for name, value in row.items() if name not in _PROGRESS}


def _line(row: int, outcome: Outcome) -> str:
    if isinstance(outcome, Sample):
        value: dict[str, Any] = {"sample": outcome.as_row()}
    else:
        value = {"dropped": outcome}
    return json.dumps({"row": row, **value}) + "\n"


def _read_journal(path: Path, consumed: int) -> dict[int, Outcome]:
    """Rows of the journal that are in no shard; a torn last line counts for nothing."""
    ended: dict[int, Outcome] = {}
    if not path.exists():
        return ended
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; delete it to ask its rows again") from None
        if value["row"] >= consumed:
            ended[value["row"]] = value.get("dropped") or Sample.from_row(value["sample"])
    return ended
