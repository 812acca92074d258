"""The bar of a long run, on standard error: what, how far, how long still, and a note."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_jax.processes import is_first


def bar() -> Progress:
    """A bar whose tasks carry a `note`; of several processes the first shows it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not is_first(),
    )
