"""The command `aiote top`: the engines of this user on this host, live.

It reads the pages that engines write once a second (aiote/observe/status_page.py), and computes rates from two of them.
It does not contact the engines. So it shows a busy or stopped engine by its last page, with the page's age.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiote.observe.status_page import VERSION, EngineStatus, OtherVersion, other_versions, pages

__all__ = ["Rates", "command", "picture"]

STALE_S = 5.0
SHOWN_PEERS = 5
GIB = 1 << 30
Look: TypeAlias = tuple[list[dict[str, Any]], list[OtherVersion]]
TROUBLES = ("peer.lost", "rail.failed", "rail.down", "connection.refused", "memory.staged")

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line for each look, instead of the screen.")
]
Once = Annotated[bool, typer.Option("--once", help="Look twice, print once, and exit.")]
Interval = Annotated[float, typer.Option("--interval", min=0.1, max=60, help="Seconds between two looks.")]
Count = Annotated[int, typer.Option("--count", min=0, help="Exit after this many looks; 0: never.")]


class Rates:
    """The last two pages of each engine, and the rates between them."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, str], list[EngineStatus]] = {}

    def look(self, seen: Iterable[EngineStatus]) -> list[dict[str, Any]]:
        """Record the current pages, and return what to show of each engine."""
        found = {(status.pid, status.address): status for status in seen}
        # An engine writes a page each second. If there is no new one between two looks, the last rate stays.
        self._pages = {key: _latest(self._pages.get(key, []), status) for key, status in found.items()}
        return [_shown(known) for _, known in sorted(self._pages.items())]


def _latest(known: list[EngineStatus], status: EngineStatus) -> list[EngineStatus]:
    if known and known[-1].written_ns == status.written_ns:
        return known
    return [*known[-1:], status]


def _rate(known: list[EngineStatus], before: int | None, now: int | None) -> float:
    seconds = (known[-1].written_ns - known[0].written_ns) * 1e-9
    if len(known) < 2 or seconds <= 0 or before is None or now is None:
        return 0.0
    return max(0.0, (now - before) / seconds)


def _shown(known: list[EngineStatus]) -> dict[str, Any]:
    first, last = known[0], known[-1]
    rails = []
    for before, now in zip(first.rails, last.rails, strict=False):
        rails.append(
            {
                **msgspec.structs.asdict(now),
                "out_gib_s": _rate(known, before.carried, now.carried) / GIB,
                "in_gib_s": _rate(known, before.served, now.served) / GIB,
                "operations_s": _rate(known, before.operations, now.operations),
            }
        )
    counts = last.counts
    moving = any(rail["operations_s"] for rail in rails)
    return {
        "pid": last.pid,
        "program": last.program,
        "address": last.address,
        "age_s": max(0.0, time.time() - last.written_ns * 1e-9),
        "up_s": max(0.0, (last.written_ns - last.opened_ns) * 1e-9),
        "rails": rails,
        "peers": [msgspec.structs.asdict(peer) for peer in last.peers],
        "counts": counts,
        "refused_s": _rate(known, first.counts.get("refused"), counts.get("refused")),
        "stalled": bool(counts.get("outstanding", 0) or counts.get("queued", 0)) and len(known) > 1 and not moving,
        "events": last.events,
        "services": [msgspec.structs.asdict(service) for service in last.services],
    }


def picture(engines: list[dict[str, Any]], others: Sequence[OtherVersion] = ()) -> RenderableType:
    """Draw the engines, and name the pages of other versions."""
    if not engines and not others:
        return Text("this user runs no engine on this host, or the engines have status_page off", style="dim")
    parts = [part for engine in engines for part in _parts(engine)]
    return Group(*parts, *map(_unread, others))


def _parts(engine: dict[str, Any]) -> list[RenderableType]:
    return [_heading(engine), _rails(engine), *map(_service, engine["services"]), _below(engine)]


def _service(service: dict[str, Any]) -> Text:
    text = Text(f"  serves {_printable(service['names'])}: ", no_wrap=True, overflow="ellipsis")
    text.append(f"{service['running']} running")
    text.append(f", {service['queued']} waiting" if service["queued"] else "", style="yellow")
    return text.append("" if service["serving"] else ", draining", style="yellow")


def _unread(other: OtherVersion) -> Text:
    text = Text.assemble((f"{other.pid} ", "bold"), no_wrap=True, overflow="ellipsis")
    reason = f"page of version {other.version}, and this aiote reads version {VERSION}: use that process's own aiote"
    return text.append(reason, style="yellow")


def _heading(engine: dict[str, Any]) -> Text:
    program = _brief(_printable(engine["program"]))
    text = Text.assemble((f"{engine['pid']} ", "bold"), (program, "bold cyan"), no_wrap=True)
    text.append(f"  {_place(engine['address'])}  up {_span(engine['up_s'])}")
    if engine["age_s"] > STALE_S and engine["counts"].get("peers", 0):
        text.append(f"  silent for {_span(engine['age_s'])}", style="yellow")
    if engine["stalled"]:
        text.append("  STALLED", style="bold red")
    text.overflow = "ellipsis"
    return text


def _rails(engine: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  rail", no_wrap=True, overflow="ellipsis", min_width=8)
    for name in ("out", "in", "ops/s", "depth", "carried"):
        table.add_column(name, justify="right", no_wrap=True)
    for rail in engine["rails"]:
        name = rail["name"] if rail["name"] == rail["provider"] else f"{rail['provider']} {rail['name']}"
        style = "" if rail["state"] == "up" else "red"
        taken = "-" if rail["served"] is None else _speed(rail["in_gib_s"])
        numbers = (_speed(rail["out_gib_s"]), taken, f"{rail['operations_s']:.0f}", str(rail["depth"]))
        table.add_row(Text(f"  {_printable(name)}"), *numbers, _bytes(rail["carried"]), style=style)
    return table


def _below(engine: dict[str, Any]) -> Text:
    counts = engine["counts"]
    parts = [f"{counts.get('peers', 0)} peers", f"{counts.get('outstanding', 0)} under way"]
    parts += [
        f"{counts[name]} {text}" for name, text in (("queued", "queued"), ("waits", "awaits")) if counts.get(name)
    ]
    parts.append(f"{_bytes(counts.get('registered_bytes', 0))} registered")
    if engine["refused_s"]:
        parts.append(f"{engine['refused_s']:.0f} retries/s")
    text = Text("  " + ", ".join(parts), no_wrap=True, overflow="ellipsis")
    troubles = [f"{engine['events'][name]} {name}" for name in TROUBLES if engine["events"].get(name)]
    if troubles:
        text.append("; " + ", ".join(troubles), style="yellow")
    busy = [f"{_place(peer['address'])} {peer['unfinished']}" for peer in engine["peers"] if peer["unfinished"]]
    if busy:
        text.append("; transfers to " + ", ".join(busy[:SHOWN_PEERS]) + (", ..." if len(busy) > SHOWN_PEERS else ""))
    return text


def _brief(program: str) -> str:
    """Return a program's short name: its script, without the interpreter."""
    words = program.split()
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[1:]
    if words and words[0] in ("-m", "-c"):
        words = words[1:]
    return " ".join([Path(words[0]).name, *words[1:]])[:60] if words else program[:60]


def _place(address: str) -> str:
    """Return host and port of an address, without the identity."""
    return _printable(address.removeprefix("aiote://").partition("/")[0])


def _printable(text: str) -> str:
    """Replace the characters that a terminal would obey in a text from a page."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _span(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _speed(gib_s: float) -> str:
    return f"{gib_s:.2f} GiB/s" if gib_s >= 1 else f"{_bytes(gib_s * GIB)}/s"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def command(as_json: AsJson = False, once: Once = False, interval: Interval = 1.0, count: Count = 0) -> None:
    """Show the engines of this user on this host: rails, peers, GiB/s, transfers in flight, engines that stall."""
    rates, looks = Rates(), 2 if once else count
    try:
        if as_json:
            _follow(rates, looks, interval, once)
        elif once or not sys.stdout.isatty():
            for seen in _looks(rates, looks or 2, interval):
                last = seen
            Console().print(picture(*last))
        else:
            with Live(picture([]), console=Console(), screen=True, auto_refresh=False) as live:
                for seen in _looks(rates, looks, interval):
                    live.update(picture(*seen), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _looks(rates: Rates, looks: int, interval: float) -> Iterable[Look]:
    done = 0
    while True:
        yield rates.look(pages()), list(other_versions())
        done += 1
        if done == looks:
            return
        time.sleep(interval)


def _follow(rates: Rates, looks: int, interval: float, once: bool) -> None:
    for number, (engines, others) in enumerate(_looks(rates, looks, interval), 1):
        if not once or number == looks:
            unread = [other._asdict() for other in others]
            print(json.dumps({"engines": engines, "other_versions": unread}), flush=True)
