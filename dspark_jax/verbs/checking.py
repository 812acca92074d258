"""Verbs that check: `dspark check equivalence`, `dspark check goldens`."""

import jax

from dspark_jax import (
    check,
    goldens,
    report,
)
from dspark_jax.arguments import (
    CheckEquivalence,
    CheckGoldens,
)
from dspark_jax.weights.load import (
    load_drafter,
    load_target,
)


def run_check_equivalence(args: CheckEquivalence) -> None:
    """`dspark check equivalence`."""
    if args.drafter == "none" or args.rows < 1:
        raise ValueError(
            f"drafter = {args.drafter!r}, rows = {args.rows}: name a drafter, at least one row"
        )
    target = load_target(args.target).model
    drafter = load_drafter(args.drafter, target, format=args.format)
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
