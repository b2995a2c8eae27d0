"""Measure dispatch and combine in aiote and by the collectives that programs use on CPUs, the same bytes for all.

usage: run.py moe [--ep 2,4,8] [--tokens 1,16,128,512] [--routing uniform,zipf,one] [--only NAME,...]
                    [--seconds 0.6] [--rounds N] [--json build/bench-moe.json]

bench/peers/moe.py says what a round is: 7168 bytes of fp8 and 56 scales a token out, 7168 bfloat16 back, top-8 of 256.
Every rank is a process, all contestants of a case take part in turns, in one run, and what arrives is checked. A case
has as many rounds as take `--seconds`, 3 at least; `--rounds` says how many instead. Peers are what
`install_peers.py install collectives` has installed: gloo and MPICH; `memcpy` is the limit.

The table: microseconds of a round (dispatch and combine), its middle, its 99th percentile and the middle of each
round's slowest rank; CPU milliseconds of all ranks; how often a rank's threads sleep in a round (voluntary context
switches); how many times as long as aiote, by slowest ranks.

The load is printed and recorded before and after. A run that begins at a load above `QUIET` is marked busy: its times
say how the cores were shared, and enter no table. The load after it is mostly the benchmark's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness import BUILD, WORKERS, enter_reno, keep, peers

from aiote.bench.congestion import congestion_control
from aiote.bench.order_statistics import percentile
from aiote.bench.records import machine

ROUTINGS = ("uniform", "zipf", "one")
LIMIT_S = 120.0
MOST_ROUNDS = 300
QUIET = 0.5


class Way(NamedTuple):
    """A contestant: by which program, and which way of it."""

    name: str
    program: str
    variant: str = ""


WAYS = [
    Way("aiote", "aiote"),
    Way("aiote-packed", "aiote", "packed"),
    Way("aiote-direct", "aiote", "direct"),
    Way("aiote-rank", "aiote", "rank"),
    Way("aiote-rails", "aiote", "rails"),
    Way("gloo-alltoall", "gloo", "alltoall"),
    Way("mpich-alltoallv", "mpich", "alltoallv"),
    Way("gloo-allgather", "gloo", "allgather"),
    Way("memcpy", "memcpy"),
]
PEERS = ("gloo-alltoall", "mpich-alltoallv", "gloo-allgather")


class BenchFailure(Exception):
    """A contestant has failed; the text says how."""


def commands(python: str, ranks: int, folder: Path) -> dict[str, list[list[str]]]:
    """Return how the ranks of each program are started; `python` is that of the peers, or nothing."""

    def each(by: str, script: str) -> list[list[str]]:
        common = [by, str(WORKERS / script), str(folder), "--ranks", str(ranks)]
        return [[*common, "--rank", str(rank)] for rank in range(ranks)]

    found = {"aiote": each(sys.executable, "moe_aiote.py"), "memcpy": each(sys.executable, "moe_memcpy.py")}
    if python:
        mpi = [str(Path(python).parent / "mpiexec"), "-n", str(ranks), python, str(WORKERS / "moe_torch.py")]
        found |= {"gloo": each(python, "moe_torch.py"), "mpich": [[*mpi, str(folder), "--ranks", str(ranks)]]}
    return found


def peers_python(folder: str) -> str:
    """Return the interpreter of the peers, or nothing where they are not installed."""
    return next((one.command[0] for one in peers("moe", folder)), "")


class Program:
    """The ranks of one program, each with a FIFO for commands and one for answers."""

    def __init__(self, name: str, ranks: int, python: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="bench-moe-"))
        for rank, way in itertools.product(range(ranks), ("in", "out")):
            os.mkfifo(self.folder / f"{way}.{rank}")
        # Open for both, a FIFO needs no other side.
        self._to = [os.open(self.folder / f"in.{rank}", os.O_RDWR) for rank in range(ranks)]
        self._from = [os.open(self.folder / f"out.{rank}", os.O_RDWR) for rank in range(ranks)]
        self._read = [b""] * ranks
        starts = commands(python, ranks, self.folder)[name]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::FutureWarning"}
        self._processes = [
            subprocess.Popen(one, cwd=WORKERS, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)
            for one in starts
        ]

    def begin(self) -> None:
        """Wait until all ranks are there."""
        self.library = self._answers()[0]["library"]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Have all ranks do something, and return their answers. Raises BenchFailure."""
        self._tell(command)
        answers = self._answers()
        if wrong := next((one["wrong"] for one in answers if one["wrong"]), ""):
            raise BenchFailure(f"{self.name}: {wrong}")
        return answers

    def _tell(self, command: dict[str, Any]) -> None:
        for one in self._to:
            os.write(one, json.dumps(command).encode() + b"\n")

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for rank, one in enumerate(self._from):
            waited = 0.0
            while b"\n" not in self._read[rank]:
                if select.select([one], [], [], 0.5)[0]:
                    self._read[rank] += os.read(one, 1 << 16)
                    continue
                waited += 0.5
                if waited > LIMIT_S or any(process.poll() is not None for process in self._processes):
                    raise BenchFailure(f"{self.name}: rank {rank} of {len(self._from)} does not answer")
            line, _, self._read[rank] = self._read[rank].partition(b"\n")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End all ranks."""
        self._tell({})
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for one in (*self._to, *self._from):
            os.close(one)
        shutil.rmtree(self.folder)


def micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is recorded of the ranks' times: microseconds, and CPU milliseconds a round."""
    rounds = len(answers[0]["dispatch"])
    both = [[sum(pair) for pair in zip(one["dispatch"], one["combine"], strict=True)] for one in answers]
    found: dict[str, Any] = {"rounds": rounds}
    for name, ranks in (
        ("round", both),
        ("dispatch", [one["dispatch"] for one in answers]),
        ("combine", [one["combine"] for one in answers]),
    ):
        every = list(itertools.chain(*ranks))
        slowest = [max(several) for several in zip(*ranks, strict=True)]
        found[name] = {
            "p50_us": micros(percentile(every, 50)),
            "p99_us": micros(percentile(every, 99)),
            "slowest_us": micros(statistics.median(slowest)),
        }
    found["sleeps"] = round(sum(one["sleeps"] for one in answers) / rounds / len(answers), 1)
    found["cpu_ms"] = round(sum(one["cpu"] for one in answers) * 1e3 / rounds, 3)
    return found


class Bench:
    """All contestants of a number of ranks."""

    def __init__(self, ways: list[Way], ranks: int, python: str, arguments: argparse.Namespace) -> None:
        self.ranks, self.arguments = ranks, arguments
        self.ways = [way for way in ways if python or way.program in ("aiote", "memcpy")]
        self.failed: set[str] = set()
        self.programs: dict[str, Program] = {}
        for name in dict.fromkeys(way.program for way in self.ways):
            self.programs[name] = Program(name, ranks, python)
            self._try(name, self.programs[name].begin)

    def _try(self, name: str, action: Any) -> Any:
        try:
            return action()
        except BenchFailure as error:
            if name == "aiote":
                raise SystemExit(f"error: {error}") from error
            print(f"{name} is left out: {error}", file=sys.stderr)
            self.failed.add(name)

    def case(self, tokens: int, routing: str) -> list[dict[str, Any]]:
        """Measure a case, and return a record of each contestant."""
        case = {"ranks": self.ranks, "tokens": tokens, "routing": routing}
        found = []
        for way in self.ways:
            if way.program in self.failed:
                continue
            program = self.programs[way.program]
            measured = self._try(way.program, lambda program=program, way=way: self._measure(program, way, case))
            if measured:
                found.append({**case, "contestant": way.name, "library": program.library, **measured})
        return rated(found)

    def _measure(self, program: Program, way: Way, case: dict[str, Any]) -> dict[str, Any]:
        first = program.ask(case=case, variant=way.variant)
        slowest = max(one["seconds"] for one in first)
        rounds = self.arguments.rounds or min(max(3, round(self.arguments.seconds / slowest)), MOST_ROUNDS)
        return figures(program.ask(rounds=rounds))

    def close(self) -> None:
        """End all processes."""
        for program in self.programs.values():
            program.close()


def rated(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add how many times as long as aiote each takes, and what share of memcpy's rate its dispatch has."""
    by = {one["contestant"]: one for one in found}
    for one in found:
        if "aiote" in by:
            one["x_aiote"] = round(one["round"]["slowest_us"] / by["aiote"]["round"]["slowest_us"], 2)
        if "memcpy" in by:
            one["of_memcpy"] = round(by["memcpy"]["dispatch"]["p50_us"] / one["dispatch"]["p50_us"], 3)
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Print a table of one case."""
    if not found:
        return
    one = found[0]
    print(f"\nEP {one['ranks']}, {one['tokens']} tokens, {one['routing']}")
    heads = ("round p50", "p99", "slowest", "dispatch", "combine", "CPU ms", "sleeps", "x aiote", "memcpy", "rounds")
    print("contestant".ljust(16), *(head.rjust(9) for head in heads))
    for one in found:
        whole = one["round"]
        cells = [whole["p50_us"], whole["p99_us"], whole["slowest_us"]]
        cells += [one["dispatch"]["p50_us"], one["combine"]["p50_us"]]
        text = [f"{cell:9.0f}" for cell in cells] + [f"{one['cpu_ms']:9.2f}", f"{one['sleeps']:9.1f}"]
        text += [f"{one.get('x_aiote', float('nan')):9.2f}", f"{one.get('of_memcpy', float('nan')):9.0%}"]
        print(one["contestant"].ljust(16), *text, f"{one['rounds']:9d}", flush=True)


def summary(records: list[dict[str, Any]]) -> None:
    """Print for each case how aiote stands beside the best of the peers, by slowest ranks, and beside memcpy."""
    print("\nthe best peer's time over aiote's, and the share of memcpy's rate that a direct dispatch has")
    for key, group in itertools.groupby(records, lambda one: (one["ranks"], one["tokens"], one["routing"])):
        by = {one["contestant"]: one for one in group}
        peers = [by[name] for name in PEERS if name in by]
        best = min(peers, key=lambda one: one["round"]["slowest_us"], default=None)
        text = f"{best.get('x_aiote', float('nan')):6.2f} {best['contestant']}" if best else "no peer"
        share = by["aiote-direct"].get("of_memcpy", float("nan")) if "aiote-direct" in by else float("nan")
        print(f"EP {key[0]}, {key[1]:4d} tokens, {key[2]:8s}", text.ljust(24), f"{share:6.0%}")


def load_before() -> dict[str, Any]:
    """Return the load now, and whether a run that begins now is a busy one."""
    load = os.getloadavg()
    return {"load": load, "busy": load[0] > QUIET}


def load_text(about: dict[str, Any]) -> str:
    """Say the load before a run, and whether the run is a busy one."""
    return f"load {about['load'][0]:.2f}" + (", BUSY: no time of this run enters a table," if about["busy"] else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure dispatch and combine in aiote and by collectives.")
    parser.add_argument("--ep", default="2,4,8", help="numbers of ranks")
    parser.add_argument("--tokens", default="1,16,128,512", help="tokens of each rank")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help=f"of {', '.join(ROUTINGS)}")
    parser.add_argument("--only", default="", help="names of contestants, or the beginnings of some")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each contestant in a case")
    parser.add_argument("--rounds", type=int, default=0, help="instead of seconds")
    parser.add_argument("--folder", default="", help="of the peers' environments, as install_peers.py has it")
    parser.add_argument("--json", type=Path, default=BUILD / "bench-moe.json")
    return parser.parse_args()


def checked() -> argparse.Namespace:
    """Return the arguments, or end with what is wrong with them."""
    arguments = parse()
    try:
        arguments.ep, arguments.tokens = ([int(n) for n in str(t).split(",")] for t in (arguments.ep, arguments.tokens))
    except ValueError as error:
        raise SystemExit(f"--ep and --tokens are numbers with commas between: {error}") from error
    arguments.routing = arguments.routing.split(",")
    if unknown := set(arguments.routing) - set(ROUTINGS):
        raise SystemExit(f"no such routing: {', '.join(sorted(unknown))}; there are {', '.join(ROUTINGS)}")
    # With fewer than 8 experts on a rank not all of a token's could be on one.
    if set(arguments.ep) - {1, 2, 4, 8, 16, 32} or min(arguments.tokens) < 1:
        raise SystemExit("--ep is of 1, 2, 4, 8, 16, 32, and there is 1 token at least")
    return arguments


def main() -> int:
    arguments = checked()
    wanted = tuple(filter(None, arguments.only.split(",")))
    ways = [way for way in WAYS if not wanted or way.name.startswith(wanted)]
    python = peers_python(arguments.folder)
    enter_reno()
    about = {"machine": machine(), "congestion": congestion_control(), **load_before()}
    print(f"{load_text(about)} before the run, {about['machine']['cores']} cores")
    records: list[dict[str, Any]] = []
    for ranks in arguments.ep:
        bench = Bench(ways, ranks, python, arguments)
        try:
            for tokens, routing in itertools.product(arguments.tokens, arguments.routing):
                found = bench.case(tokens, routing)
                show(found)
                records += found
                about["load_after"] = os.getloadavg()
                keep(arguments.json, {**about, "records": records})
        finally:
            bench.close()
    summary(records)
    print(f"load {os.getloadavg()[0]:.2f} after the run; {load_text(about)} before it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
