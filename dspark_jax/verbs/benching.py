"""Verbs that measure: `dspark bench walk`, `loss`, `heads`, `candidates`."""

import dataclasses

from dspark_jax import (
    bench,
    bench_heads,
    bench_loss,
    recipes,
    replay,
    report,
)
from dspark_jax.arguments import (
    BenchCandidates,
    BenchHeads,
    BenchLoss,
    BenchWalk,
)
from dspark_jax.config import Markov, Options
from dspark_jax.decode import answer
from dspark_jax.decode.engine import engine
from dspark_jax.decode.propose import Candidates
from dspark_jax.verbs.decoding import first_turns
from dspark_jax.weights.load import (
    load_drafter,
    load_target,
)


def run_bench_walk(args: BenchWalk) -> None:
    """`dspark bench walk`."""
    for field in ("vocabularies", "block_sizes", "batch_sizes", "candidates"):
        values = getattr(args, field)
        if not values or min(values) < 1:
            raise ValueError(f"{field} = {values}: give whole numbers of at least 1")
    if args.rank < 1 or args.repeats < 1:
        raise ValueError(f"rank = {args.rank}, repeats = {args.repeats}: must be at least 1")
    shapes = (args.vocabularies, args.block_sizes, args.batch_sizes, args.candidates)
    with report.err.status("timing walks ..."):
        rows = list(bench.walk_costs(*shapes, args.rank, args.repeats))
    report.print_walks(rows, args.json)


def run_bench_loss(args: BenchLoss) -> None:
    """`dspark bench loss`."""
    shape = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name != "json"}
    if min(shape.values()) < 1:
        raise ValueError(f"{shape}: every number must be at least 1")
    with report.err.status("timing losses ..."):
        seconds = bench_loss.loss_costs(**shape)
    report.print_losses(seconds, args.json)


def run_bench_heads(args: BenchHeads) -> None:
    """`dspark bench heads`."""
    runs = recipes.read_all(args.config)
    unknown = sorted(set(args.runs) - set(runs))
    if unknown:
        raise ValueError(f"runs = {unknown}: {args.config} has {', '.join(runs)}")
    if not args.prompts or args.batch_size < 1:
        raise ValueError(
            f"prompts = {args.prompts}, batch_size = {args.batch_size}: give at least one of each"
        )
    prompts = first_turns(args.prompts)
    chosen = {name: runs[name] for name in args.runs or runs}
    workdir = None if args.workdir is None else str(args.workdir)
    chosen = bench_heads.adjusted(chosen, args.data, workdir, args.steps)
    options = Options(max_new_tokens=args.max_new_tokens)
    found = []
    for result in bench_heads.results(chosen, prompts, options, args.batch_size):
        found.append(result)
        report.err.print(f"{result.name}: accepted length {result.summary.accepted_length}")
    report.print_heads(found, args.json)


def run_bench_candidates(args: BenchCandidates) -> None:
    """`dspark bench candidates`."""
    prompts = first_turns(args.prompts)
    if args.drafter == "none":
        raise ValueError("drafter = 'none' drafts nothing: name a drafter")
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target.model, format=args.format)
    one = engine(target.model, drafter, target.tokenizer.stop_tokens)
    options = Options(max_new_tokens=args.max_new_tokens)
    cuts = [Candidates(count=count) for count in args.counts]
    if isinstance(drafter.config.head, Markov):
        cuts += [Candidates(count=16, widen=count) for count in args.widen]
    asked = answer.first_requests(target.tokenizer, prompts, options)
    total = None
    for item in answer.answers(one, target.tokenizer, prompts, options, args.batch_size):
        if not item.generation.rounds:
            continue
        prompt = asked[item.index].tokens
        tokens = (*prompt, *item.generation.tokens)
        found = replay.replay(target.model, drafter, tokens, len(prompt), cuts)
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    if total is None:
        raise ValueError("no answer took a round: nothing to compare")
    report.print_candidates(list(zip(cuts, total, strict=True)), args.json)
