"""Keep measurements as records, and put tables and a picture of them into the docs.

usage: measured.py add torch|ray|idle|sizes FILE.json --command TEXT [--library NAME=VERSION ...]
       measured.py write | check

A record lies in docs/measured and says what was measured, when, on what machine and by what command. Later ones replace
earlier ones of their kind. `write` remakes what is made from them: between `<!-- measured: KIND -->` and
`<!-- end of measured -->`, tables in docs/connectors.md; and the picture of sizes in docs/comparison.md. Without a
record there is nothing between the two. `check` fails if a page or the picture is not as the records say.

A file for `add` is what `run.py torch-transports`, `ray-transports` or `idle-transports` has written, or, for
sizes, `lone --peers`: its rows with `bytes`, `provider` and `alone_us`, the microseconds of a write of each library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from draw_sizes import picture
from page_parts import put_between

from aiote.bench import records

ROOT = Path(__file__).parents[1]
FORMAT = 1
END = "<!-- end of measured -->\n"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NAMES = {"aiote": "aiote", "nixl": "NIXL", "store": "object store"}

Record = dict[str, Any]


class RecordError(Exception):
    """A file is no record, or a page has no place for it; the text says why."""


def size(nbytes: int) -> str:
    """Return a size as the pages say it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    heads = list(heads)
    lines = [f"| {' | '.join(cells)} |\n" for cells in (heads, *rows)]
    return "".join((lines[0], "|---" * len(heads), "|\n", *lines[1:]))


def rate(cell: dict[str, float]) -> str:
    return f"{cell['rate']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"


def torch_table(record: Record) -> str:
    """Return the rates of torch's transports, a line for each size."""
    cells = {(row["verb"], row["bytes"]): row for row in record["rows"]}
    sizes = sorted({nbytes for _, nbytes in cells})
    heads = ("Size", "write: aiote", "NIXL", "read: aiote", "NIXL")
    columns = [(verb, name) for verb in ("write", "read") for name in ("aiote", "nixl")]
    rows = ([size(n), *(rate(cells[verb, n][name]) for verb, name in columns)] for n in sizes)
    said = "GB/s: the median of all rounds, and the lowest and highest median of a turn."
    return table(heads, rows) + f"\n{said}\n"


def ray_table(record: Record) -> str:
    """Return the rates of Ray's transports and the CPU time of both actors, a line for each size."""
    ways = [way for way in record["rows"][0] if way != "bytes"]
    rows = (
        [size(row["bytes"]), *(f"{rate(row[way])}; {row[way]['cpu']:.2f}" for way in ways)] for row in record["rows"]
    )
    said = (
        "GB/s: the median of all rounds, and the lowest and highest median of a turn. After the semicolon: CPU seconds "
        "of both actors for a GB."
    )
    return table(["Size", *(NAMES[way] for way in ways)], rows) + f"\n{said}\n"


def idle_table(record: Record) -> str:
    """Return what idle transports cost, a line for each run."""
    rows = (
        [NAMES[row["backend"]], *(f"{row[side][0]:.2f} %, {row[side][1]:.1f}" for side in ("initiator", "target"))]
        for row in record["rows"]
    )
    said = "Per cent of a core, and sleeps a second."
    return table(("Transport", "initiator", "target"), rows) + f"\n{said}\n"


def sizes_text(record: Record) -> str:
    """Return the link to the picture of sizes."""
    return "![Rate of single writes by size, each library alone](_static/sizes.svg)\n"


PARTS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "torch": ("docs/connectors.md", torch_table),
    "ray": ("docs/connectors.md", ray_table),
    "idle": ("docs/connectors.md", idle_table),
    "sizes": ("docs/comparison.md", sizes_text),
}
"""The page of each kind of record, and the function that makes its text."""


def caption(record: Record) -> str:
    """Say when, where and how a record was measured."""
    load = f", load {record['load'][0]} before and {record['load'][1]} after" if record.get("load") else ""
    libraries = ", ".join(f"{name} {version}" for name, version in record["libraries"].items())
    return f"\nMeasured {record['date']} on {record['machine']}{load}; {libraries}: `{record['command']}`.\n"


def read(path: Path) -> Record:
    """Read a record. Raises RecordError."""
    try:
        record: Record = json.loads(path.read_text())
        if record["format"] != FORMAT or not record["rows"]:
            raise RecordError(f"{path}: format {record['format']} with {len(record['rows'])} rows, expected {FORMAT}")
        if not all(isinstance(record[name], str) for name in ("date", "machine", "command")):
            raise RecordError(f"{path}: date, machine and command are expected to be texts")
        record["libraries"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: no record of a measurement: {error!r}") from error
    return record


def machine() -> str:
    """Return the processor and how many this process may use; no names or addresses."""
    known = records.machine()
    kernel = known["kernel"].partition("-")[0]
    return f"{len(os.sched_getaffinity(0))} processors of {known['processor']}, Linux {kernel}"


def add(kind: str, path: Path, command: str, libraries: dict[str, str]) -> Path:
    """Make a record of what a benchmark has written. Raises RecordError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from error
    if kind == "sizes":
        found = {"rows": [row for row in found if "alone_us" in row]}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"format": FORMAT, "kind": kind, "date": date, "machine": machine(), "command": command}
    record |= {"libraries": libraries, **found}
    kept = ROOT / "docs" / "measured" / f"{kind}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(record, indent=1) + "\n")
    read(kept)
    return kept


def made() -> dict[Path, str]:
    """Return the pages and the picture as the records have them. Raises RecordError."""
    texts: dict[Path, str] = {}
    for kind, (name, render) in PARTS.items():
        page, kept = ROOT / name, ROOT / "docs" / "measured" / f"{kind}.json"
        record = read(kept) if kept.exists() else None
        text = texts.get(page) or page.read_text()
        try:
            said = render(record) + caption(record) if record else ""
            if kind == "sizes" and record:
                texts[ROOT / "docs" / "_static" / "sizes.svg"] = picture(record["rows"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordError(f"{kept}: its rows are not those of {kind}: {error!r}") from error
        try:
            texts[page] = put_between(text, f"<!-- measured: {kind} -->\n", END, said)
        except ValueError as error:
            raise RecordError(f"{page}: {error}") from error
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 and say on standard error which file does not fit."""
    parser = argparse.ArgumentParser(description="Keep measurements as records, and put them into the docs.")
    commands = parser.add_subparsers(dest="action", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("kind", choices=PARTS)
    adding.add_argument("file", type=Path, metavar="FILE.json")
    adding.add_argument("--command", required=True, dest="text", help="what a reader runs to measure it again")
    adding.add_argument("--library", action="append", default=[], metavar="NAME=VERSION")
    for name in ("write", "check"):
        commands.add_parser(name)
    options = parser.parse_args(arguments)
    try:
        if options.action == "add":
            libraries = dict(one.split("=", 1) for one in options.library)
            print(f"added: {add(options.kind, options.file, options.text, libraries).relative_to(ROOT)}")
        texts = made()
        stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
        if stale and options.action == "check":
            raise RecordError(f"not as the records say: {', '.join(map(str, stale))}; run bench/measured.py write")
        for path in stale:
            path.write_text(texts[path])
    except RecordError as error:
        print(f"measured: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
