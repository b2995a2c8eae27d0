"""The commands `aiote bench write|pages|latency|rate|read|send`, and `raw`, `compare` and `scatter`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console

import aiote
from aiote.bench import plot, record_table
from aiote.bench.congestion import NamespaceError, congestion_control, enter_namespace
from aiote.bench.contestants import OWN, Contestant, Setting, perftest, start, worker_command
from aiote.bench.devices import ports_of
from aiote.bench.measure import Measurement, RunPlan, arena_for, measure
from aiote.bench.records import BenchRecord, write_json
from aiote.bench.remote import Listener, TargetMachine, parse_place
from aiote.bench.sides import BenchError
from aiote.bench.work import OPS, Work
from aiote.cli import posting
from aiote.rails.library import find_libfabric

__all__ = ["app", "listener"]

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
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_ARENA = 1 << 34
WIDTH = 170

OPTIONS: dict[str, tuple[object, Any]] = {
    "op": (str, typer.Argument(metavar="OP", help=f"One of {', '.join(OPS)}.")),
    "ops": (
        list[str] | None,
        typer.Argument(None, metavar="[OP]...", help=f"Which of {', '.join(OPS)}. Default: all."),
    ),
    "provider": (
        str,
        typer.Option("tcp", help="local, socket, verbs, or a provider of libfabric; several with commas."),
    ),
    "library": (
        list[str] | None,
        typer.Option(
            None,
            metavar="FILE",
            help="A libfabric.so.1; repeat the option to measure several.",
            show_default="the one that engines take",
        ),
    ),
    "rails": (str, typer.Option("", metavar="NAMES", help="NICs, with commas.", show_default="all that fit")),
    "sizes": (
        str,
        # The option is named explicitly, because typer 0.27 takes a metavar that equals the name except for case as the
        # name.
        typer.Option(
            "", "--sizes", metavar="SIZES", help="Bytes of a request or page: 64K,1M.", show_default="by work"
        ),
    ),
    "window": (int, typer.Option(0, min=0, max=4096, help="Outstanding requests; 0: the default of each OP.")),
    "pages": (int, typer.Option(2048, min=1, max=1 << 20, help="Pages of a request.")),
    "mode": (
        Literal["spin", "event", "default"],
        typer.Option("spin", help="How to wait: spin, sleep (event), or sleep after 50 us, as engines do (default)."),
    ),
    "loop": (
        Literal["asyncio", "uvloop", "trio"],
        typer.Option("asyncio", help="The event loop of aiote's processes."),
    ),
    "progress": (
        Literal["adaptive", "loop", "thread"],
        typer.Option("adaptive", help="Where aiote makes progress: see the setting of that name."),
    ),
    "memory": (
        Literal["host", "cuda", "cuda-host", "host-cuda"],
        typer.Option("host", help="The memory of aiote's processes; cuda-host sends from a GPU to the host."),
    ),
    "gpu_sharing": (
        bool | None,
        typer.Option(
            None,
            "--gpu-sharing/--no-gpu-sharing",
            help="Whether aiote's processes copy between GPUs without the host.",
            show_default="the engines' setting",
        ),
    ),
    "runs": (int, typer.Option(5, min=1, max=1000, help="Number of measured runs, after a cold run.")),
    "seconds": (float, typer.Option(0.3, min=0.01, max=60, help="Approximate seconds of each run.")),
    "json": (Path | None, typer.Option(None, metavar="FILE", help="Write the records as JSON.")),
    "plot": (Path | None, typer.Option(None, metavar="FILE.png", help="Draw the records; needs matplotlib.")),
    "reno": (
        bool,
        typer.Option(False, "--reno", help="Run in a network namespace of its own, with reno instead of BBR."),
    ),
    "listen": (
        bool,
        typer.Option(
            False, "--listen", help="Run targets for another machine, which sets all other options. Ctrl-C ends it."
        ),
    ),
    "host": (
        str,
        typer.Option(
            "",
            metavar="HOST:PORT",
            help="Where to listen; host or port may be omitted.",
            show_default="127.0.0.1:18515",
        ),
    ),
    "connect": (
        str,
        typer.Option(
            "", metavar="HOST:PORT", help="The machine that listens; the port may be omitted.", show_default="this one"
        ),
    ),
    "others": (
        Path | None,
        typer.Option(
            None, "--with", metavar="FILE", help="Workers of other libraries, as bench/install_peers.py lists them."
        ),
    ),
}
"""Every option by its name in `values`: its type, and its Typer description."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a command after checking."""

    settings: tuple[Setting, ...]
    works: tuple[Work, ...]
    plan: RunPlan
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
            _fail(f"--sizes: {word!r} is not a size; write for example 8,64K,16M", 2)
        size = int(number) * UNITS[unit]
        if size % 8:
            _fail(f"--sizes: {size} bytes: expected a multiple of 8, because the data are checked in 8-byte words", 2)
        found.append(size)
    return found


def _works(ops: Sequence[str], sizes: str, window: int, pages: int) -> tuple[Work, ...]:
    works = []
    for op in ops:
        if op not in OPS:
            _fail(f"{op!r} cannot be measured; expected one of {', '.join(OPS)}", 2)
        for size in _sizes(sizes or SIZES[op]):
            out = 1 if op == "latency" else window or (LARGE_WINDOW if size >= LARGE else WINDOWS[op])
            works.append(Work(op, size, out, out, pages if op == "pages" else 0))
    if (arena := arena_for(works)) > LARGEST_ARENA:
        _fail(f"that needs {arena} bytes of memory on each side; ask for smaller sizes or windows", 2)
    return tuple(works)


def _libraries(paths: Sequence[str] | None) -> list[str]:
    """Return the paths of the libraries to measure with. The default is a path, too, so that the raw loops open it."""
    try:
        return [find_libfabric(path).path for path in paths or [aiote.EngineConfig().libfabric]]
    except aiote.AioteError as error:
        _fail(f"--library: {error}", 2)


def _settings(first: Setting, providers: Sequence[str], paths: Sequence[str] | None) -> tuple[Setting, ...]:
    """Return a setting for each provider and library. A provider that needs no libfabric has one setting."""
    libraries = _libraries(paths) if any(provider not in OWN for provider in providers) else []
    if paths and not libraries:
        _fail(f"--library: that is a libfabric, and {', '.join(providers)} needs none", 2)
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
        for library in ([""] if provider in OWN else libraries)
    )


async def _try(provider: str) -> None:
    """Open and close an engine, because its error about a missing provider says more than the raw loops' error."""
    async with aiote.open_engine(provider):
        pass


def _sharing(values: dict[str, Any]) -> bool | None:
    """Return the engines' `gpu_sharing` for the record: the option, else the default; with host memory, else None."""
    given: bool | None = values["gpu_sharing"]
    if given is not None or values["memory"] == "host":
        return given
    try:
        return aiote.EngineConfig().gpu_sharing
    except aiote.AioteError as error:
        _fail(str(error), 2)


def _options(ops: Sequence[str], values: dict[str, Any]) -> Options:
    """Check all arguments before anything is started."""
    works = _works(ops, values["sizes"], values["window"], values["pages"])
    if "send" in ops and values["memory"] != "host":
        _fail(f"--memory {values['memory']}: messages are of host memory; measure send with --memory host", 2)
    first = Setting(
        provider="",
        mode=values["mode"],
        loop=values["loop"],
        progress=values["progress"],
        rails=values["rails"],
        arena=arena_for(works),
        memory=values["memory"],
        gpu_sharing=_sharing(values),
    )
    providers = [provider.strip() for provider in values["provider"].split(",")]
    settings = _settings(first, providers, values["library"])
    if values["reno"] and "verbs" in providers:
        _fail("--reno: RDMA ports stay outside of the network namespace; measure verbs without --reno", 2)
    if values["plot"] is not None:
        try:
            plot.require()
        except BenchError as error:
            _fail(str(error), 2)
    plan = RunPlan(values["runs"], values["seconds"])
    return Options(settings, works, plan, values["json"], values["plot"], values["reno"], values["connect"])


def _one_setting(
    contestants: Sequence[Contestant],
    options: Options,
    setting: Setting,
    machine: TargetMachine | None,
    console: Console,
    records: list[BenchRecord],
) -> None:
    """Measure over one provider with one library, and append the records."""
    with contextlib.ExitStack() as stack, console.status("starting") as status:
        entries = []
        for contestant in contestants:
            if not contestant.takes_part(setting):
                continue
            status.update(f"{setting.provider}: starting {contestant.name}")
            try:
                pair = stack.enter_context(start(contestant, setting, machine))
            except BenchError as error:
                if contestant.kind != "other":
                    raise
                # Another library's failure is reported and does not end the measurement.
                console.print(f"left out: {error}")
                continue
            entries.append((pair, setting.loop if contestant.kind == "aiote" else "", contestant.kind == "other"))
        for work in options.works:
            taking_part = [Measurement(pair, loop, optional) for pair, loop, optional in entries]
            records += measure(taking_part, work, setting, options.plan, status.update)


def _measure(contestants: Sequence[Contestant], options: Options) -> None:
    # An output that is not a terminal is a file, which has room for long lines.
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    records: list[BenchRecord] = []
    try:
        if options.reno:
            enter_namespace("reno")
        machine = TargetMachine(*parse_place(options.connect, default_host="127.0.0.1")) if options.connect else None
        for setting in options.settings:
            _one_setting(contestants, options, setting, machine, progress, records)
    except (BenchError, NamespaceError, ValueError) as error:
        _fail(str(error))
    finally:
        # The records that were taken before a failure or an interrupt are kept.
        if records:
            record_table.show(records, console)
        if records and options.json is not None:
            write_json(options.json, records)
    if any(setting.over_tcp for setting in options.settings) and congestion_control() == "bbr":
        console.print("TCP used BBR, which halves the rate over loopback compared with reno; use --reno")
    if options.plot is not None:
        plot.draw(options.plot, records)


def listener(host: str, port: int, report: Callable[[str], object]) -> Listener:
    """Return a server that runs targets and calls `report` with a line for each. Raises OSError if it cannot listen."""

    def command(kind: str, fields: dict[str, Any], host: str) -> list[str]:
        processor = -1 if fields["mode"] == "default" else sorted(os.sched_getaffinity(0))[-1]
        setting = Setting(**fields, library="" if fields["provider"] in OWN else library())
        return worker_command(Contestant(kind, kind), "target", setting, processor, host)

    def library() -> str:
        try:
            return find_libfabric(aiote.EngineConfig().libfabric).path
        except aiote.AioteError as error:
            raise BenchError(str(error)) from error

    return Listener(host, port, command, report)


def _listen(place: str) -> None:
    """Serve targets until interrupted."""
    try:
        host, port = parse_place(place, default_host="127.0.0.1")
        with listener(host, port, typer.echo) as serving:
            shown = f"[{host}]" if ":" in host else host
            typer.echo(
                f"listening at {shown}:{serving.server_address[1]}; run aiote bench with --connect "
                "HOST:PORT on the other machine"
            )
            serving.serve_forever()
    except (OSError, ValueError) as error:
        _fail(f"cannot listen at {place or 'the default place'}: {error}")


def _one(op: str, values: dict[str, Any]) -> None:
    if values["listen"]:
        _listen(values["host"])
    else:
        _measure([AIOTE], _options([op], values))


def _require_host_memory(values: dict[str, Any]) -> None:
    """End the command unless the memory is the host's: the loops in plain C move no other memory."""
    if values["memory"] != "host":
        _fail(f"--memory {values['memory']}: the raw loops move only host memory; measure aiote without them", 2)


def _raw(values: dict[str, Any]) -> None:
    _require_host_memory(values)
    _measure([RAW], _options([values["op"]], values))


def _compare(values: dict[str, Any]) -> None:
    _require_host_memory(values)
    options = _options(values["ops"] or OPS, values)
    try:
        others = values["others"]
        contestants = [RAW, AIOTE, *(Contestant.others(others) if others is not None else ())]
        contestants += [] if options.connect else perftest(values["rails"])
    except (BenchError, OSError) as error:
        _fail(f"--with: {error}", 2)
    _measure(contestants, options)


def _add(
    name: str, text: str, act: Callable[[dict[str, Any]], None], without: Sequence[str], **defaults: object
) -> None:
    """Add a command that calls `act` with a value for each of OPTIONS.

    The command does not offer the options in `without`; they have their usual defaults.
    """

    def command(**given: Any) -> None:
        act({option: info.default for option, (_, info) in OPTIONS.items()} | given)

    command.__doc__ = text
    parameters = []
    for option, (kind, usual) in OPTIONS.items():
        if option not in without:
            info = copy(usual)
            info.default = defaults.get(option, usual.default)
            parameters.append(Parameter(option, Parameter.KEYWORD_ONLY, default=info, annotation=kind))
    # Typer reads a command's options from its signature.
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name)(command)


for _op, _text in {
    "write": "Measure writes; each outstanding write is awaited by a coroutine of its own.",
    "pages": "Measure paged writes that the target counts, one await for all pages of a request.",
    "latency": "Measure round trips: a write that the target awaits on a counter, and a write back.",
    "rate": "Measure small writes, each awaited by itself.",
    "read": "Measure awaited reads.",
    "send": "Measure messages.",
}.items():
    _add(_op, _text, partial(_one, _op), ("op", "ops", "others"))
_add(
    "raw",
    "Measure the same loop in plain C over the same provider, as the limit for aiote.",
    _raw,
    ("ops", "loop", "progress", "gpu_sharing", "listen", "host", "others"),
)
_add(
    "compare",
    """Measure aiote and the raw loops in turns, so that each ratio compares runs that are next to each other in time.

    Over verbs, linux-rdma's perftest is measured, too, if it is installed.
    """,
    _compare,
    ("op", "gpu_sharing", "listen", "host"),
    provider="tcp,shm",
)
app.command("scatter")(posting.command)
