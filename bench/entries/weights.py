"""Measure updates of a model's weights in aiote and in what programs use today, the same bytes and checks for all.

usage: run.py weights [--cases "sharded 4-2,..."] [--only NAME,...] [--runs 3] [--updates 3] [--hidden 2048]
                        [--layers 2] [--experts 16] [--json build/bench-weights.json]

bench/peers/weights.py says what an update is. Peers: gloo by this environment's torch, where it has one; Ray as
`install_peers.py install ray` has installed it; `memcpy` is the limit. All take part in each run, in turns. Each run
has one update that is not counted; a figure is the median of the run's others. Default settings: `aiote` has versions
of which the old one stays whole until the commit, `aiote-inplace` writes to the weights themselves, as all others do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import BUILD, WORKERS, chosen, enter_reno, keep, peers

from aiote.bench.congestion import congestion_control
from aiote.bench.contestants import Contestant
from aiote.bench.records import machine

sys.path.insert(0, str(WORKERS))
from weights import CASES, Model

OURS = {
    "aiote": "",
    "aiote-inplace": "inplace",
    "aiote-socket": "inplace,socket",
}
GLOO = {"gloo-full": "full", "gloo-p2p": "p2p"}
NO_FP8 = ("gloo-p2p", "ray")
"""They move bytes, and quantize nothing."""
LIMIT_S = 300.0


class BenchFailure(Exception):
    """A contestant has failed; the text says how."""


def contestants(folder: str) -> list[Contestant]:
    """Return ours, and what is installed of the others."""
    found = [worker("memcpy", sys.executable, "weights_memcpy.py")]
    found += [worker(name, sys.executable, "weights_aiote.py", variant) for name, variant in OURS.items()]
    if importlib.util.find_spec("torch"):
        found += [worker(name, sys.executable, "weights_gloo.py", variant) for name, variant in GLOO.items()]
    else:
        print("not installed: torch (make bench-weights installs it)", file=sys.stderr)
    return [*found, *(worker(peer.name, *peer.command[:2]) for peer in peers("weights", folder))]


def worker(name: str, python: str, script: str, variant: str = "") -> Contestant:
    return Contestant(name, "other", (python, str(WORKERS / script), f"--variant={variant}"))


class Run:
    """A worker of one contestant, with all its ranks."""

    def __init__(self, one: Contestant, case: str, sizes: list[str]) -> None:
        self.name = one.name
        command = [*one.command, "--case", case, *sizes]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=WORKERS)
        self.library = self._answer()["library"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchFailure(f"{self.name} ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def update(self) -> float:
        """Bring one version over, and return the seconds. Raises BenchFailure where a byte is another one."""
        assert self.process.stdin is not None
        self.process.stdin.write("update\n")
        self.process.stdin.flush()
        answer = self._answer()
        if not answer["verified"]:
            raise BenchFailure(f"{self.name}: a target has other bytes than the version")
        return float(answer["seconds"])

    def close(self) -> None:
        """End it: it ends its ranks when its input ends."""
        try:
            self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def measure(one: Contestant, case: str, sizes: list[str], updates: int) -> tuple[str, list[float]]:
    """Return a contestant's library, and what its updates took, the first not among them."""
    run = Run(one, case, sizes)
    try:
        run.update()
        return run.library, [run.update() for _ in range(updates)]
    finally:
        run.close()


def measure_all(
    entered: list[Contestant], case: str, sizes: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Return what the updates of all took, run by run, and their libraries; a peer that fails is left out, aloud."""
    rows: dict[str, list[list[float]]] = {}
    libraries: dict[str, str] = {}
    failed: set[str] = set()
    for _ in range(arguments.runs):
        for one in entered:
            if one.name in failed or (CASES[case].fp8 and one.name in NO_FP8):
                continue
            try:
                libraries[one.name], found = measure(one, case, sizes, arguments.updates)
                rows.setdefault(one.name, []).append(found)
            except BenchFailure as error:
                if one.name in OURS:
                    raise SystemExit(f"error: {error}") from error
                print(f"{one.name} is left out: {error}", file=sys.stderr)
                failed.add(one.name)
                rows.pop(one.name, None)
    return rows, libraries


def record(case: str, nbytes: int, rows: dict[str, list[list[float]]], libraries: dict[str, str]) -> dict[str, Any]:
    """Return what was found in one case: medians, and ratios within a run to ours."""
    found: dict[str, Any] = {}
    medians = {name: [statistics.median(run) for run in runs] for name, runs in rows.items()}
    for name, runs in medians.items():
        seconds = statistics.median(runs)
        found[name] = {"library": libraries[name], "seconds": seconds, "gib_s": nbytes / seconds / (1 << 30)}
        found[name]["runs"] = rows[name]
        for mine in (mine for mine in OURS if mine in medians):
            ratios = [theirs / ours for theirs, ours in zip(runs, medians[mine], strict=True)]
            found[name][f"x_{mine}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return {"case": case, "bytes": nbytes, "contestants": found}


def show(told: dict[str, Any]) -> None:
    """Print a table of one case."""
    found = told["contestants"]
    mine = [name for name in OURS if name in found]
    print(f"\n{told['case']}: {told['bytes'] / (1 << 20):.0f} MiB received; a column of aiote: how many times as long")
    print("contestant".ljust(14), "ms".rjust(8), "GiB/s".rjust(7), "memcpy".rjust(7), *(one.rjust(22) for one in mine))
    for name, one in found.items():
        share = found["memcpy"]["seconds"] / one["seconds"] if "memcpy" in found else float("nan")
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(*one[f"x_{ours}"]).rjust(22) for ours in mine]
        print(name.ljust(14), f"{one['seconds'] * 1e3:8.1f} {one['gib_s']:7.2f} {share:7.0%}", *cells, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure updates of weights in aiote and in what programs use today.")
    parser.add_argument("--only", default="", help="names of contestants, or the beginnings of some")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3, help="of each contestant in a run, after one")
    parser.add_argument("--hidden", type=int, default=2048, help="of the model; a multiple of 64, for fp8 of 512")
    parser.add_argument("--layers", type=int, default=2, help="of either kind, dense and mixtures of experts")
    parser.add_argument("--experts", type=int, default=16, help="of a layer")
    parser.add_argument("--folder", default="", help="of the peers' environments, as install_peers.py has it")
    parser.add_argument("--json", type=Path, default=BUILD / "bench-weights.json")
    return parser.parse_args()


def checked() -> argparse.Namespace:
    """Return the arguments, or end with what is wrong with them."""
    arguments = parse()
    if unknown := set(arguments.cases.split(",")) - set(CASES):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    least = min(arguments.runs, arguments.updates, arguments.layers, arguments.experts)
    step = 512 if any(CASES[case].fp8 for case in arguments.cases.split(",")) else 64
    if least < 1 or arguments.hidden < step or arguments.hidden % step:
        raise SystemExit(f"--runs, --updates, --layers and --experts are 1 or more, --hidden a multiple of {step}")
    return arguments


def main() -> int:
    arguments = checked()
    entered = chosen(contestants(arguments.folder), arguments.only)
    enter_reno()
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("hidden", "layers", "experts")]
    records: list[dict[str, Any]] = []
    for case in arguments.cases.split(","):
        rows, libraries = measure_all(entered, case, sizes, arguments)
        nbytes = Model(case, arguments.hidden, arguments.layers, arguments.experts).nbytes
        records.append(record(case, nbytes, rows, libraries))
        show(records[-1])
        told = {"machine": machine(), "congestion": congestion_control(), "sizes": sizes, "cases": records}
        keep(arguments.json, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
