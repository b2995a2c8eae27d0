"""Look for transfers that overtake kernels: `python tools/gpu/order.py [--standin]`.

In each round a kernel that is late fills the source, block by block, with the round's byte; right after its launch
`write_imm` is called, and when it was counted each byte of the target has to be the round's. What was there before is
the byte of the round before, so one that is too early is seen. With `stream=-1` some round has to be wrong, which shows
that the check can find a race. The last arm has the target in the GPU's memory, and a kernel launched after the count,
on another non-blocking stream, looks at it. Two engines of one process, over `local` and over `socket`; the kernels'
lateness is drawn from 20 to 200 us.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from device import Gpu, Report, parser, say

import aiote

IMM = 0x51
SIZE = 65_536
RACES = 100
SECONDS = 24.0


@dataclass(frozen=True)
class Arm:
    """How the kernel and the transfer are ordered, and where the target is."""

    name: str
    kernel: str
    order: str
    target: str = "host"

    @property
    def races(self) -> bool:
        return self.order == "ready"


ARMS = (
    Arm("stream=-1", "own", "ready"),
    Arm("stream=", "own", "own"),
    Arm("default stream", "default", "default"),
    Arm("stream=, a kernel behind the count", "own", "own", "gpu"),
)


class Rounds:
    """The memory and the streams of an arm."""

    def __init__(self, gpu: Gpu, arm: Arm, left: aiote.Engine, right: aiote.Engine) -> None:
        self.gpu, self.arm, self.left, self.right = gpu, arm, left, right
        self.source = gpu.array(SIZE)
        self.target: Any = gpu.array(SIZE) if arm.target == "gpu" else np.zeros(SIZE, np.uint8)
        self.stream = None if arm.kernel == "default" else gpu.stream()
        self.given = {"own": self.stream, "default": None, "ready": -1}[arm.order]
        self.reader = gpu.stream()
        self.regions = left.register(self.source), right.register(self.target)
        self.remote = left.attach(self.regions[1].descriptor)

    async def one(self, number: int) -> int:
        """Run a round; return how many bytes are wrong."""
        value = 1 + number % 250
        self.gpu.fill(self.source, value, 20 + number * 37 % 181, self.stream)
        await self.left.write_imm(self.regions[0], self.remote, IMM, stream=self.given)
        await self.right.counter(IMM).wait(1)
        if self.arm.target == "gpu":
            wrong = self.gpu.differing(self.target, value, self.reader)
        else:
            wrong = int(np.count_nonzero(self.target != value))
        if self.arm.races:
            self.gpu.synchronize(self.stream)
        return wrong

    async def close(self) -> None:
        for region in self.regions:
            await region.aclose()


async def one_arm(rounds: Rounds, count: int, seconds: float) -> dict[str, Any]:
    """Run rounds, as many as there is time for."""
    begin, done, wrong, most = time.monotonic(), 0, 0, 0
    for number in range(count):
        bad = await rounds.one(number)
        done, wrong, most = done + 1, wrong + bool(bad), max(most, bad)
        if time.monotonic() - begin > seconds:
            break
    took = time.monotonic() - begin
    await rounds.close()
    say(f"   {done} rounds, {wrong} wrong (at most {most} of {SIZE} bytes), {took / done * 1e6:.0f} us each")
    return {"rounds": done, "wrong": wrong, "most bytes": most, "us each": round(took / done * 1e6)}


async def over(provider: str, gpu: Gpu, report: Report, count: int, spin_us: int, arms_left: int) -> None:
    """Run all arms over one rail."""
    config = aiote.EngineConfig(spin_us=spin_us)
    async with aiote.open_engine(provider, config=config) as left, aiote.open_engine(provider, config=config) as right:
        await left.connect(right.address)
        for arm in ARMS:
            arms_left -= not arm.races
            seconds = 3.0 if arm.races else report.left / (arms_left + 1)
            with report.arm(f"{provider}, {arm.name}"), anyio.fail_after(seconds + 5):
                rounds = Rounds(gpu, arm, left, right)
                many = min(count, RACES) if arm.races else count
                report.detail[f"{provider}, {arm.name}"] = await one_arm(rounds, many, seconds)


async def measured(gpu: Gpu, report: Report, count: int, spin_us: int) -> int:
    for left, provider in ((6, "local"), (3, "socket")):
        with report.arm(provider):
            await over(provider, gpu, report, count, spin_us, left)
    kept = [found for name, found in report.detail.items() if "stream=-1" not in name]
    raced = [found for name, found in report.detail.items() if "stream=-1" in name]
    wrong, rounds = (sum(found[key] for found in kept) for key in ("wrong", "rounds"))
    ok = len(kept) == 6 and len(raced) == 2 and not wrong and all(found["wrong"] for found in raced)
    text = f"{wrong} of {rounds} rounds wrong; with `stream=-1` {sum(found['wrong'] for found in raced)}"
    return report.end(f"{text} of {sum(found['rounds'] for found in raced)}", ok)


def main() -> int:
    options = parser("Look for transfers that overtake kernels.", SECONDS)
    options.add_argument("--rounds", type=int, help="of each arm (default: 10000; 200 on the stand-in)")
    options.add_argument("--spin-us", type=int, default=1000, help="of both engines (default: 1000)")
    arguments = options.parse_args()
    report = Report("no transfer overtakes a kernel; with stream=-1 one does", arguments.seconds)
    count = arguments.rounds or (200 if arguments.standin else 10_000)
    return report.run(arguments.standin, measured, count, arguments.spin_us)


if __name__ == "__main__":
    sys.exit(main())
