"""The commands `aiote bench write|pages|latency|rate|read|send`, `aiote bench raw` and `aiote bench compare`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

import aiote
from aiote.bench import plot, table
from aiote.bench.congestion import NamespaceError, congestion_control, enter_namespace
from aiote.bench.contestants import Contestant, Setting, perftest, start, worker_command
from aiote.bench.devices import ports_of
from aiote.bench.measure import Entry, Plan, arena_for, measure
from aiote.bench.records import Record, write_json
from aiote.bench.remote import Listener, WorkerConnection, parse_place
from aiote.bench.sides import BenchError
from aiote.bench.work import OPS, Work
from aiote.rails.library import find

__all__ = ["app"]

app = typer.Typer(help="Measure: aiote, the same loops in plain C, and both in one run.", no_args_is_help=True)

AIOTE = Contestant("aiote", "aiote")
RAW = Contestant("raw", "raw")
SIZES = {
    "write": "64K,256K,1M,16M",
    "pages": "4K,32K",
    "latency": "8",
    "rate": "8",
    "read": "64K,1M",
    "send": "8,16K",
}
WINDOWS = {"write": 16, "pages": 4, "latency": 1, "rate": 64, "read": 16, "send": 16}
LARGE, LARGE_WINDOW = 16 << 20, 4
PAGES = 2048
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_ARENA = 1 << 34
WIDTH = 170

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help=f"Which of {', '.join(OPS)}. Default: all.")]
Op = Annotated[str, typer.Argument(metavar="OP", help=f"One of {', '.join(OPS)}.")]
Provider = Annotated[str, typer.Option(help="verbs, or tcp, shm or another of libfabric's; several with commas.")]
Library = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="A libfabric.so.1; given several times, all are measured.",
        show_default="the one that engines take",
    ),
]
Rails = Annotated[str, typer.Option(metavar="NAMES", help="NICs, with commas.", show_default="all that fit")]
Sizes = Annotated[
    str, typer.Option(metavar="SIZES", help="Bytes of a request or page: 64K,1M.", show_default="by work")
]
Window = Annotated[int, typer.Option(min=0, max=4096, help="Requests outstanding; 0: as the table of the project has.")]
PagesOption = Annotated[int, typer.Option("--pages", min=1, max=1 << 20, help="Pages of a request.")]
Mode = Annotated[
    Literal["spin", "event", "default"], typer.Option(help="Waiting that spins, sleeps, or as engines do.")
]
Loop = Annotated[Literal["asyncio", "uvloop", "trio"], typer.Option(help="The event loop of aiote's processes.")]
Progress = Annotated[Literal["adaptive", "thread"], typer.Option(help="Who moves the bytes in aiote's processes.")]
Runs = Annotated[int, typer.Option(min=1, max=1000, help="Runs that count.")]
Seconds = Annotated[float, typer.Option(min=0.01, max=60, help="About how long each is.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the records.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them; needs matplotlib.")]
Reno = Annotated[bool, typer.Option("--reno", help="Run in a network namespace of its own, with reno instead of BBR.")]
Listen = Annotated[
    bool, typer.Option("--listen", help="Be the target for another machine: all else is said there. Ctrl-C ends it.")
]
Host = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where to listen; one of them may do.", show_default="127.0.0.1:18515")
]
Connect = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="The machine that listens; its port may be left out.", show_default="this one"
    ),
]
Others = Annotated[
    Path | None,
    typer.Option("--with", metavar="FILE", help="Workers of other libraries, as bench_peers.py lists them."),
]


@dataclass(frozen=True, slots=True)
class Options:
    """What the options of every command come to."""

    settings: tuple[Setting, ...]
    works: tuple[Work, ...]
    plan: Plan
    json: Path | None
    plot: Path | None
    reno: bool
    connect: str


def _fail(text: str, code: int = 1) -> NoReturn:
    typer.echo(f"aiote: {text}", err=True)
    raise typer.Exit(code)


def _sizes(text: str) -> list[int]:
    """Read sizes like 8,64K,16M."""
    found = []
    for word in text.split(","):
        digits = word.strip().upper().rstrip("BI")
        number, unit = (digits[:-1], digits[-1]) if digits[-1:] in UNITS else (digits, "")
        if not number.isdecimal() or not 0 < int(number) * UNITS[unit] <= LARGEST_ARENA:
            _fail(f"--sizes: {word!r} is no size; write for example 8,64K,16M", 2)
        size = int(number) * UNITS[unit]
        if size % 8:
            _fail(f"--sizes: {size} bytes are not whole 8-byte words, which the data are checked in", 2)
        found.append(size)
    return found


def _works(ops: Sequence[str], sizes: str, window: int, pages: int) -> tuple[Work, ...]:
    works = []
    for op in ops:
        if op not in OPS:
            _fail(f"{op!r} is nothing to measure; one of {', '.join(OPS)} is", 2)
        for size in _sizes(sizes or SIZES[op]):
            out = 1 if op == "latency" else window or (LARGE_WINDOW if size >= LARGE else WINDOWS[op])
            works.append(Work(op, size, out, out, pages if op == "pages" else 0))
    if (arena := arena_for(works)) > LARGEST_ARENA:
        _fail(f"that needs {arena} bytes of memory on each side; ask for smaller sizes or windows", 2)
    return tuple(works)


def _libraries(paths: Sequence[str] | None) -> list[str]:
    """Return the libraries to measure with. The one that engines take is named, so that the raw loops take the same."""
    try:
        return [find(path).path for path in paths or [aiote.EngineConfig().libfabric]]
    except aiote.AioteError as error:
        _fail(f"--library: {error}", 2)


def _settings(first: Setting, providers: Sequence[str], paths: Sequence[str] | None) -> tuple[Setting, ...]:
    """Return a setting for each provider and library; libibverbs is the only one of its kind."""
    libraries = _libraries(paths) if any(provider != "verbs" for provider in providers) else []
    if paths and not libraries:
        _fail("--library: that is a libfabric, and verbs needs none", 2)
    for provider in providers:
        try:
            if provider == "verbs":
                ports_of("initiator", first.rails)
            else:
                asyncio.run(_try(provider))
        except (BenchError, aiote.AioteError) as error:
            _fail(str(error), 2)
    return tuple(
        replace(first, provider=provider, library=library)
        for provider in providers
        for library in ([""] if provider == "verbs" else libraries)
    )


async def _try(provider: str) -> None:
    """Open and close an engine: where a provider is not there, it says why better than the raw loops can."""
    async with aiote.open_engine(provider):
        pass


def _options(ops: Sequence[str], values: dict[str, Any]) -> Options:
    """Check all that was given before anything is started."""
    works = _works(ops, values["sizes"], values["window"], values["pages"])
    first = Setting(
        provider="",
        mode=values["mode"],
        loop=values["loop"],
        progress=values["progress"],
        rails=values["rails"],
        arena=arena_for(works),
    )
    providers = [provider.strip() for provider in values["provider"].split(",")]
    settings = _settings(first, providers, values["library"])
    if values["reno"] and "verbs" in providers:
        _fail("--reno: the RDMA ports stay outside of that network namespace; measure verbs without", 2)
    if values["plot"] is not None:
        try:
            plot.require()
        except BenchError as error:
            _fail(str(error), 2)
    plan = Plan(values["runs"], values["seconds"])
    return Options(settings, works, plan, values["json"], values["plot"], values["reno"], values["connect"])


def _one_setting(
    contestants: Sequence[Contestant],
    options: Options,
    setting: Setting,
    connection: WorkerConnection | None,
    console: Console,
    records: list[Record],
) -> None:
    """Measure over one provider with one library, and add what was found."""
    with contextlib.ExitStack() as stack, console.status("starting") as status:
        entries = []
        for contestant in contestants:
            if contestant.providers and setting.provider not in contestant.providers:
                continue
            status.update(f"{setting.provider}: starting {contestant.name}")
            try:
                pair = stack.enter_context(start(contestant, setting, connection))
            except BenchError as error:
                if contestant.kind != "other":
                    raise
                # Another library's failure is told, and does not take the measurement away.
                console.print(f"left out: {error}")
                continue
            entries.append((pair, setting.loop if contestant.kind == "aiote" else "", contestant.kind == "other"))
        for work in options.works:
            taking_part = [Entry(pair, loop, optional) for pair, loop, optional in entries]
            records += measure(taking_part, work, setting, options.plan, status.update)


def _measure(contestants: Sequence[Contestant], options: Options) -> None:
    # What is not a terminal is a file, which has room for a line.
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    records: list[Record] = []
    try:
        if options.reno:
            enter_namespace("reno")
        connection = (
            WorkerConnection(*parse_place(options.connect, default_host="127.0.0.1")) if options.connect else None
        )
        for setting in options.settings:
            _one_setting(contestants, options, setting, connection, progress, records)
    except (BenchError, NamespaceError, ValueError) as error:
        _fail(str(error))
    finally:
        # What was measured before a failure or an interrupt is not lost.
        if records:
            table.show(records, console)
        if records and options.json is not None:
            write_json(options.json, records)
    if any(setting.over_tcp for setting in options.settings) and congestion_control() == "bbr":
        console.print("TCP was under BBR, which paces loopback to about half of what reno gives: see --reno")
    if options.plot is not None:
        plot.draw(options.plot, records)


def _listen(place: str) -> None:
    """Serve targets until interrupted."""

    def command(kind: str, fields: dict[str, Any], host: str) -> list[str]:
        processor = sorted(os.sched_getaffinity(0))[-1]
        setting = Setting(**fields, library="" if fields["provider"] == "verbs" else library())
        return worker_command(Contestant(kind, kind), "target", setting, processor, host)

    def library() -> str:
        try:
            return find(aiote.EngineConfig().libfabric).path
        except aiote.AioteError as error:
            raise BenchError(str(error)) from error

    try:
        host, port = parse_place(place, default_host="127.0.0.1")
        with Listener(host, port, command, typer.echo) as listener:
            typer.echo(f"listening at {host}:{listener.server_address[1]}; on the other machine: --connect")
            listener.serve_forever()
    except (OSError, ValueError) as error:
        _fail(f"cannot listen at {place or 'the default place'}: {error}")


def _add(op: str, text: str) -> None:
    """Add the command of one kind of work."""

    def command(
        provider: Provider = "tcp",
        library: Library = None,
        rails: Rails = "",
        sizes: Sizes = "",
        window: Window = 0,
        pages: PagesOption = PAGES,
        mode: Mode = "spin",
        loop: Loop = "asyncio",
        progress: Progress = "adaptive",
        runs: Runs = 5,
        seconds: Seconds = 0.3,
        as_json: Json = None,
        plot_file: Plot = None,
        reno: Reno = False,
        listen: Listen = False,
        host: Host = "",
        connect: Connect = "",
    ) -> None:
        values = {**locals(), "json": as_json, "plot": plot_file}
        if listen:
            _listen(host)
        else:
            _measure([AIOTE], _options([op], values))

    command.__doc__ = text
    app.command(op)(command)


_add("write", "Measure awaited writes, a coroutine for each that is outstanding.")
_add("pages", "Measure paged writes that the target counts, one await for all pages of a request.")
_add("latency", "Measure round trips: a write that the other side's counter awaits, and one back.")
_add("rate", "Measure small writes, each awaited by itself.")
_add("read", "Measure awaited reads.")
_add("send", "Measure messages.")


@app.command("raw")
def _raw(
    op: Op,
    provider: Provider = "tcp",
    library: Library = None,
    rails: Rails = "",
    sizes: Sizes = "",
    window: Window = 0,
    pages: PagesOption = PAGES,
    mode: Mode = "spin",
    runs: Runs = 5,
    seconds: Seconds = 0.3,
    as_json: Json = None,
    plot_file: Plot = None,
    reno: Reno = False,
    connect: Connect = "",
) -> None:
    """Measure the same loop in plain C over the same provider: what there is to reach."""
    values = {**locals(), "json": as_json, "plot": plot_file, "loop": "asyncio", "progress": "adaptive"}
    if mode == "default":
        _fail("--mode default is an engine's; the raw loops spin or sleep", 2)
    _measure([RAW], _options([op], values))


@app.command("compare")
def _compare(
    ops: Ops = None,
    provider: Provider = "tcp,shm",
    library: Library = None,
    rails: Rails = "",
    sizes: Sizes = "",
    window: Window = 0,
    pages: PagesOption = PAGES,
    mode: Mode = "spin",
    loop: Loop = "asyncio",
    progress: Progress = "adaptive",
    runs: Runs = 5,
    seconds: Seconds = 0.3,
    as_json: Json = None,
    plot_file: Plot = None,
    reno: Reno = False,
    connect: Connect = "",
    others: Others = None,
) -> None:
    """Measure aiote and the raw loops in turns, so that the ratio is of neighbours in time.

    Over verbs linux-rdma's perftest takes part where it is installed.
    """
    values = {**locals(), "json": as_json, "plot": plot_file}
    options = _options(ops or OPS, values)
    if mode == "default":
        _fail("--mode default is an engine's; compare spinning with spinning, sleeping with sleeping", 2)
    try:
        contestants = [RAW, AIOTE, *(Contestant.others(others) if others is not None else ())]
        contestants += [] if connect else perftest(rails)
    except (BenchError, OSError) as error:
        _fail(f"--with: {error}", 2)
    _measure(contestants, options)
