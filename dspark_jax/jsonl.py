"""JSON lines: one object a line, errors with file and line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")


def read(path: Path, field: str, parse: Callable[[dict], Row]) -> Iterator[Row]:
    """Parses each line that is not blank.

    Args:
      path: the file.
      field: what users call it, for errors.
      parse: a JSON object to what is wanted; raises ValueError, TypeError or KeyError.

    Raises:
      ValueError: no such file, or a line that is no JSON object or does not parse.
    """
    if not path.is_file():
        raise ValueError(f"{field} = {path}: no such file")
    # Not `splitlines`, which also cuts at separators that JSON allows inside texts.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"holds a {type(row).__name__}, expected an object")
            yield parse(row)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: has no {error}") from None
