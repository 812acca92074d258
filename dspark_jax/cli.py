"""Command line: argv -> values -> one call -> print."""

import logging
import sys

import tyro

from dspark_jax import report
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
    Train,
)
from dspark_jax.verbs import benching, checking, decoding, drafters, training

_VERBS = {
    "generate": (Generate, decoding.run_generate),
    "evaluate": (Evaluate, decoding.run_evaluate),
    "prepare": (Prepare, decoding.run_prepare),
    "train": (Train, training.run_train),
    "audit": (Audit, training.run_audit),
    "convert": (Convert, drafters.run_convert),
    "inspect": (Inspect, drafters.run_inspect),
    "check equivalence": (CheckEquivalence, checking.run_check_equivalence),
    "check goldens": (CheckGoldens, checking.run_check_goldens),
    "bench walk": (BenchWalk, benching.run_bench_walk),
    "bench candidates": (BenchCandidates, benching.run_bench_candidates),
    "bench heads": (BenchHeads, benching.run_bench_heads),
    "bench loss": (BenchLoss, benching.run_bench_loss),
}


def main(argv: list[str] | None = None) -> None:
    """Entry point of `dspark`."""
    # Libraries set up logging when they are imported: only force gets our lines through.
    logging.basicConfig(format="%(message)s", handlers=[report.Lines()], force=True)
    logging.getLogger("dspark_jax").setLevel(logging.INFO)
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run(argv)
    except BrokenPipeError:
        raise SystemExit(130) from None
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        report.print_error(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run(argv: list[str]) -> None:
    """The verb of one or two words that a command line begins with."""
    for words in (2, 1):
        if verb := _VERBS.get(" ".join(argv[:words])):
            kind, run = verb
            if kind is Train:  # its options are those of the file that it names first
                return run(argv[words:])
            prog = " ".join(["dspark", *argv[:words]])
            return run(tyro.cli(kind, args=argv[words:], prog=prog))
    is_asked = bool(argv) and argv[0] in ("-h", "--help")
    if argv and not is_asked:
        report.err.print(f"error: unknown verb {' '.join(argv[:2])!r}", markup=False)
    says = {name: kind.__doc__.partition("\n")[0] for name, (kind, _) in _VERBS.items()}
    lines = [f"  {name:<18} {what}" for name, what in says.items()]
    usage = ["usage: dspark VERB ...", "", *lines, "", "dspark VERB --help lists its options."]
    report.out.print("\n".join(usage), markup=False, highlight=False)
    raise SystemExit(0 if is_asked else 2)
