"""Shared by the commands `aiote plan ...`: their tables, their JSON, and the number of NICs that pay off."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import rich.box
import typer
from rich.console import Console
from rich.table import Table

from aiote.errors import UsageError
from aiote.plan import PUBLISHED_NICS
from aiote.plan.nics import MAX_NICS

__all__ = [
    "NICS_HELP",
    "NIC_COUNTS",
    "console",
    "drawn",
    "facts",
    "pays_off",
    "print_json",
    "refusing",
    "size_of",
    "table",
]

WIDTH = 120
GAIN = 0.05
NIC_COUNTS = (1, 2, 4, MAX_NICS)
NICS_HELP = f"{', '.join(PUBLISHED_NICS)}, or files of `aiote bench --json` with commas."


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a UsageError into its message and exit status 2."""
    try:
        yield
    except UsageError as error:
        typer.echo(f"aiote: {error}", err=True)
        raise typer.Exit(2) from None


def console() -> Console:
    """Return the console for tables. An output that is not a terminal is a file, which has room for long lines."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their descriptions."""
    made = Table(box=rich.box.SIMPLE, show_header=False, title=title, title_justify="left")
    made.add_column(style="cyan", no_wrap=True)
    made.add_column()
    for row in rows:
        made.add_row(*row)
    return made


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    made = Table(box=rich.box.SIMPLE, title=title, title_justify="left")
    for number, head in enumerate(heads):
        made.add_column(head, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def print_json(found: Mapping[str, Any]) -> None:
    """Print a plan as JSON."""
    typer.echo(json.dumps(found, indent=2))


def pays_off(times: Mapping[int, float]) -> int:
    """Return how many NICs pay off: the smallest number whose successor saves less than 5 % of the time."""
    counts = sorted(times)
    for count, more in itertools.pairwise(counts):
        if times[more] > times[count] * (1 - GAIN):
            return count
    return counts[-1]


def drawn(path: Path | None, draw: Callable[[Path], None]) -> None:
    """Draw a picture if a path was given, and print the path."""
    if path is not None:
        draw(path)
        typer.echo(f"drawn: {path}", err=True)


def size_of(count: int) -> str:
    """Return a number of bytes as "11.476 GB", in powers of 1000."""
    unit: Literal["GB", "MB", "kB"]
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3f} {unit}"
    return f"{count} B"
