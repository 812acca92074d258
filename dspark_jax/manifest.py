"""The manifest of a folder of training samples: how they were made, and which shards hold them.

It lists every shard with its checksum and the length of each sample, so that a reader can plan
without opening one. It is replaced at once or not at all, and a shard counts once it is listed.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.folders import replace

VERSION = 1  # of the format
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of samples, as the manifest lists it."""

    name: str  # of the file
    records: int  # samples in it
    bytes: int  # size of the file
    sha256: str  # of the file
    supervised: int  # tokens that count, over its samples
    lengths: tuple[int, ...]  # tokens of each sample, in order


@dataclasses.dataclass(frozen=True)
class Manifest:
    """How a folder's samples were made, and which shards hold them."""

    target: str  # name or path of the target
    template: str  # fingerprint of its chat template and tokenizer
    vocab_size: int  # of the target: every id is below it
    mode: dict[str, Any]  # how conversations are rendered: system message, template variables
    sampling: dict[str, Any]  # how answers are drawn
    seed: int  # of the first prompt
    source: dict[str, Any]  # where prompts and answers come from
    consumed: int = 0  # prompts accounted for: those before it are in a shard, or dropped
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)  # prompts without a sample
    complete: bool = False  # every prompt is accounted for
    shards: tuple[Shard, ...] = ()  # in order
    version: int = VERSION  # of the format

    @property
    def samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.records for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(sum(shard.lengths) for shard in self.shards)

    @property
    def supervised(self) -> int:
        """Tokens on which the loss counts, in all shards."""
        return sum(shard.supervised for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Replaces the folder's manifest, at once or not at all."""
        row = dataclasses.asdict(self)
        counts = {
            "samples": self.samples,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "dropped": row.pop("dropped"),
        }
        shards = row.pop("shards")
        head = json.dumps({**row, "counts": counts}, indent=1, ensure_ascii=False)
        lines = ",\n  ".join(json.dumps(shard) for shard in shards)  # one a line: lengths are many
        text = f'{head[:-2]},\n "shards": [\n  {lines}\n ]\n}}\n'
        replace(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest.

        Raises:
          ValueError: there is none, or it is not one of this format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{folder}: has no {MANIFEST}; it is no folder of training shards")
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if row.get("version") != VERSION:
                raise ValueError(f"version = {row.get('version')!r}, this program reads {VERSION}")
            counts = row.pop("counts")
            shards = tuple(
                Shard(**{**shard, "lengths": tuple(shard["lengths"])}) for shard in row["shards"]
            )
            manifest = cls(**{**row, "shards": shards, "dropped": counts["dropped"]})
            _check_counts(manifest, counts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: is not a manifest of training shards: {error}") from None
        return manifest


def _check_counts(manifest: Manifest, counts: dict[str, Any]) -> None:
    for shard in manifest.shards:
        if len(shard.lengths) != shard.records:
            raise ValueError(
                f"shard {shard.name} lists {len(shard.lengths)} lengths of {shard.records} records"
            )
    for field in ("samples", "tokens", "supervised"):
        if counts[field] != getattr(manifest, field):
            raise ValueError(
                f"counts.{field} = {counts[field]}, its shards hold {getattr(manifest, field)}"
            )
