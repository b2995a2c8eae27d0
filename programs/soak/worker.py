"""A process of the soak: one engine at a time, told by lines of JSON what to do (`soak.py` is the other end).

It answers each command with one line; violations are lines of their own. It dies with its parent, stopped or not.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy  # noqa: F401 - its thread pool starts on import: before the baseline is taken
import uvloop

import aiote

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import registered_memory
from findings import FAILED_ITSELF, Findings
from kv_lives import DecodeLife, PrefillLife, RegistryLife
from life import Life
from support.process.open_resources import Baseline, resident_bytes
from tasks import Tasks, tasks_of
from watchdog import Watchdog

LIVES: dict[str, Any] = {"peer": Life, "prefill": PrefillLife, "decode": DecodeLife, "registry": RegistryLife}

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""What may still be on its way out after an engine was closed."""
NIC_PATIENCE = 100
"""How many tenths of a second a host may be without its NIC: a cable that was cut, and the kernel's own second."""


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Said(Findings):
    """What this process finds is told to its parent."""

    def violation(self, text: str) -> None:
        say(violation=text)

    def failure(self, text: str) -> None:
        say(failure=text)


FINDINGS = Said()
violation = FINDINGS.violation


class Worker:
    """What a worker can be told to do."""

    def __init__(self, loop: str, tasks: Tasks, seed: int, provider: str, bound: float, role: str) -> None:
        self.loop = loop
        self.seed = seed
        self.role = role
        self.provider, _, memory = provider.partition("+")
        if memory:
            registered_memory.use_gpus()
        self.dog = Watchdog(tasks, bound, violation)
        self.tally: Counter[str] = Counter()
        self.life: Any = None
        self.baseline = Baseline()

    async def warm_up(self) -> None:
        """Open and close an engine once, for a library keeps some things for good; then take the baseline."""
        async with aiote.open_engine(self.provider) as engine:
            await registered_memory.lent(engine).register(registered_memory.zeros(4096)).aclose()
        if self.loop == "uvloop":
            # With its first stream it opens a descriptor that it keeps for when there are no more.
            near, far = socket.socketpair()
            _reader, writer = await asyncio.open_connection(sock=near)
            writer.close()
            await writer.wait_closed()
            far.close()
        gc.collect()
        self.baseline = Baseline()

    async def open(self, life: int, host: str, key: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Open an engine and begin to take what others write."""
        config = aiote.EngineConfig(host=host or None, cluster_key=key.encode(), **settings)
        engine = registered_memory.lent(await self._opened(config))
        self.life = LIVES[self.role](life, engine, self.seed, self.dog, self.tally, FINDINGS)
        return {"address": str(engine.address)}

    async def _opened(self, config: aiote.EngineConfig) -> aiote.Engine:
        """Open an engine; where the cable of its host was cut just then, when it is back."""
        for _ in range(NIC_PATIENCE):
            try:
                return await aiote.open_engine(self.provider, config=config)
            except aiote.UsageError as error:
                if "no rail leads there" not in str(error):
                    raise
                await anyio.sleep(0.1)
        return await aiote.open_engine(self.provider, config=config)

    async def meet(self, lives: dict[str, str]) -> dict[str, Any]:
        """Take note of who is there."""
        if self.life is not None:
            self.life.meet({int(number): address for number, address in lives.items()})
        return {}

    async def stall(self, seconds: float) -> dict[str, Any]:
        """Let a prefiller's jobs stand still."""
        if self.life is not None:
            self.life.stall(seconds)
        return {}

    async def cancel(self) -> dict[str, Any]:
        """Cancel many of the awaits that are under way."""
        return {"cancelled": self.life.cancel_some() if self.life is not None else 0}

    async def finish(self) -> dict[str, Any]:
        """See everything through and compare notes with the others."""
        assert self.life is not None
        await self.life.finish()
        return {}

    async def close(self, how: str) -> dict[str, Any]:
        """Close the engine and look for what it left behind."""
        assert self.life is not None
        life, self.life = self.life, None
        await life.close(how)
        del life
        waited = 0.0
        while (left := self._left()) and waited < GRACE_S:
            await anyio.sleep(0.05)
            waited += 0.05
        if left:
            violation("left behind by a closed engine:\n  " + "\n  ".join(left))
        return {}

    def _left(self) -> list[str]:
        gc.collect()
        return self.baseline.left()

    async def report(self) -> dict[str, Any]:
        """Tell what was counted since the last report."""
        counted, self.tally = dict(self.tally), Counter()
        if self.life is not None:
            self.life.tally = self.tally
        counted["awaits watched"], self.dog.seen = self.dog.seen, 0
        return {"tally": counted, "resident": resident_bytes()}


async def main(loop: str, *job: Any) -> None:
    """Answer until the input ends; an error that nobody expects ends it before."""
    if loop != "trio":
        asyncio.get_running_loop().set_exception_handler(in_the_loop)
    try:
        async with tasks_of(loop) as tasks:
            await answer(Worker(loop, tasks, *job))
    except Exception as error:
        FINDINGS.unexpected(error, "in the process")
        sys.exit(FAILED_ITSELF)


def in_the_loop(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what an event loop has to say, which nobody awaited."""
    error = context.get("exception")
    if error is None:
        violation(f"in the event loop: {context}")
    else:
        FINDINGS.unexpected(error, f"in the event loop, {context.get('message')}")


async def answer(worker: Worker) -> None:
    """Do what the parent says."""
    await worker.warm_up()
    watching = worker.dog.tasks.start(worker.dog.run())
    say(greeting=os.getpid())
    async for line in lines():
        command = json.loads(line)
        number = command.pop("number")
        try:
            answer = await getattr(worker, command.pop("do"))(**command)
        except aiote.AioteError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(number=number, **answer)
    watching.cancel()
    if worker.life is not None:
        worker.life.engine.abort()


async def lines() -> AsyncIterator[bytes]:
    """Iterate over the lines of the input until it ends."""
    fd, rest = sys.stdin.fileno(), b""
    while True:
        await anyio.wait_readable(fd)
        read = os.read(fd, 1 << 16)
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        for line in whole:
            yield line


def run(loop: str, *job: Any) -> None:
    """Be a worker on that event loop."""
    match loop:
        case "trio":
            import trio

            trio.run(main, loop, *job)
        case "uvloop":
            uvloop.run(main(loop, *job))
        case _:
            asyncio.run(main(loop, *job))


if __name__ == "__main__":
    faulthandler.enable()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("error", ResourceWarning)
    sys.unraisablehook = lambda raised: violation(f"ignored: {raised.exc_value!r} in {raised.object!r}")
    # An engine tells here what failed in a task of its own.
    sys.excepthook = lambda _kind, error, _trace: FINDINGS.unexpected(error, "in a task")
    _script, number, kind, limit, part, loop = sys.argv
    run(loop, int(number), kind, float(limit), part)
