"""Command line: argv -> values -> one call -> print."""

import logging
import sys

import tyro

from dspark_jax import (
    report,
)
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
    Prepare,
)
from dspark_jax.verbs import benching, checking, decoding, drafters, training


def main(argv: list[str] | None = None) -> None:
    """Entry point of `dspark`."""
    # Libraries set up logging when they are imported: only force gets our lines through.
    logging.basicConfig(format="%(message)s", handlers=[report.Lines()], force=True)
    logging.getLogger("dspark_jax").setLevel(logging.INFO)
    argv = sys.argv[1:] if argv is None else argv
    try:
        match argv[:1]:
            case ["generate"]:
                decoding.run_generate(_parse(Generate, argv))
            case ["evaluate"]:
                decoding.run_evaluate(_parse(Evaluate, argv))
            case ["prepare"]:
                decoding.run_prepare(_parse(Prepare, argv))
            case ["train"]:
                training.run_train(argv[1:])
            case ["audit"]:
                training.run_audit(_parse(Audit, argv))
            case ["convert"]:
                drafters.run_convert(_parse(Convert, argv))
            case ["inspect"]:
                drafters.run_inspect(_parse(Inspect, argv))
            case ["check"] if argv[1:2] == ["equivalence"]:
                checking.run_check_equivalence(_parse(CheckEquivalence, argv, 2))
            case ["check"] if argv[1:2] == ["goldens"]:
                checking.run_check_goldens(_parse(CheckGoldens, argv, 2))
            case ["bench"] if argv[1:2] == ["candidates"]:
                benching.run_bench_candidates(_parse(BenchCandidates, argv, 2))
            case ["bench"] if argv[1:2] == ["heads"]:
                benching.run_bench_heads(_parse(BenchHeads, argv, 2))
            case ["bench"] if argv[1:2] == ["loss"]:
                benching.run_bench_loss(_parse(BenchLoss, argv, 2))
            case ["bench"] if argv[1:2] == ["walk"]:
                benching.run_bench_walk(_parse(BenchWalk, argv, 2))
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
