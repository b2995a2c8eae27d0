"""Measure calls in aiote and in what programs use today: empty ones, arrays each way, a thousand at a time, a stream.

usage: run.py service [--transport local|tcp] [--only NAME,...] [--cases NAME,...] [--runs 3] [--seconds 1.0]

The peers are those that `install_peers.py install pyzmq sockets grpc http ray` has installed, each in an environment of
its own. All take part in each run, in turns; a figure is the median of its runs. Default settings: aiote over `local`
and `socket`, the others over Unix sockets (Ray: as it likes) and TCP. Records go to build/bench-service.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from harness import BUILD, WORKERS, chosen, keep, peers

from aiote.bench.congestion import congestion_control
from aiote.bench.contestants import Contestant

TRANSPORTS = {"local": "shm", "tcp": "tcp"}
COLUMNS = {
    "empty": ("p50_us", "us"),
    "concurrent": ("calls_per_s", "calls/s"),
    "stream": ("items_per_s", "items/s"),
    **{f"{way} {size}": ("gb_per_s", "GB/s") for size in ("4K", "1M", "64M") for way in ("send", "fetch")},
}
LIMIT_S = 600.0


def contestants(folder: str) -> list[Contestant]:
    """Return ours, and what is installed of the others."""
    ours = (sys.executable, str(WORKERS / "service_aiote.py"))
    found = [Contestant("aiote", "aiote", ours, tuple(TRANSPORTS))]
    found.append(Contestant("aiote-uvloop", "aiote", (*ours, "--variant", "uvloop"), tuple(TRANSPORTS)))
    for peer in peers("service", folder):
        transports = tuple(name for name, provider in TRANSPORTS.items() if provider in peer.providers)
        found.append(Contestant(peer.name, "other", peer.command[:2], transports))
    return found


def measure(one: Contestant, transport: str, cases: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Start a server and a client, and return what the client has measured."""
    given = ["--transport", transport]
    server = subprocess.Popen(
        [*one.command, "serve", *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=WORKERS
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        asked = ["--cases", ",".join(cases), "--seconds", str(seconds)]
        done = subprocess.run(
            [*one.command, "call", address, *given, *asked],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=WORKERS,
            timeout=LIMIT_S,
            check=True,
        )
        found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        server.kill()
        server.communicate()


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(transport: str, cases: list[str], medians: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a table: the case's own unit, and CPU microseconds of both sides for each call."""
    width = max(map(len, medians))
    print(f"\n{transport}: congestion control {congestion_control()}; CPU of both sides, us a call, in brackets")
    print(" " * width, *(f"{case}, {COLUMNS[case][1]}".rjust(24) for case in cases))
    for name, row in medians.items():
        cells = []
        for case in cases:
            value, cpu = row[case][COLUMNS[case][0]], row[case]["cpu_us"]
            text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
            cells.append(f"{text} ({cpu:,.0f})".rjust(24))
        print(f"{name:{width}}", *cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure calls in aiote and in what programs use today.")
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), action="append", help="both unless given")
    parser.add_argument("--only", default="", help="names of libraries, or the beginnings of some")
    parser.add_argument("--cases", default=",".join(COLUMNS), help=f"of {', '.join(COLUMNS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case in a run")
    parser.add_argument("--folder", default="", help="of the peers' environments, as install_peers.py has it")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    cases = arguments.cases.split(",")
    if unknown := set(cases) - set(COLUMNS):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}")
    entered = chosen(contestants(arguments.folder), arguments.only)
    records: list[dict[str, Any]] = []
    for transport in arguments.transport or TRANSPORTS:
        rows: dict[str, list[dict[str, dict[str, float]]]] = {}
        for _ in range(arguments.runs):
            for one in (one for one in entered if transport in one.providers):
                rows.setdefault(one.name, []).append(measure(one, transport, cases, arguments.seconds))
        medians = {name: {case: median([run[case] for run in runs]) for case in cases} for name, runs in rows.items()}
        show(transport, cases, medians)
        records.append({"transport": transport, "runs": rows, "medians": medians})
    keep(BUILD / "bench-service.json", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
