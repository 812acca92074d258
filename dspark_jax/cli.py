"""Command line: argv -> values -> one call -> print."""

import dataclasses
import importlib.util
import json
import logging
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax import bench
from dspark_jax.config import TrainConfig
from dspark_jax.decode import answer
from dspark_jax.decode.engine import Engine, engine
from dspark_jax.evaluate import summarise
from dspark_jax.sharding import make_mesh
from dspark_jax.train import session
from dspark_jax.weights.load import LoadedTarget, load_drafter, load_target

out, err = Console(soft_wrap=True), Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Models:
    """Which models, in which precision, on which devices."""

    target: str = "smollm2"  # smollm2, a Hugging Face folder or a .gguf file
    drafter: str = "bundled"  # bundled, none, or a folder
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters and caches
    mesh: str | None = None  # devices to split over, as in data=2,tensor=4


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    max_new_tokens: int = 128  # new tokens an answer, at most
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # keep the k most likely tokens, 0 = all
    top_p: float = 1.0  # then keep the smallest most-likely set of this mass
    seed: int = 0  # prompt i uses seed + i
    system: str | None = None  # system message, the template's own by default


Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Generate:
    """Decode prompts losslessly with a target and a drafter."""

    prompt: str | None = None  # one prompt; without any, standard input is read, one a line
    prompts: Path | None = None  # JSON lines with `turns` or `messages`
    limit: int | None = None  # only the first prompts of the file
    batch_size: int = 1  # prompts decoded together
    raw: bool = False  # continue the text itself, without the chat template
    compare: bool = False  # also decode without the drafter, and print both
    json: bool = False  # one JSON object a line
    models: Flat[Models] = Models()
    sampling: Flat[Sampling] = Sampling()


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure accepted length and acceptance by position over prompt files."""

    prompts: tyro.conf.Positional[tuple[str, ...]]  # FILE.jsonl or FILE.jsonl:N for the first N
    batch_size: int = 1  # prompts decoded together
    first_turn: bool = True  # answer the first turn of each prompt only
    json: bool = False  # one JSON object a file, then the pooled one
    models: Flat[Models] = Models()
    sampling: Flat[Sampling] = Sampling()


def main(argv: list[str] | None = None) -> None:
    """Entry point of `dspark`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("jax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    argv = sys.argv[1:] if argv is None else argv
    try:
        match argv[:1]:
            case ["generate"]:
                run_generate(_parse(Generate, argv))
            case ["evaluate"]:
                run_evaluate(_parse(Evaluate, argv))
            case ["train"]:
                run_train(argv[1:])
            case _:
                _usage(argv)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        err.print(f"[bold red]error:[/] {_escape(str(error))}")
        raise SystemExit(2) from None
    except (KeyboardInterrupt, BrokenPipeError):
        raise SystemExit(130) from None


def _usage(argv: list[str]) -> None:
    out.print(
        "usage: dspark {generate,evaluate,train} ...\n\n"
        "  generate   decode prompts losslessly with a target and a drafter\n"
        "  evaluate   accepted length and acceptance by position over prompt files\n"
        "  train      train a drafter: dspark train CONFIG.py [--overrides]\n\n"
        "dspark VERB --help lists the options of a verb.",
        markup=False,
    )
    raise SystemExit(0 if argv and argv[0] in ("-h", "--help") else 2)


def _parse(kind: type, argv: list[str]):
    return tyro.cli(kind, args=argv[1:], prog=f"dspark {argv[0]}")


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _engines(models: Models, with_plain: bool) -> tuple[LoadedTarget, Engine, Engine | None]:
    dtype = jnp.dtype(models.dtype)
    mesh = None if models.mesh is None else make_mesh(models.mesh)
    target = load_target(models.target, dtype)
    drafter = load_drafter(models.drafter, target.model, dtype)
    if with_plain and drafter is None:
        raise ValueError("--compare with --drafter none: there is nothing to compare; name one")
    stops = target.tokenizer.stop_tokens
    speculative = engine(target.model, drafter, stops, mesh=mesh)
    plain = engine(target.model, None, stops, mesh=mesh) if with_plain else None
    return target, speculative, plain


def _options(sampling: Sampling, raw: bool = False) -> answer.Options:
    return answer.Options(**dataclasses.asdict(sampling), raw=raw)


def run_generate(args: Generate) -> None:
    """`dspark generate`."""
    prompts = _prompts(args)
    if args.batch_size < 1:
        raise ValueError(f"batch_size = {args.batch_size}: must be at least 1")
    target, speculative, plain = _engines(args.models, args.compare)
    options = _options(args.sampling, args.raw)
    is_streamed = not args.json and not args.compare and args.batch_size == 1
    for one in (speculative, plain):
        if one is not None:
            _warm_up(one, target, prompts, options, args.batch_size, is_streamed)
    if is_streamed:
        return _print_streams(speculative, target, prompts, options)
    runs = {"speculative": speculative} | ({"plain": plain} if plain else {})
    summaries = {}
    for name, one in runs.items():
        collected = []
        for item in answer.answers(one, target.tokenizer, prompts, options, args.batch_size):
            collected.append(item)
            label = {"decoding": name} if args.compare else {}
            _print_answer(item, label, args.json, len(prompts))
        summaries[name] = summarise(collected)
    if args.compare:
        _print_comparison(args, speculative, target, prompts, options, summaries)


def _prompts(args: Generate) -> list[answer.Prompt]:
    if args.prompt is not None and args.prompts is not None:
        raise ValueError("--prompt and --prompts are both given; give one")
    if args.prompt is not None:
        return [answer.Prompt(turns=(args.prompt,))]
    if args.prompts is not None:
        return answer.read_prompts(args.prompts, args.limit)
    lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not lines:
        raise ValueError("no prompt: give --prompt, --prompts, or lines on standard input")
    return [answer.Prompt(turns=(line,)) for line in lines]


def _warm_up(one: Engine, target, prompts, options, batch_size: int, is_streamed: bool) -> None:
    """Compiles the buckets of the first turns before any clock runs."""
    said = [[*p.messages, {"role": "user", "content": p.turns[0]}] for p in prompts]
    if options.system is not None:
        said = [[{"role": "system", "content": options.system}, *messages] for messages in said]
    requests = [answer.request(target.tokenizer, m, options, i) for i, m in enumerate(said)]
    buckets = set()
    for first in range(0, len(requests), batch_size):
        buckets.add(one.bucket(one.longest(requests[first : first + batch_size])))
    with err.status("compiling ..."):
        for slots in sorted(buckets):
            one.warm_up(slots, batch_size, options.temperature > 0, is_streamed)


def _print_streams(one: Engine, target: LoadedTarget, prompts, options: answer.Options) -> None:
    for i, prompt in enumerate(prompts):
        seeded = dataclasses.replace(options, seed=options.seed + i)
        pieces = answer.stream(one, target.tokenizer, prompt, seeded)
        while True:
            try:
                print(next(pieces), end="", flush=True)
            except StopIteration as end:
                print()
                for generation in end.value:
                    err.print(_status(generation), style="dim")
                break


def _status(generation) -> str:
    length = generation.accepted_length
    return (
        f"({len(generation.tokens)} tokens, {generation.rounds} rounds, accepted length "
        f"{'-' if length is None else f'{length:.2f}'}, finish: {generation.finish_reason})"
    )


def _print_answer(item: answer.Answer, label: dict, as_json: bool, total: int) -> None:
    if as_json:
        print(json.dumps({**item.record(), **label}, ensure_ascii=False), flush=True)
        return
    if total > 1 or label:
        out.rule(" ".join([f"prompt {item.index}, turn {item.turn}", *label.values()]))
    out.print(item.text, markup=False, highlight=False)
    err.print(_status(item.generation), style="dim")


def _print_comparison(args: Generate, one: Engine, target, prompts, options, summaries) -> None:
    fast, slow = summaries["speculative"], summaries["plain"]
    said = [{"role": "user", "content": prompts[0].turns[0]}]
    length = one.longest([answer.request(target.tokenizer, said, options, 0)])
    costs = bench.round_costs(one, args.batch_size, one.bucket(length))
    table = Table(title=f"batch {args.batch_size}, wall time with prefill, without compilation")
    for column in ("decoding", "tokens", "tokens/s", "accepted length", "target calls/token"):
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary.tokens),
            f"{summary.tokens_per_second:.1f}",
            f"{summary.accepted_length:.3f}" if summary.rounds else "-",
            f"{summary.calls_per_token:.3f}" if summary.rounds else "-",
        )
    console = err if args.json else out
    console.print(table)
    ratio = fast.tokens_per_second / slow.tokens_per_second if slow.tokens_per_second else 0.0
    console.print(
        f"speed-up {ratio:.2f}x; a round costs draft {1e3 * costs.draft:.0f} ms + verify "
        f"{1e3 * costs.verify:.0f} ms, a single step {1e3 * costs.single:.0f} ms: break-even at "
        f"accepted length {costs.break_even:.2f}",
        highlight=False,
    )


def run_evaluate(args: Evaluate) -> None:
    """`dspark evaluate`."""
    sets = {}
    for spec in args.prompts:
        name, _, count = re.fullmatch(r"(.*?)(:(\d+))?", spec).groups()
        sets[spec] = answer.read_prompts(Path(name), int(count) if count else None)
    target, one, _ = _engines(args.models, with_plain=False)
    options, everything, rows = _options(args.sampling), [], {}
    for spec, prompts in sets.items():
        if args.first_turn:
            prompts = [dataclasses.replace(p, turns=p.turns[:1]) for p in prompts]
        _warm_up(one, target, prompts, options, args.batch_size, False)
        found = list(answer.answers(one, target.tokenizer, prompts, options, args.batch_size))
        rows[Path(spec).name] = summarise(found)
        everything += found
    rows["all"] = summarise(everything)
    if args.json:
        for name, summary in rows.items():
            print(json.dumps({"prompts": name, **summary.record()}), flush=True)
        return
    table = Table(title="accepted length = committed tokens / rounds, the bonus counted")
    for column in ("prompts", "answers", "tokens", "rounds", "accepted length", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("accepted at position k, of rounds that reached it")
    for name, s in rows.items():
        length = "-" if s.accepted_length is None else f"{s.accepted_length:.3f}"
        by_position = " ".join(f"{x:.2f}" for x in s.acceptance)
        counts = (str(s.answers), str(s.tokens), str(s.rounds))
        table.add_row(name, *counts, length, f"{s.tokens_per_second:.1f}", by_position)
    out.print(table)


def run_train(argv: list[str]) -> None:
    """`dspark train CONFIG.py [--overrides]`."""
    if not argv or argv[0].startswith("-"):
        raise ValueError("dspark train needs a config file first: dspark train configs/tiny.py")
    config = tyro.cli(
        Annotated[TrainConfig, tyro.conf.arg(name="")],
        args=argv[1:],
        default=read_config(Path(argv[0])),
        prog=f"dspark train {argv[0]}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    session.train(config)


def read_config(path: Path) -> TrainConfig:
    """The `config` a Python file defines."""
    if not path.is_file():
        raise ValueError(f"config = {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path} must define `config`, a dspark_jax.config.TrainConfig")
    return config
