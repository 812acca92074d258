"""Command line: argv -> values -> one call -> print."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from dspark_jax import bench, benches, check, goldens, report, training
from dspark_jax.arguments import (
    Audit,
    BenchCandidates,
    BenchHeads,
    BenchLoss,
    BenchWalk,
    CheckEquivalence,
    CheckGoldens,
    Convert,
    Evaluate,
    Generate,
    Inspect,
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
from dspark_jax.weights.formats import format_of
from dspark_jax.weights.load import (
    LoadedTarget,
    convert,
    drafter_folder,
    load_drafter,
    load_target,
    load_text,
)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `dspark`."""
    # Libraries set up logging when they are imported: only force gets our lines through.
    logging.basicConfig(format="%(message)s", handlers=[report.Lines()], force=True)
    logging.getLogger("dspark_jax").setLevel(logging.INFO)
    argv = sys.argv[1:] if argv is None else argv
    try:
        match argv[:1]:
            case ["generate"]:
                run_generate(_parse(Generate, argv))
            case ["evaluate"]:
                run_evaluate(_parse(Evaluate, argv))
            case ["prepare"]:
                run_prepare(_parse(Prepare, argv))
            case ["train"]:
                training.run_train(argv[1:])
            case ["audit"]:
                training.run_audit(_parse(Audit, argv))
            case ["convert"]:
                run_convert(_parse(Convert, argv))
            case ["inspect"]:
                run_inspect(_parse(Inspect, argv))
            case ["check"] if argv[1:2] == ["equivalence"]:
                run_check_equivalence(_parse(CheckEquivalence, argv, 2))
            case ["check"] if argv[1:2] == ["goldens"]:
                run_check_goldens(_parse(CheckGoldens, argv, 2))
            case ["bench"] if argv[1:2] == ["candidates"]:
                benches.run_candidates(_parse(BenchCandidates, argv, 2))
            case ["bench"] if argv[1:2] == ["heads"]:
                benches.run_heads(_parse(BenchHeads, argv, 2))
            case ["bench"] if argv[1:2] == ["loss"]:
                benches.run_loss(_parse(BenchLoss, argv, 2))
            case ["bench"] if argv[1:2] == ["walk"]:
                benches.run_walk(_parse(BenchWalk, argv, 2))
            case _:
                _usage(argv)
    except BrokenPipeError:
        raise SystemExit(130) from None
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        report.print_error(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _usage(argv: list[str]) -> None:
    is_asked = bool(argv) and argv[0] in ("-h", "--help")
    if argv and not is_asked:
        report.err.print(f"error: unknown verb {' '.join(argv[:2])!r}", markup=False)
    report.out.print(
        "usage: dspark {generate,evaluate,prepare,train,audit,convert,inspect,check,bench} ...\n\n"
        "  generate           decode prompts losslessly with a target and a drafter\n"
        "  evaluate           accepted length and acceptance by position over prompt files\n"
        "  prepare            prompts -> the target's own answers -> training shards\n"
        "  train              train a drafter: dspark train CONFIG.py [--overrides]\n"
        "  audit              training samples through the decoding path: both paths must agree\n"
        "  convert            write a drafter in another format\n"
        "  inspect            say what a drafter's folder holds\n"
        "  check equivalence  the equivalences between heads and walks, on a drafter\n"
        "  check goldens      reference outputs against ours: dspark check goldens DIR...\n"
        "  bench walk         candidate walks against the full-vocabulary walk\n"
        "  bench candidates   accepted length at several numbers of candidates\n"
        "  bench heads        drafters trained alike, compared by accepted length\n"
        "  bench loss         the loss in chunks against all logits at once\n\n"
        "dspark VERB --help lists the options of a verb.",
        markup=False,
    )
    raise SystemExit(0 if is_asked else 2)


def _parse(kind: type, argv: list[str], words: int = 1):
    """Options behind the words of a verb."""
    return tyro.cli(kind, args=argv[words:], prog=" ".join(["dspark", *argv[:words]]))


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


def run_check_equivalence(args: CheckEquivalence) -> None:
    """`dspark check equivalence`."""
    if args.drafter == "none" or args.rows < 1:
        raise ValueError(
            f"drafter = {args.drafter!r}, rows = {args.rows}: name a drafter, at least one row"
        )
    target = load_target(args.target).model
    drafter = load_drafter(args.drafter, target)
    with jax.enable_x64(args.dtype == "float64"):
        target, drafter = (check.cast(module, args.dtype) for module in (target, drafter))
        findings = list(check.check(check.make_case(target, drafter, args.rows)))
    report.print_findings(findings)
    if not all(f.passed for f in findings):
        raise SystemExit(1)


def run_check_goldens(args: CheckGoldens) -> None:
    """`dspark check goldens`."""
    if not args.folders:
        raise ValueError("folders: give at least one")
    everything = []
    for folder in args.folders:
        differences = goldens.compare(folder)
        report.print_differences(str(folder), differences)
        everything += differences
    if not all(d.passed for d in everything):
        raise SystemExit(1)


def run_convert(args: Convert) -> None:
    """`dspark convert`."""
    target, dtype = load_target(args.target), jnp.dtype(args.dtype)
    convert(args.source, args.folder, args.to, target, dtype, args.format)
    report.out.print(f"{args.folder}: {args.to}, {args.dtype}", highlight=False)


def run_inspect(args: Inspect) -> None:
    """`dspark inspect`."""
    folder = drafter_folder(args.folder)
    kind = args.format or format_of(folder)
    drafter = load_drafter(args.folder, format=kind)
    report.print_drafter(kind, drafter, card.read(folder))
