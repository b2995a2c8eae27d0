"""Measure a KV-cache service in aiote and in what Python services would do otherwise, in one run, over shm and tcp.

usage: run.py kvcache [--provider shm|tcp] [--only NAME,...] [--parts service,first-token,cancel]
                        [--workloads 16Kx8,...] [--windows 1,4] [--runs 5] [--seconds 0.15] [--with FILE] [--json FILE]

The peers are those that `install_peers.py install nixl ucxx pyzmq sockets` has installed. What the workload is says
bench/peers/kvcache.py; tables go to the standard output, records to build/bench-kvcache.json unless `--json` names
another file. Over tcp all run in a network namespace with reno, where one can be made: BBR halves loopback.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import kvtable
from harness import BUILD, WORKERS, chosen, enter_reno, keep, peers, say
from kvlatency import first_token, lost_pages, pages_back
from kvservice import OURS, WORKLOADS, ServiceEntry, Workload, measure_service
from run_tests import wheel_library

from aiote.bench.congestion import congestion_control
from aiote.bench.contestants import Contestant, Setting, start
from aiote.bench.measure import RunPlan
from aiote.bench.records import FORMAT, machine
from aiote.bench.sides import BenchError, Pair

PROVIDERS = ("shm", "tcp")
PARTS = ("service", "first-token", "cancel")
VARIANTS = ("asyncio", "uvloop", "default", "libfabric")
LATENCY = (f"{OURS}-uvloop", f"{OURS}-default")
"""Of the library's ways the two whose first tokens and cancellations are measured."""
FIRST_TOKEN = (Workload(16 << 10, 64, 1), Workload(16 << 10, 512, 1))
CANCEL = Workload(64 << 10, 64)


def ours() -> list[Contestant]:
    worker = str(WORKERS / "kvcache_aiote.py")
    return [
        Contestant(f"{OURS}-{variant}", "other", (sys.executable, worker, "--variant", variant), PROVIDERS)
        for variant in VARIANTS
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a KV-cache service in aiote and in others.")
    parser.add_argument("--provider", choices=PROVIDERS, action="append", help="all unless given")
    parser.add_argument("--only", default="", help="names of contestants, or the beginnings of some")
    parser.add_argument("--with", dest="peers", type=Path, help="peers as `install_peers.py list` writes them")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--workloads", default="", help="such as 16Kx8,64Kx64: size of a page, pages of a prompt")
    parser.add_argument("--windows", default="1,4", help="requests under way")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one run")
    parser.add_argument("--cancels", type=int, default=200)
    parser.add_argument("--deaths", type=int, default=3, help="of prefillers, killed and stopped each")
    parser.add_argument("--json", type=Path, default=BUILD / "bench-kvcache.json")
    return parser.parse_args(arguments)


def workloads_of(arguments: argparse.Namespace) -> list[Workload]:
    shapes = [(workload.size, workload.pages) for workload in WORKLOADS]
    if arguments.workloads:
        pairs = [word.split("Kx") for word in arguments.workloads.split(",")]
        shapes = [(int(size) << 10, int(pages)) for size, pages in pairs]
    windows = [int(word) for word in arguments.windows.split(",")]
    return [Workload(size, pages, window, arguments.layers) for size, pages in shapes for window in windows]


def open_pair(contestant: Contestant, provider: str, arena: int) -> AbstractContextManager[Pair]:
    return start(contestant, Setting(provider, mode="spin", arena=arena))


class Measurement:
    """All parts, one after the other; what was found so far is in `found`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.providers: list[str] = arguments.provider or list(PROVIDERS)
        others = Contestant.others(arguments.peers) if arguments.peers else peers("kvcache")
        self.contestants = chosen([*ours(), *others], arguments.only)
        self.ours = [one for one in self.contestants if one.name in LATENCY]
        self.found: dict[str, list[Any]] = {part: [] for part in PARTS}

    def service(self) -> None:
        plan = RunPlan(self.arguments.runs, self.arguments.seconds)
        for provider in self.providers:
            for workload in workloads_of(self.arguments):
                with ExitStack() as stack:
                    entries = []
                    for one in self.contestants:
                        if provider in one.providers:
                            pair = self._started(stack, one, provider, workload)
                            if pair is not None:
                                entries.append(ServiceEntry(one.name, pair))
                    self.found["service"] += measure_service(entries, provider, workload, plan, say)

    def _started(self, stack: ExitStack, one: Contestant, provider: str, workload: Workload) -> Pair | None:
        """Start a contestant; a peer that cannot be started is left out, aloud."""
        try:
            return stack.enter_context(open_pair(one, provider, workload.arena))
        except BenchError as error:
            if one.name.startswith(OURS):
                raise
            say(f"{one.name} is left out: {error}")
            return None

    def first_token(self) -> None:
        for provider in self.providers:
            for one in self.ours:
                with open_pair(one, provider, max(workload.arena for workload in FIRST_TOKEN)) as pair:
                    for workload in FIRST_TOKEN:
                        for in_thread in (False, True):
                            say(f"{provider} {workload}: first token, {one.name}")
                            self.found["first-token"].append(
                                first_token(pair, provider, workload, in_thread=in_thread, runs=self.arguments.runs)
                            )

    def cancel(self) -> None:
        for provider in self.providers:
            for one in self.ours:
                say(f"{provider} {CANCEL}: pages back, {one.name}")
                opening = partial(open_pair, one, provider, CANCEL.arena)
                with opening() as pair:
                    self.found["cancel"].append(pages_back(pair, provider, CANCEL, self.arguments.cancels))
                if self.arguments.deaths:
                    self.found["cancel"] += lost_pages(opening, provider, one.name, CANCEL, self.arguments.deaths)


def show(found: dict[str, list[Any]]) -> None:
    if lines := found["service"]:
        print("GiB/s, medians; ratios of neighbouring runs, median (least-most):\n")
        print(kvtable.service(lines))
        print("\np50 / p99 of a request in ms, CPU seconds for each GiB:\n")
        print(kvtable.service_latency(lines))
        for line in lines:
            if line.note:
                print(f"\n{line.contestant}, {line.provider}: {line.note}")
    if tokens := found["first-token"]:
        print("\nThe first token:\n")
        print(kvtable.first_tokens(tokens))
    if backs := found["cancel"]:
        print("\nPages back after a cancellation:\n")
        print(kvtable.pages_back(backs))


def write(file: Path, found: dict[str, list[Any]]) -> None:
    records = {part: [dataclasses.asdict(one) for one in values] for part, values in found.items()}
    keep(file, {"format": FORMAT, "machine": machine(), "congestion": congestion_control(), **records})


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if (library := wheel_library()) is not None:
        os.environ.setdefault("AIOTE_LIBFABRIC", str(library))
    measurement = Measurement(options)
    enter_reno()
    try:
        for part in options.parts.split(","):
            getattr(measurement, part.replace("-", "_"))()
    except BenchError as error:
        say(f"error: {error}")
        return 1
    finally:
        show(measurement.found)
        write(options.json, measurement.found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
