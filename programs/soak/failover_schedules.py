"""A million schedules of failover, or as many as are asked for.

    python programs/soak/failover_schedules.py --schedules 1000000 --first 0 --processes 2

Each is a `World` of tests/support/failover/world.py with its number for a seed, every fourth one in which much is
forgotten and cancelled (failover_forgetful.py). Exit status: 0; 1 after a schedule
that broke a promise, which is printed with its number; 2 where only the world itself failed (`findings.py`).
`make test` plays the first few thousand.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from findings import FAILED_ITSELF, SHOWN, VIOLATED, of_aiote, status_of
from support.failover.forgetful import world_of
from support.failover.parts import Broken

BATCH = 2000


def play(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Play these schedules; return what happened in them and what broke: the exit status and a line of each."""
    tally: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        try:
            tally += world_of(seed).run()
        except Exception as error:  # whatever it is, the schedule is the finding
            status = VIOLATED if isinstance(error, Broken) or of_aiote(error) else FAILED_ITSELF
            broken.append((status, f"world_of({seed}).run(): {type(error).__name__}: {error}"))
    return tally, broken


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schedule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    end = chosen.first + chosen.schedules
    batches = [range(at, min(end, at + BATCH)) for at in range(chosen.first, end, BATCH)]
    tally: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    started = time.monotonic()
    with multiprocessing.Pool(chosen.processes) as pool:
        for happened, found in pool.imap_unordered(play, batches):
            tally += happened
            for status, text in found[: max(0, SHOWN - len(broken))]:
                print(f"{'VIOLATION' if status == VIOLATED else 'THE SOAK ITSELF FAILED'}: {text}", flush=True)
            broken += found
    seconds = time.monotonic() - started
    rows = [
        ("schedules", chosen.schedules),
        ("violations", sum(status == VIOLATED for status, _ in broken)),
        ("seconds", round(seconds)),
    ]
    for name, value in [*rows, ("schedules per second", round(chosen.schedules / seconds)), *sorted(tally.items())]:
        print(f"{value:>14}  {name}")
    return status_of(status for status, _ in broken)


if __name__ == "__main__":
    sys.exit(main())
