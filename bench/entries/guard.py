"""Compare the installed package with that of another commit: `make bench-guard BASE=<commit>`.

usage: run.py guard [--base COMMIT] [--runs N] [--tolerance PERCENT] [--provider NAME ...]

Both run the same work with default settings, in turns, each pair of runs one after the other, so that what changes on
the machine meets both. A line is slower if its runs are slower than their neighbours by more than the tolerance so
often that chance does it in less than one of a hundred measurements. What is slower is measured again; what is slower
both times ends the program with 1. The other commit is built once, under build/guard/.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from aiote.bench.contestants import Contestant, Setting, start
from aiote.bench.measure import Measurement, RunPlan, arena_for, measure
from aiote.bench.sides import BenchError, Pair
from aiote.bench.work import Work

ROOT = Path(__file__).resolve().parents[2]
GUARD = ROOT / "build" / "guard"
CHANCE = 0.01
RUNS = 11
TOLERANCE = 5.0
"""Percent. What runs of one build differ by, in their medians, on two cores that others use, too."""
WORKS = (
    Work("latency", 8, 1, 1),
    Work("write", 64 << 10, 16, 1),
    Work("write", 1 << 20, 8, 1),
    Work("pages", 4 << 10, 4, 1, pages=256),
    Work("send", 16 << 10, 16, 1),
    # One at a time, as services make them.
    Work("write", 64 << 10, 1, 1),
    Work("write", 1 << 20, 1, 1),
    Work("read", 1 << 20, 1, 1),
    Work("write", 16 << 20, 1, 1),
)


def named(provider: str, work: Work) -> str:
    """Return what a line calls its work."""
    return f"{provider} {work.op} {work.size}{' alone' if work.window == 1 and work.op != 'latency' else ''}"


def needed(runs: int) -> int:
    """Return how many of so many runs have to be slower for chance alone to do that in less than `CHANCE`.

    Chance makes each slower with one half (the sign test). Raises ValueError for too few runs to tell.
    """
    tail, count = 0.0, runs + 1
    while count > 0 and tail + math.comb(runs, count - 1) / 2**runs < CHANCE:
        count -= 1
        tail += math.comb(runs, count) / 2**runs
    if count > runs:
        raise ValueError(f"{runs} runs: even if all are slower that may be chance; at least 7 are needed")
    return count


def slower(costs: Sequence[float], base: Sequence[float], tolerance: float) -> bool:
    """Say whether costs are above those of their neighbours by more than `tolerance` %, beyond chance."""
    over = sum(ours > theirs * (1 + tolerance / 100) for ours, theirs in zip(costs, base, strict=True))
    return over >= needed(len(costs))


def build(commit: str) -> Path:
    """Return the folder in which the package of a commit is installed; build it where it is not."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if not name:
        raise SystemExit(f"error: {commit} is no commit here")
    installed = GUARD / name / "installed"
    if not installed.exists():
        sources = GUARD / name / "sources"
        shutil.rmtree(sources, ignore_errors=True)
        sources.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(sources)], input=archive, check=True)
        print(f"building {commit}, {name[:12]}", flush=True)
        unfinished = GUARD / name / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(unfinished)]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(sources)], env=environment, check=True)
        unfinished.rename(installed)
        shutil.rmtree(sources)
    return installed


def contestant(name: str, path: Path | None) -> Contestant:
    """Return the worker of the package in a folder, or of the installed one."""
    where = () if path is None else ("env", f"PYTHONPATH={path}")
    return Contestant(name, "other", (*where, sys.executable, "-P", "-m", "aiote.bench.worker"))


def compare(pairs: Sequence[Pair], work: Work, setting: Setting, arguments: argparse.Namespace) -> bool:
    """Measure one kind of work with both, print the line, and say whether ours is slower."""
    entries = [Measurement(pair) for pair in pairs]
    measure(entries, work, setting, RunPlan(runs=arguments.runs))
    costs = [[run.value if work.op == "latency" else 1 / run.value for run in entry.runs] for entry in entries]
    found = slower(costs[0], costs[1], arguments.tolerance)
    ratios = sorted(ours / theirs for ours, theirs in zip(*costs, strict=True))
    print(
        f"{named(setting.provider, work):28}  cost {ratios[len(ratios) // 2]:.2f} of the other's "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}){'  SLOWER' if found else ''}",
        flush=True,
    )
    return found


def guard(arguments: argparse.Namespace) -> list[str]:
    """Compare everything; return what was slower twice."""
    folder = Path(arguments.built) if arguments.built else build(arguments.base)
    worse = []
    for provider in arguments.provider:
        setting = Setting(provider, mode="default", arena=arena_for(WORKS))
        with contextlib.ExitStack() as stack:
            sides = (contestant("here", None), contestant(arguments.base, folder))
            pairs = [stack.enter_context(start(one, setting)) for one in sides]
            for work in WORKS:
                if all(compare(pairs, work, setting, arguments) for _ in range(2)):
                    worse.append(named(provider, work))
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(description="Fail where the installed package is slower than another commit's.")
    parser.add_argument("--base", default="HEAD~1", help="the commit to compare with (default: the one before)")
    parser.add_argument("--built", help="a folder in which it is installed already")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="percent that count as equal")
    parser.add_argument("--provider", nargs="+", default=["local", "socket"])
    arguments = parser.parse_args()
    try:
        needed(arguments.runs)
        worse = guard(arguments)
    except (BenchError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(
        f"slower than {arguments.base}, twice: {', '.join(worse)}"
        if worse
        else f"nothing is slower than {arguments.base}"
    )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
