"""Verbs that decode: `dspark generate`, `dspark evaluate`, `dspark prepare`."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from dspark_jax import (
    bench,
    report,
)
from dspark_jax.arguments import (
    Evaluate,
    Generate,
    Models,
    Prepare,
)
from dspark_jax.config import Options
from dspark_jax.decode import answer
from dspark_jax.decode.engine import Engine, engine
from dspark_jax.decode.propose import Candidates
from dspark_jax.evaluate import summarise
from dspark_jax.prepare.session import Subject, prepare
from dspark_jax.sampling import GREEDY_BELOW
from dspark_jax.sharding import make_mesh
from dspark_jax.weights import card
from dspark_jax.weights.load import (
    LoadedTarget,
    drafter_folder,
    load_drafter,
    load_target,
    load_text,
)

log = logging.getLogger(__name__)


def _engines(models: Models, with_plain: bool) -> tuple[LoadedTarget, Engine, Engine | None]:
    dtype = jnp.dtype(models.dtype)
    mesh = None if models.mesh is None else make_mesh(models.mesh)
    if with_plain and models.drafter == "none":
        raise ValueError("--compare with --drafter none: there is nothing to compare; name one")
    target = load_target(models.target, dtype)
    drafter = load_drafter(models.drafter, target.model, dtype, models.format)
    stops = target.tokenizer.stop_tokens
    count = models.candidates
    if count is None:
        count = drafter.config.candidates if drafter is not None else 0
    cut = Candidates(count=count, widen=models.widen, method=models.search, walk=models.walk)
    speculative = engine(
        target.model, drafter, stops, mesh=mesh, candidates=cut, block_size=models.block_size
    )
    plain = engine(target.model, None, stops, mesh=mesh) if with_plain else None
    return target, speculative, plain


def check_mode(models: Models, options: Options) -> None:
    """Warns when prompts are rendered otherwise than the drafter's training data."""
    if models.drafter == "none":
        return
    said = card.warning(card.read(drafter_folder(models.drafter)), options)
    if said is not None:
        log.warning("%s", said)


def run_generate(args: Generate) -> None:
    """`dspark generate`."""
    prompts, options = _prompts(args), args.options
    if args.batch_size < 1:
        raise ValueError(f"batch_size = {args.batch_size}: must be at least 1")
    target, speculative, plain = _engines(args.models, args.compare)
    check_mode(args.models, options)
    has_heading = len(prompts) > 1 or len(prompts[0].turns) > 1
    is_streamed = not args.json and not args.compare and args.batch_size == 1
    if is_streamed:
        _warm_up(speculative, target, prompts, options, 1, is_streamed=True)
        return _stream(speculative, target, prompts, options, has_heading)
    runs = {"speculative": speculative} | ({"plain": plain} if plain else {})
    for one in runs.values():
        _warm_up(one, target, prompts, options, args.batch_size)
    summaries = {}
    for name, one in runs.items():
        found = []
        for item in answer.answers(one, target.tokenizer, prompts, options, args.batch_size):
            found.append(item)
            report.print_answer(item, args.json, has_heading, name if plain else None)
        summaries[name] = summarise(found)
    if plain:
        requests = answer.first_requests(target.tokenizer, prompts, options)
        slots = speculative.bucket(speculative.longest(requests))
        costs = bench.round_costs(speculative, plain, args.batch_size, slots)
        report.print_comparison(summaries, costs, args.batch_size, args.json)


def _prompts(args: Generate) -> list[answer.Prompt]:
    if args.prompt is not None and args.prompts is not None:
        raise ValueError("--prompt and --prompts are both given; give one")
    if args.limit is not None and (args.prompts is None or args.limit < 1):
        raise ValueError(f"--limit {args.limit} needs --prompts and at least 1")
    if args.prompt is not None:
        return [answer.Prompt(turns=(args.prompt,))]
    if args.prompts is not None:
        return answer.read_prompts(args.prompts, args.limit)
    lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not lines:
        raise ValueError("no prompt: give --prompt, --prompts, or lines on standard input")
    return [answer.Prompt(turns=(line,)) for line in lines]


def _warm_up(
    one: Engine,
    target: LoadedTarget,
    prompts: Sequence[answer.Prompt],
    options: Options,
    batch_size: int,
    is_streamed: bool = False,
) -> None:
    """Compiles the buckets of the first turns before any clock runs."""
    requests = answer.first_requests(target.tokenizer, prompts, options)
    groups = (requests[i : i + batch_size] for i in range(0, len(requests), batch_size))
    buckets = {one.bucket(one.longest(group)) for group in groups}
    with report.err.status("compiling ..."):
        for slots in sorted(buckets):
            one.warm_up(slots, batch_size, options.temperature >= GREEDY_BELOW, is_streamed)


def _stream(
    one: Engine,
    target: LoadedTarget,
    prompts: Sequence[answer.Prompt],
    options: Options,
    has_heading: bool,
) -> None:
    for i, prompt in enumerate(prompts):
        seeded = dataclasses.replace(options, seed=options.seed + i)
        seen = None
        for turn, piece in answer.stream(one, target.tokenizer, prompt, seeded):
            if has_heading and turn != seen:
                report.print_heading(i, turn)
            seen = turn
            if isinstance(piece, str):
                print(piece, end="", flush=True)
            else:
                print()
                report.print_status(piece)


def run_evaluate(args: Evaluate) -> None:
    """`dspark evaluate`."""
    sets = [(spec, answer.read_some(spec)) for spec in args.prompts]
    if args.batch_size < 1:
        raise ValueError(f"batch_size = {args.batch_size}: must be at least 1")
    target, one, _ = _engines(args.models, with_plain=False)
    check_mode(args.models, args.options)
    log.info("prompts are rendered with %s", card.mode_of(args.options))
    everything, rows = [], []
    for spec, prompts in sets:
        if args.first_turn:
            prompts = [dataclasses.replace(p, turns=p.turns[:1]) for p in prompts]
        _warm_up(one, target, prompts, args.options, args.batch_size)
        batches = answer.answers(one, target.tokenizer, prompts, args.options, args.batch_size)
        found = list(batches)
        rows.append((Path(spec).name, summarise(found)))
        everything += found
    report.print_summaries([*rows, ("all", summarise(everything))], args.json)


def first_turns(specs: Sequence[str]) -> list[answer.Prompt]:
    """First turns of the prompts of files."""
    prompts = [prompt for spec in specs for prompt in answer.read_some(spec)]
    return [dataclasses.replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]


def run_prepare(args: Prepare) -> None:
    """`dspark prepare`."""
    config, tokenizer = load_text(args.models.target)
    decoding = dataclasses.asdict(args.models)
    subject = Subject(
        name=decoding.pop("target"),
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        decoding={name: value for name, value in decoding.items() if name != "mesh"},
        engine=lambda: _engines(args.models, with_plain=False)[1],
    )
    prepare(args.prompts, args.folder, subject, args.settings, args.options, args.server)
