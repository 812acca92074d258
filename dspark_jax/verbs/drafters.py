"""Verbs for the files of drafters: `dspark convert`, `dspark inspect`."""

import jax.numpy as jnp

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
    load_target,
)


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
