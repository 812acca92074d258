"""What each verb of the command line takes: one frozen dataclass a verb, one comment a field."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from dspark_jax.config import Options
from dspark_jax.nn.selector import TopK
from dspark_jax.weights.formats import Format

Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Models:
    """Which models, in which precision, on which devices."""

    target: str = "smollm2"  # smollm2, a Hugging Face folder or a .gguf file
    drafter: str = "bundled"  # bundled, none, or a folder
    format: Format | None = None  # of the drafter's folder; by default its content decides
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters and caches
    mesh: str | None = None  # devices to split over, as in data=2,tensor=4
    candidates: int | None = None  # walk over this many best tokens a position; 0 = the vocabulary
    widen: int = 0  # candidates also hold each predecessor's best successors, this many
    search: TopK = "exact"  # how the best tokens are found
    walk: Literal["scan", "associative"] = "scan"  # how a table of candidates is walked
    block_size: int = 0  # drafted tokens a round, at most the drafter's; 0 = the drafter's


@dataclasses.dataclass(frozen=True)
class Generate:
    """Decode prompts losslessly with a target and a drafter."""

    prompt: str | None = None  # one prompt; without any, standard input is read, one a line
    prompts: Path | None = None  # JSON lines with `turns` or `messages`
    limit: int | None = None  # only the first prompts of the file
    batch_size: int = 1  # prompts decoded together
    compare: bool = False  # also decode without the drafter, and print both
    json: bool = False  # one JSON object a line
    models: Flat[Models] = Models()
    options: Flat[Options] = Options()


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure accepted length and acceptance by position over prompt files."""

    prompts: tyro.conf.Positional[tuple[str, ...]]  # FILE.jsonl or FILE.jsonl:N for the first N
    batch_size: int = 1  # prompts decoded together
    first_turn: bool = True  # answer the first turn of each prompt only
    json: bool = False  # one JSON object a file, then the pooled one
    models: Flat[Models] = Models()
    options: Flat[Options] = Options()


@dataclasses.dataclass(frozen=True)
class CheckEquivalence:
    """Check the equivalences between heads and walks on a drafter; exit 1 if one fails."""

    target: str = "smollm2"  # smollm2, a Hugging Face folder or a .gguf file
    drafter: str = "bundled"  # bundled, or a folder
    rows: int = 8  # blocks
    dtype: Literal["float32", "float64"] = "float32"  # fp64: is it the mathematics that agree?


@dataclasses.dataclass(frozen=True)
class CheckGoldens:
    """Compare folders of reference outputs with ours; exit 1 beyond the tolerance."""

    folders: tyro.conf.Positional[tuple[Path, ...]]  # checkpoints with expected.safetensors


@dataclasses.dataclass(frozen=True)
class BenchWalk:
    """Time the sequential full-vocabulary walk against candidate walks, in one run."""

    vocabularies: tuple[int, ...] = (49152, 151936)  # V
    block_sizes: tuple[int, ...] = (7, 15)  # K
    batch_sizes: tuple[int, ...] = (1, 8, 64)  # B
    candidates: tuple[int, ...] = (16, 64)  # k
    rank: int = 256  # of the Markov tables
    repeats: int = 7  # timed calls of each, interleaved
    json: bool = False  # one JSON object a row


@dataclasses.dataclass(frozen=True)
class BenchLoss:
    """Time a loss in chunks against all logits at once, and against chunks formed again."""

    vocab_size: int = 49152  # V
    width: int = 576  # D
    rank: int = 64  # of the Markov tables
    blocks: int = 128  # conversations times anchors
    block_size: int = 7  # K
    chunk: int = 32  # blocks whose logits exist at once
    repeats: int = 7  # timed calls of each, interleaved
    json: bool = False  # one JSON object


@dataclasses.dataclass(frozen=True)
class BenchCandidates:
    """Accepted length of greedy decoding at several numbers of candidates, paired by answer."""

    prompts: tyro.conf.Positional[tuple[str, ...]]  # FILE.jsonl or FILE.jsonl:N for the first N
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 0)  # candidates; 0 = the vocabulary
    widen: tuple[int, ...] = (1, 4)  # with 16 candidates, each predecessor's best successors too
    target: str = "smollm2"  # smollm2, a Hugging Face folder or a .gguf file
    drafter: str = "bundled"  # bundled, or a folder
    batch_size: int = 8  # prompts answered together
    max_new_tokens: int = 128  # new tokens an answer, at most
    json: bool = False  # one JSON object a row


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a drafter in another format."""

    source: tyro.conf.Positional[str]  # a drafter's folder, or bundled
    folder: tyro.conf.Positional[Path]  # where to; must not hold a checkpoint
    to: Format  # the format to write
    format: Format | None = None  # of the source; by default its content decides
    target: str = "smollm2"  # what the drafter was made for
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the tensors


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Say what a drafter's folder holds."""

    folder: tyro.conf.Positional[str]  # a drafter's folder, or bundled
    format: Format | None = None  # of the folder; by default its content decides
