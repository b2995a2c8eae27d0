"""Cut the data connections of two engines again and again in the middle of everything, and see that no count is wrong.

    python programs/soak/cut_rails.py --runs 1000 [--first 0]

Each run has a seed that draws how many rails there are, what goes over them, and which is cut when; a failing one is
named, and repeated with --first SEED --runs 1 (the machine's own timing is not repeated). Exit status: 0; 1 after a
run that broke a promise; 2 where the soak itself failed (`findings.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from findings import FAILED_ITSELF, VIOLATED, of_aiote
from support.engines.data_connections import cut, data_connections
from support.engines.two_way_traffic import Traffic, railed

LONGEST_PAUSE_S = 0.02


async def run(seed: int) -> int:
    """Have one run, and return how often a rail was lost in it. Raises AssertionError."""
    draw = random.Random(seed)
    async with railed(draw.randint(2, 4)) as (left, right, seen):
        traffic = Traffic(left, right, seed)
        running = asyncio.create_task(traffic.run())
        for _ in range(draw.randint(1, 3)):
            await asyncio.sleep(draw.random() * LONGEST_PAUSE_S)
            connections = data_connections(left, right)
            if len(connections) > 1:
                cut(draw.choice(connections))
        try:
            await running
            traffic.check()
        except BaseException as error:
            error.add_note(f"events: {seen}, messages: {len(traffic.messages)}")
            raise
        return seen.count("rail.failed")


def status_of(error: Exception) -> int:
    """Tell a wrong count, a hang and an error of aiote's from what went wrong in the soak itself."""
    return VIOLATED if isinstance(error, (AssertionError, TimeoutError)) or of_aiote(error) else FAILED_ITSELF


def main(first: int, runs: int) -> int:
    lost = 0
    for seed in range(first, first + runs):
        try:
            lost += asyncio.run(run(seed))
        except Exception as error:
            traceback.print_exc()
            what = "VIOLATION" if status_of(error) == VIOLATED else "THE SOAK ITSELF FAILED"
            print(f"{what}: seed {seed}; repeat it with --first {seed} --runs 1", file=sys.stderr)
            return status_of(error)
        if (seed - first + 1) % 100 == 0:
            print(f"{seed - first + 1} runs, rails lost {lost} times, no count was wrong", flush=True)
    print(f"{runs} runs, rails lost {lost} times, no count was wrong")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.first, arguments.runs))
