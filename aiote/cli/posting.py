"""The command `aiote bench scatter`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, NoReturn

import anyio
import typer
from rich.console import Console
from rich.table import Table

from aiote.bench.posting import PostingRecord, measure_posting
from aiote.bench.records import machine
from aiote.errors import AioteError

__all__ = ["command"]

MOST_PEERS = 256
PAGE_PEERS = 1

Rails = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Providers, with commas: null completes all work at once; or local, socket, tcp, shm."
    ),
]
Peers = Annotated[str, typer.Option(metavar="NUMBERS", help="How many peers, with commas.")]
Pages = Annotated[int, typer.Option(min=0, max=1 << 20, help="Pages of a request to one peer; 0: no pages.")]
Size = Annotated[int, typer.Option(min=8, max=1 << 20, help="Bytes to each peer, and of a page.")]
Runs = Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests that count.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the records.")]


def command(
    rails: Rails = "null,local",
    peers: Peers = "8,16,32,64",
    pages: Pages = 1024,
    size: Size = 512,
    runs: Runs = 1000,
    json_file: Json = None,
) -> None:
    """Measure the time to post a scatter to many peers and pages to one peer: as a new request, and as a prepared one.

    All engines are in this process. Over null no bytes move, so that only aiote's own time remains.
    """
    records: list[PostingRecord] = []
    try:
        for rail in rails.split(","):
            for count in _numbers(peers):
                records += anyio.run(measure_posting, rail.strip(), count, 0, size, runs)
            if pages:
                records += anyio.run(measure_posting, rail.strip(), PAGE_PEERS, pages, size, runs)
    except AioteError as error:
        _fail(str(error), 1)
    Console().print(_table(records))
    if json_file is not None:
        document = {"machine": machine(), "records": [dataclasses.asdict(record) for record in records]}
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if any(record.verified is False for record in records):
        _fail("bytes are missing at a peer", 1)


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= MOST_PEERS for word in words):
        _fail(f"--peers: {text!r}: numbers from 1 to {MOST_PEERS} are expected, with commas", 2)
    return [int(word) for word in words]


def _table(records: list[PostingRecord]) -> Table:
    table = Table("rail", "work", "peers", "unit", "anew, median", "least", "prepared, median", "least")
    for anew, prepared in zip(records[::2], records[1::2], strict=True):
        figures = (anew.median, anew.least, prepared.median, prepared.least)
        table.add_row(anew.rail, anew.op, str(anew.peers), anew.unit, *(f"{figure:.1f}" for figure in figures))
    return table


def _fail(text: str, code: int) -> NoReturn:
    typer.echo(f"aiote: {text}", err=True)
    raise typer.Exit(code)
