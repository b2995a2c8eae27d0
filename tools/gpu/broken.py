"""See that a context that breaks ends its transfers, and no others: `python tools/gpu/broken.py [--standin]`.

A child process for each way to break a context: a kernel's trap, and a kernel's store to where nothing is. Its engine
has memory of the GPU and of the host. Transfers of the GPU's memory are under way when the kernel runs: one behind it
in its stream, and writes and reads that are not, one after another. Each has to end with an error of aiote's, and
closing everything has to end; transfers of the host's memory go on meanwhile and afterwards. Times are from the launch
of the kernel, which breaks the context after 100 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from typing import Any

import anyio
import numpy as np
from device import Gpu, Report, die_with_parent, opened, parser, say

import aiote

SIZE = 8 << 20
BREAK_US = 100_000
AFTER_S = 1.0
SECONDS = 25.0
SOON_S = 5.0


class Broken:
    """Two engines with memory of both kinds, and what became of their transfers."""

    def __init__(self, gpu: Gpu, left: aiote.Engine, right: aiote.Engine) -> None:
        self.gpu, self.left, self.right = gpu, left, right
        self.memory, self.slow = gpu.array(SIZE), gpu.array(4096)
        self.stream = gpu.stream()
        self.of_gpu = left.register(self.memory)
        data = np.arange(SIZE, dtype=np.uint64).view(np.uint8)[:SIZE].copy()
        self.of_host = left.register(data)
        self.data, self.target = data, np.zeros(SIZE, np.uint8)
        self.theirs = right.register(np.zeros(SIZE, np.uint8)), right.register(self.target)
        self.remotes = [left.attach(region.descriptor) for region in self.theirs]
        self.launched = time.monotonic()
        self.ends: dict[str, Any] = {}
        self.host_transfers = 0

    def _note(self, name: str, error: BaseException | None) -> None:
        told = f"{type(error).__name__}: ...{str(error)[-140:]}" if error is not None else "no error"
        at = round(time.monotonic() - self.launched, 3)
        self.ends[name] = {"error": told, "of aiote": isinstance(error, aiote.AioteError), "s": at}
        say(f"   {at:.3f} s: {name}: {told}")

    async def behind(self) -> None:
        """Await a write that is behind the kernel."""
        try:
            await self.left.write(self.of_gpu, self.remotes[0], stream=self.stream)
        except Exception as error:
            self._note("behind the kernel", error)
        else:
            self._note("behind the kernel", None)

    async def others(self, name: str) -> None:
        """Move memory of the GPU, again and again, until that fails."""
        remote = self.remotes[0]
        try:
            while True:
                if name != "read":
                    await self.left.write(self.of_gpu, remote, stream=-1)
                else:
                    await self.left.read(remote, self.of_gpu, stream=-1)
                await asyncio.sleep(0)
        except Exception as error:
            self._note(name, error)

    async def host(self, until: float) -> None:
        """Move memory of the host meanwhile, and check it."""
        while time.monotonic() < until:
            self.target[:] = 0
            await self.left.write(self.of_host, self.remotes[1])
            if not np.array_equal(self.target, self.data):
                raise AssertionError("a host transfer's bytes are wrong")
            self.host_transfers += 1
            await asyncio.sleep(0.002)

    async def run(self, by_address: bool) -> None:
        """Break the context while all are under way, and use it once more."""
        async with anyio.create_task_group() as group:
            self.launched = time.monotonic()
            if self.gpu.real:
                self.gpu.breaks(BREAK_US, by_address, self.stream)
            else:
                self.gpu.fill(self.slow, 1, 5 * BREAK_US, self.stream)
            group.start_soon(self.behind)
            group.start_soon(self.others, "write")
            group.start_soon(self.others, "read")
            group.start_soon(self.host, self.launched + AFTER_S)
            if not self.gpu.real:
                await asyncio.sleep(BREAK_US / 1e6)
                self.gpu.breaks(0, by_address, self.stream)
        await self.others("write afterwards")


async def child(gpu: Gpu, provider: str, by_address: bool) -> dict[str, Any]:
    """Return what became of everything, closing included."""
    async with aiote.open_engine(provider) as right:
        async with aiote.open_engine(provider) as left:
            await left.connect(right.address)
            one = Broken(gpu, left, right)
            with anyio.fail_after(SOON_S + AFTER_S):
                await one.run(by_address)
            begin = time.monotonic()
            for region in (one.of_gpu, one.of_host):
                with anyio.fail_after(SOON_S):
                    await region.aclose()
        closed = time.monotonic() - begin
    return {"ends": one.ends, "host transfers": one.host_transfers, "closed s": round(closed, 3)}


def be_child(standin: bool, provider: str, way: str) -> None:
    """Print what was found, and end at once: a library that is ended in a broken context is not what is measured."""
    die_with_parent()
    status = 1
    try:
        found = asyncio.run(child(opened(standin), provider, way == "address"))
        say("CHILD " + json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    os._exit(status)


def one_way(provider: str, way: str, standin: bool, seconds: float) -> dict[str, Any]:
    """Run a child, and pass on what it says. Raises where it says nothing within its time."""
    command = [sys.executable, __file__, "--become", provider, way, *["--standin"] * standin]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        say(text.decode() if isinstance(text, bytes) else text)
        raise
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("CHILD "):
            found = json.loads(line.removeprefix("CHILD "))
        else:
            say(line)
    if not found:
        raise RuntimeError(f"the child ended with {done.returncode}")
    return found


def kept(found: dict[str, Any]) -> bool:
    """Say whether all ended soon, with an error of aiote's, and host transfers went on."""
    ends = found["ends"].values()
    soon = all(end["of aiote"] and end["s"] < SOON_S for end in ends)
    return len(ends) == 4 and soon and found["host transfers"] > 5


def main() -> int:
    options = parser("See that a context that breaks ends its transfers.", SECONDS)
    options.add_argument("--become", nargs=2, help="for its own children")
    arguments = options.parse_args()
    if arguments.become:
        be_child(arguments.standin, *arguments.become)
    report = Report("a context that breaks ends its transfers", arguments.seconds)
    ways = [("local", "trap"), ("socket", "trap"), ("local", "address")]
    for number, (provider, way) in enumerate(ways):
        name = f"{provider}, {way}"
        with report.arm(name):
            limit = report.left / (len(ways) - number) + 3
            report.detail[name] = one_way(provider, way, arguments.standin, limit)
            found = report.detail[name]
            say(f"   {found['host transfers']} host transfers, closed in {found['closed s']} s")
    arms = list(report.detail.values())
    ends = [(name, end["s"]) for one in arms for name, end in one["ends"].items()]
    last = max((s for name, s in ends if name != "write afterwards"), default=0.0)
    ok = len(arms) == len(ways) and all(kept(one) for one in arms)
    text = f"{sum(kept(one) for one in arms)} of {len(ways)} ways: all ended with an error"
    return report.end(f"{text}, host transfers went on; the last {last - BREAK_US / 1e6:.2f} s after the break", ok)


if __name__ == "__main__":
    sys.exit(main())
