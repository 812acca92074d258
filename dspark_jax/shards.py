"""Training samples on disk: ArrayRecord shards beside a `manifest.json`, in one folder.

A record is JSON: `tokens`, `spans` ([start, stop) where the loss counts) and `provenance`. Files
that the manifest does not list are of no account.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Bool, Int

from dspark_jax.folders import replace
from dspark_jax.manifest import Manifest, Shard


@dataclasses.dataclass(frozen=True)
class Sample:
    """One conversation to train on."""

    tokens: Int[np.ndarray, "T"]  # ids of the whole conversation, int32
    loss_mask: Bool[np.ndarray, "T"]  # True where the target itself wrote the token
    provenance: Mapping[str, Any]  # where it comes from, as JSON holds it

    def as_row(self) -> dict[str, Any]:
        """The sample as JSON holds it."""
        edges = np.flatnonzero(np.diff(np.pad(self.loss_mask.astype(np.int8), 1)))
        return {
            "tokens": self.tokens.tolist(),
            "spans": edges.reshape(-1, 2).tolist(),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        """The sample that `as_row` wrote."""
        tokens = np.asarray(row["tokens"], np.int32)
        mask = np.zeros(tokens.size, bool)
        for start, stop in row["spans"]:
            mask[start:stop] = True
        return cls(tokens=tokens, loss_mask=mask, provenance=row["provenance"])

    def encode(self) -> bytes:
        """The sample as a record."""
        return json.dumps(self.as_row(), ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, record: bytes) -> "Sample":
        """The sample of a record."""
        return cls.from_row(json.loads(record))


def add_shard(
    folder: Path,
    manifest: Manifest,
    samples: Sequence[Sample],
    consumed: int,
    dropped: Mapping[str, int],
) -> Manifest:
    """Writes one more shard, then the manifest that lists it.

    Killed before the manifest is in place, the folder is what it was, and the same call repeats.

    Args:
      folder: where the manifest lies.
      manifest: the folder's.
      samples: of the shard; none = only the counts move.
      consumed: prompts accounted for with this shard.
      dropped: prompts without a sample since the last shard, by reason.
    """
    shards = manifest.shards
    if samples:
        name = f"samples-{len(shards):05d}.arrayrecord"
        replace(folder / name, lambda path: _write_records(path, samples))
        shards = (*shards, _describe(folder / name, samples))
    total = {**manifest.dropped}
    for reason, count in dropped.items():
        total[reason] = total.get(reason, 0) + count
    manifest = dataclasses.replace(manifest, shards=shards, consumed=consumed, dropped=total)
    manifest.save(folder)
    return manifest


def _write_records(path: Path, samples: Sequence[Sample]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")  # every record can be read alone
    for sample in samples:
        writer.write(sample.encode())
    writer.close()


def _describe(path: Path, samples: Sequence[Sample]) -> Shard:
    return Shard(
        name=path.name,
        records=len(samples),
        bytes=path.stat().st_size,
        sha256=_sha256(path),
        supervised=sum(int(sample.loss_mask.sum()) for sample in samples),
        lengths=tuple(len(sample.tokens) for sample in samples),
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Shards(Sequence[Sample]):
    """The samples of a folder, read one at a time wherever they lie.

    Attributes:
      folder: where they are.
      manifest: how they were made.
    """

    def __init__(self, folder: Path, *, allow_incomplete: bool = False):
        """Opens a folder.

        Args:
          folder: with the manifest and its shards.
          allow_incomplete: also one whose preparation has not come to its end.

        Raises:
          ValueError: no manifest or not one of this format, an unfinished preparation, no sample,
            or a shard that is missing, cut or holds another number of records.
        """
        self.folder = folder
        self.manifest = Manifest.load(folder)
        if not self.manifest.complete and not allow_incomplete:
            raise ValueError(
                f"{folder}: its preparation stopped after {self.manifest.consumed} prompts; run "
                "the same command again to finish it"
            )
        if not self.manifest.samples:
            raise ValueError(f"{folder}: holds no sample; dropped: {self.manifest.dropped}")
        for shard in self.manifest.shards:
            _check_file(folder / shard.name, shard)
        self._source = grain.sources.ArrayRecordDataSource(
            [str(folder / shard.name) for shard in self.manifest.shards]
        )

    @cached_property
    def lengths(self) -> Int[np.ndarray, "N"]:
        """Tokens of each sample; from the manifest alone."""
        shards = [shard.lengths for shard in self.manifest.shards]
        return np.concatenate(shards).astype(np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """Of every sample, in order; from the shards' checksums."""
        sums = [shard.sha256 for shard in self.manifest.shards]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()

    def verify(self) -> None:
        """Reads every shard and compares its checksum.

        Raises:
          ValueError: names the shard that differs.
        """
        for shard in self.manifest.shards:
            found = _sha256(self.folder / shard.name)
            if found != shard.sha256:
                raise ValueError(
                    f"{self.folder / shard.name}: sha256 {found} is not the manifest's "
                    f"{shard.sha256}; prepare the folder anew"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return Sample.decode(self._source[int(index) % len(self)])

    def __repr__(self) -> str:
        return f"Shards({str(self.folder)!r})"


def _check_file(path: Path, shard: Shard) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: the manifest lists this shard, but it is missing")
    if path.stat().st_size != shard.bytes:
        raise ValueError(f"{path}: has {path.stat().st_size} bytes, the manifest {shard.bytes}")
    try:
        records = len(grain.sources.ArrayRecordDataSource(str(path)))
    except RuntimeError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if records != shard.records:
        raise ValueError(f"{path}: holds {records} records, the manifest says {shard.records}")
