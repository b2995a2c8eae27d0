"""Measure one transfer at a time, as services, connectors and rounds make them, beside plain C that does the same.

usage: run.py lone [--provider local socket] [--only TEXT] [--runs 5] [--peers] [--json FILE]

Each row is measured in turns with its floor (bench/lone/lone.c: a ring in shared memory for `local`, TCP for `socket`),
both as they come: no pinning, asyncio, default settings. A figure is the median of the runs' medians; the ratio is that
of the runs, so that what the machine does meanwhile is in both. Asleep: 2 ms lie between two transfers. Cold: other
memory each time. The floor of a read is the same write. Records go to build/bench-lone.json.

With `--peers` hot writes back to back follow, of aiote and of what `install_peers.py install nixl ucxx` has installed,
by the workers of `aiote bench`. Each is measured alone: its processes, and the threads in them that poll, have ended
before those of the next begin.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness import BUILD, ROOT, keep, peers

from aiote.bench.contestants import Contestant, Setting, start
from aiote.bench.measure import Measurement, RunPlan, arena_for
from aiote.bench.measure import measure as measure_runs
from aiote.bench.work import Work

SIDES = ROOT / "bench" / "lone"
FLOORS = {"local": "ring", "socket": "tcp"}
KIB, MIB = 1 << 10, 1 << 20
REPEATS = {8: 400, 64 * KIB: 200, MIB: 100, 16 * MIB: 20, 256 * MIB: 5}
ASLEEP_US = 2000
THEIRS = {"local": "shm", "socket": "tcp"}
"""The peers' provider over the same medium as each of ours."""


class Row(NamedTuple):
    """What is measured: an operation, its bytes, whether memory is hot, whether both sleep, and through what."""

    op: str
    nbytes: int
    memory: str
    pause_us: int
    way: str = "engine"

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        size = f"{self.nbytes} B" if self.nbytes < KIB else f"{self.nbytes // KIB} KiB"
        size = size if self.nbytes < MIB else f"{self.nbytes // MIB} MiB"
        return f"{self.op} {size}, {self.memory}, {'asleep' if self.pause_us else 'back to back'}, {self.way}"


def rows() -> list[Row]:
    """Return the rows: writes and reads of an engine, and writes through the bridge."""
    found = []
    for nbytes in REPEATS:
        for op in ("write", "read"):
            found += [Row(op, nbytes, "hot", 0), Row(op, nbytes, "cold", ASLEEP_US)]
        found.append(Row("write", nbytes, "cold", ASLEEP_US, "bridge"))
    return found


def said(command: list[str]) -> dict[str, Any]:
    """Run one side's program and return its line."""
    done = subprocess.run(command, cwd=SIDES, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(row: Row, provider: str, floor: str, runs: int) -> dict[str, Any]:
    """Measure one row and its floor in turns."""
    how = [str(row.nbytes), str(REPEATS[row.nbytes]), row.memory, str(row.pause_us)]
    ours, theirs = [], []
    for _ in range(runs):
        theirs.append(said([floor, FLOORS[provider], *how]))
        ours.append(said([sys.executable, "-P", str(SIDES / "lone_aiote.py"), provider, row.op, *how, row.way]))
    medians = [[statistics.median(one["us"]) for one in each] for each in (ours, theirs)]
    times = [time for one in ours for time in one["us"]]
    return {
        "row": row.name,
        "provider": provider,
        "us": statistics.median(medians[0]),
        "p99_us": sorted(times)[len(times) * 99 // 100],
        "floor_us": statistics.median(medians[1]),
        "ratio": statistics.median(a / b for a, b in zip(*medians, strict=True)),
        "cpu_us": 1e6 * sum(one["source_s"] + one["target_s"] for one in ours) / len(times),
        "sleeps": sum(one["switches"] + one["target_switches"] for one in ours) / len(times),
    }


def contestants(provider: str) -> list[tuple[Contestant, str]]:
    """Return aiote and the peers that are installed, each with its provider."""
    theirs = THEIRS[provider]
    others = [one for one in peers() if theirs in one.providers]
    return [(Contestant("aiote", "aiote"), provider), *((one, theirs) for one in others)]


def once_alone(contestant: Contestant, provider: str, nbytes: int) -> float:
    """Return the microseconds of a write, measured while no other contestant runs; NaN if this one cannot do it."""
    work = Work("write", nbytes, 1, 1)
    mode = "default" if contestant.kind == "aiote" else "spin"  # peers have no other default than to poll
    setting = Setting(provider, mode=mode, arena=arena_for([work]))
    with start(contestant, setting) as pair:
        entry = Measurement(pair, optional=True)
        measure_runs([entry], work, setting, RunPlan(runs=1))
    return 1e6 * nbytes / (entry.runs[0].value * (1 << 30)) if entry.runs else math.nan


def beside_peers(provider: str, only: str, runs: int) -> list[dict[str, Any]]:
    """Measure each contestant alone, in turns, and print a line for each size whose name has the text `only`."""
    found, entered = [], contestants(provider)
    print(f"\n{provider}, hot, back to back, each alone (us): {', '.join(one.name for one, _ in entered)}")
    for row in (Row("write", nbytes, "hot", 0) for nbytes in REPEATS if nbytes >= 64 * KIB):
        if only not in row.name:
            continue
        times: dict[str, list[float]] = {one.name: [] for one, _ in entered}
        for _ in range(runs):
            for contestant, over in entered:
                times[contestant.name].append(once_alone(contestant, over, row.nbytes))
        medians = {name: statistics.median(each) for name, each in times.items()}
        print(f"{row.name:45} " + " ".join(f"{one:10.1f}" for one in medians.values()), flush=True)
        # A library that cannot do a size has no number, which JSON says as null.
        us = {name: None if math.isnan(one) else one for name, one in medians.items()}
        found.append({"row": row.name, "provider": provider, "bytes": row.nbytes, "alone_us": us})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one transfer at a time beside plain C.")
    parser.add_argument("--provider", nargs="+", choices=FLOORS, default=list(FLOORS))
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also measure NIXL and ucxx, each alone")
    parser.add_argument("--json", type=Path, default=BUILD / "bench-lone.json")
    given = parser.parse_args()
    records: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        floor = f"{folder}/lone"
        subprocess.run(["cc", "-O3", str(SIDES / "lone.c"), "-o", floor], check=True)
        print(f"{'':52} {'aiote':>10} {'C':>10} {'ratio':>6} {'p99':>10} {'CPU':>9} {'sleeps':>6}   (us)")
        for provider in given.provider:
            for row in rows():
                if given.only in row.name:
                    one = measure(row, provider, floor, given.runs)
                    records.append(one)
                    print(
                        f"{provider:7}{row.name:45} {one['us']:10.1f} {one['floor_us']:10.1f} {one['ratio']:6.2f} "
                        f"{one['p99_us']:10.1f} {one['cpu_us']:9.1f} {one['sleeps']:6.1f}",
                        flush=True,
                    )
    keep(given.json, records)
    for provider in given.provider if given.peers else ():
        records += beside_peers(provider, given.only, given.runs)
        keep(given.json, records)
    print(f"load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}; {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
