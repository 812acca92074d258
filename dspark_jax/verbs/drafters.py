"""Verbs for the files of drafters: `dspark convert`, `dspark inspect`."""

from dspark_jax import (
    report,
)
from dspark_jax.arguments import (
    Convert,
    Inspect,
)
from dspark_jax.weights import card
from dspark_jax.weights.formats import format_of
from dspark_jax.weights.load import (
    convert,
    drafter_folder,
    load_drafter,
)
from dspark_jax.weights.tensors import read_folder


def run_convert(args: Convert) -> None:
    """`dspark convert`."""
    dtype = convert(args.source, args.folder, args.to, args.target, args.dtype, args.format)
    report.out.print(f"{args.folder}: {args.to}, {dtype}", highlight=False)


def run_inspect(args: Inspect) -> None:
    """`dspark inspect`."""
    folder = drafter_folder(args.folder)
    kind = args.format or format_of(folder)
    drafter = load_drafter(args.folder, format=kind)
    report.print_drafter(kind, drafter, card.read(folder))
    report.print_tensors(read_folder(folder))
