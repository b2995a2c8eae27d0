"""Let one call of the system fail, at each place in turn, while engines open, connect, transfer and close.

    LD_PRELOAD=injector.so python programs/syscall_faults/scenario.py injector.so --provider local --most 40

Two engines that have nothing to do with it move bytes all the while. Whatever the failing call was for ends well, or
with an error of aiote's; then all works again, and no descriptor, registration or peer is left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import gc
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

import aiote

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from support.engines.opening import opened
from support.plugins.leaks import threads
from support.process.open_resources import descriptors, idle_threads

ERRORS = {
    "malloc": errno.ENOMEM,
    "calloc": errno.ENOMEM,
    "realloc": errno.ENOMEM,
    "mmap": errno.ENOMEM,
    "epoll_create1": errno.EMFILE,
    "epoll_ctl": errno.ENOSPC,
    "eventfd": errno.EMFILE,
    "timerfd_create": errno.EMFILE,
    "memfd_create": errno.EMFILE,
    "ftruncate": errno.ENOSPC,
    "posix_fallocate": errno.ENOSPC,
    "socket": errno.EMFILE,
    "bind": errno.EADDRINUSE,
    "listen": errno.EADDRINUSE,
    "accept4": errno.EMFILE,
    "connect": errno.EADDRNOTAVAIL,
    "setsockopt": errno.ENOMEM,
    "getsockopt": errno.ENOBUFS,
    "send": errno.ENOBUFS,
    "sendmsg": errno.ENOBUFS,
    "recv": errno.ENOMEM,
    "recvmsg": errno.ENOMEM,
    "pthread_create": errno.EAGAIN,
    "fcntl": errno.ENOMEM,
}
LIMITS = {"heartbeat_interval": 0.5, "heartbeat_timeout": 8.0, "connect_timeout": 4.0, "drain_timeout": 4.0}
SIZE = 1 << 16
PATIENCE_S = 60


class Injector:
    """The preloaded library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.injector_name.restype = ctypes.c_char_p
        self._library.injector_calls.restype = self._library.injector_hits.restype = ctypes.c_long
        self._library.injector_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self.names: list[str] = []
        while name := self._library.injector_name(len(self.names)):
            self.names.append(name.decode())
        if set(self.names) != set(ERRORS):
            raise SystemExit(f"no error is known for {set(self.names) ^ set(ERRORS)}")

    def arm(self, name: str = "", nth: int = 0) -> None:
        number = self.names.index(name) if name else -1
        self._library.injector_arm(number, nth, ERRORS.get(name, 0))

    def disarm(self) -> int:
        """Let nothing fail any more; return how often something did."""
        self._library.injector_disarm()
        return int(self._library.injector_hits())

    def calls(self) -> dict[str, int]:
        return {name: int(self._library.injector_calls(number)) for number, name in enumerate(self.names)}


class Scene:
    """An engine that lasts, and a peer that keeps it busy."""

    def __init__(self, provider: str, progress: str) -> None:
        self._settings = {**LIMITS, "progress": progress}
        self._provider = provider
        self._turn = 0

    async def open(self, stack: list[aiote.Engine]) -> None:
        for _ in range(2):
            stack.append(await opened(self._provider, **self._settings))
        self.engine, self.busy = stack
        self._source, self._target = self.busy.register(bytes(SIZE)), self.engine.register(bytearray(SIZE))
        self._remote = self.busy.attach(self._target.descriptor)

    async def load(self) -> None:
        """Write all the time; a connection that is lost is made anew by the next write."""
        while True:
            try:
                await self.busy.write_imm(self._source, self._remote, 1)
            except (aiote.AioteError, MemoryError):
                await anyio.sleep(0.01)
            await anyio.sleep(0.001)

    async def cycle(self) -> None:
        """Do all that an engine does, from its opening to its end."""
        self._turn += 1
        word = b"turn %d" % self._turn
        async with opened(self._provider, **self._settings) as other:
            await other.connect(self.engine.address)
            region, target = other.register(bytearray(SIZE)), self.engine.register(bytearray(SIZE))
            try:
                remote = other.attach(target[: SIZE // 2].descriptor)
                await other.write(region[: SIZE // 2], remote)
                with self.engine.counter() as counter:
                    await other.write_imm(region[:8], remote[:8], counter.imm)
                    await counter.wait(1)
                await other.read(remote, region[: SIZE // 2])
                await other.send(self.engine.address, word)
                while (await self.engine.recv()).data != word:
                    pass
                async with target.lease(slice(0, 4096), other.address) as lease:
                    await other.write(region[:4096], other.attach(lease.descriptor))
            finally:
                await target.aclose()

    async def nothing_left(self, before: dict[str, int]) -> None:
        """Wait until nothing is left of a cycle."""
        while (now := self.held()) != before:
            gc.collect()
            await anyio.sleep(0.02)
            self.now = now

    def held(self) -> dict[str, int]:
        return {
            "descriptors": len(descriptors()),
            "threads": len(threads()) - idle_threads(),
            "registrations": sum(rail.device.children for rail in self.engine._runtime.rail_set.rails),
            "peers": len(self.engine.peers),
        }


def told(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Take what a callback has raised; that of asyncio's own, such as its wake-up, has nothing of aiote in it."""
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)
    if error is None or any("aiote" in frame.filename for frame in frames):
        sys.excepthook(type(error), error, None)  # type: ignore[arg-type]


class Failure(Exception):
    """Something was not as it has to be."""


async def tried(scene: Scene, injector: Injector, name: str, nth: int, tally: Counter[str]) -> None:
    """Let one call fail in a cycle, and see that all is well after it."""
    reported: list[str] = []
    sys.excepthook = lambda kind, error, _trace: reported.append(f"{kind.__name__}: {error}")
    injector.arm(name, nth)
    try:
        with anyio.fail_after(PATIENCE_S):
            await scene.cycle()
        ended = "went well"
    except (aiote.AioteError, MemoryError) as error:
        ended = type(error).__name__
    finally:
        hits = injector.disarm()
    if not hits:
        tally["not reached"] += 1
        return
    tally[f"{name}: {ended}"] += 1
    with anyio.fail_after(PATIENCE_S):
        await scene.cycle()
    if reported:
        raise Failure(f"nobody expected {reported}")


async def main(given: argparse.Namespace) -> None:
    injector, tally, rng = Injector(given.injector), Counter[str](), random.Random(given.seed)
    if given.loop == "asyncio":
        asyncio.get_running_loop().set_exception_handler(told)
    scene, stack = Scene(given.provider, given.progress), list[aiote.Engine]()
    await scene.open(stack)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.load)
        for _ in range(3):
            await scene.cycle()
        injector.arm()
        await scene.cycle()
        injector.disarm()
        calls = injector.calls()
        await anyio.sleep(0.2)
        before = scene.held()
        await scene.nothing_left(before)
        for name in given.only or injector.names:
            places = list(range(1, calls[name] + 1))
            if len(places) > given.most:
                places = places[: given.most // 2] + rng.sample(places[given.most // 2 :], given.most // 2)
            print(f"{name}: {calls[name]} calls", flush=True)
            for nth in places:
                try:
                    await tried(scene, injector, name, nth, tally)
                    with anyio.fail_after(PATIENCE_S):
                        await scene.nothing_left(before)
                except BaseException as error:
                    injector.disarm()
                    sys.excepthook = sys.__excepthook__
                    left = "" if scene.held() == before else f"; held {scene.held()}, before {before}"
                    raise Failure(f"call {nth} of {calls[name]} of {name} failed, and then: {error!r}{left}") from error
        group.cancel_scope.cancel()
    for engine in stack:
        await engine.aclose()
    print(", ".join(f"{count} {name}" for name, count in sorted(tally.items())))
    print(f"{sum(count for name, count in tally.items() if ':' in name)} calls failed, and nothing else")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("injector")
    parser.add_argument("--provider", default="local")
    parser.add_argument("--progress", default="adaptive")
    parser.add_argument("--loop", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--most", type=int, default=1 << 30, help="places of one function that are tried")
    parser.add_argument("--only", nargs="*", help="functions")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    anyio.run(main, arguments, backend=arguments.loop)
