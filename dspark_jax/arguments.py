"""What each verb of the command line takes: one frozen dataclass a verb, one comment a field."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dspark_jax.config import Options
from dspark_jax.config_training import TrainConfig
from dspark_jax.nn.selector import TopK
from dspark_jax.prepare.endpoint import Server
from dspark_jax.prepare.session import Settings
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
class Train:
    """Train a drafter as CONFIG.py[:RUN] says; a run that was stopped continues."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]  # every field of the config file
    dry_run: bool = False  # print what the run needs; nothing is trained or written
    distributed: str | None = None  # one of several processes: auto, or HOST:PORT,COUNT,INDEX


@dataclasses.dataclass(frozen=True)
class Audit:
    """Replay training samples through the decoding path; exit 1 if accuracies differ.

    Of a run: its samples, and its last checkpoint against the drafter it exported. Of data: the
    same drafter on both paths.
    """

    run: Path | None = None  # work folder of a run that has ended
    data: Path | None = None  # conversations, as `dspark train` reads them; None = the run's
    drafter: str | None = None  # what decodes; None = the run's own, or bundled without a run
    format: Format | None = None  # of the drafter's folder; by default its content decides
    target: str | None = None  # None = the run's, or smollm2 without a run
    samples: int = 8  # conversations, drawn by a fixed seed
    max_length: int = 512  # tokens a conversation, cut on the right


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Have the target answer prompts, and write training shards; a stopped run goes on."""

    prompts: tyro.conf.Positional[Path]  # JSON lines: turns, messages, tokens, or any --template
    folder: tyro.conf.Positional[Path]  # of the shards
    settings: Flat[Settings] = Settings()
    server: Flat[Server] = Server()
    models: Flat[Models] = Models(drafter="none")
    options: Flat[Options] = Options(max_new_tokens=512)


@dataclasses.dataclass(frozen=True)
class CheckEquivalence:
    """Check the equivalences between heads and walks on a drafter; exit 1 if one fails."""

    target: str = "smollm2"  # smollm2, a Hugging Face folder or a .gguf file
    drafter: str = "bundled"  # bundled, or a folder
    format: Format | None = None  # of the drafter's folder; by default its content decides
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
class BenchHeads:
    """Train the runs of a config file, or go on, and compare their accepted lengths."""

    config: tyro.conf.Positional[str]  # a file that defines `configs`, runs by name
    prompts: tyro.conf.Positional[tuple[str, ...]]  # FILE.jsonl or FILE.jsonl:N; not trained on
    runs: tuple[str, ...] = ()  # only these, in this order
    data: str | None = None  # other training data than the config's
    workdir: Path | None = None  # other work folder than the config's; each run gets one below
    steps: int | None = None  # other number of optimizer steps than the config's
    batch_size: int = 8  # prompts answered together
    max_new_tokens: int = 128  # new tokens an answer, at most
    json: bool = False  # one JSON object a run


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
    format: Format | None = None  # of the drafter's folder; by default its content decides
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
    dtype: Literal["float32", "bfloat16"] | None = None  # of the tensors; None = the source's


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Say what a drafter's folder holds."""

    folder: tyro.conf.Positional[str]  # a drafter's folder, or bundled
    format: Format | None = None  # of the folder; by default its content decides
