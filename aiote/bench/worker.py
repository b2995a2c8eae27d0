"""One side of aiote's own pair: an engine in a process of its own, driven by lines (`work` has the protocol)."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
from typing import Any

import anyio

import aiote
from aiote.bench.measured_loops import Arena, initiate, serve
from aiote.bench.work import Work

__all__ = ["SPIN_US", "main", "run_on"]

SPIN_US = {"spin": 1_000_000, "event": 0}
"""The value of `spin_us` in each mode; without a mode it is the default of the configuration."""
MESSAGE_BYTES = 65536
HEARTBEAT_LIMIT_S = 30.0
"""Filling and comparing a quarter of a gigabyte blocks the event loop, for seconds if others use the processors."""


def write_answer(answer: dict[str, Any]) -> None:
    """Print one line of the protocol."""
    print(json.dumps(answer), flush=True)


def settings(arguments: argparse.Namespace) -> aiote.EngineConfig:
    """Return the engine's configuration."""
    spin_us = SPIN_US.get(arguments.mode, arguments.spin_us)
    sharing = None if arguments.gpu_sharing is None else arguments.gpu_sharing == "on"
    given = {"spin_us": spin_us, "host": arguments.host, "libfabric": arguments.library, "gpu_sharing": sharing}
    return aiote.EngineConfig(
        progress=arguments.progress,
        message_bytes=MESSAGE_BYTES,
        heartbeat_timeout=HEARTBEAT_LIMIT_S,
        **{name: value for name, value in given.items() if value is not None},
    )


class StagedNotes(logging.Handler):
    """Keep the engine's notes on staged memory, because staging changes the figures."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        details = getattr(record, "aiote", {})
        text = f"{details.get('rail')} staged: {details.get('reason')}"
        if text not in self.texts:
            self.texts.append(text)


class WorkerSide:
    """One side of the pair."""

    def __init__(self, arguments: argparse.Namespace, arena: Arena, notes: StagedNotes) -> None:
        self.is_target = arguments.role == "target"
        self.arena = arena
        self.notes = notes
        self.work: Work | None = None

    async def meet(self, text: str) -> None:
        """Connect to the other side."""
        descriptor = bytes.fromhex(text)
        self.arena.meet(descriptor)
        await self.arena.engine.connect(self.arena.peer_memory.owner)
        write_answer({"ready": True})

    def prepare(self, work: Work) -> None:
        """Prepare a run."""
        self.arena.prepare(work, fills=self.is_target == (work.op == "read"))
        self.work = work
        gc.collect()
        write_answer({"prepared": True})

    async def go(self) -> None:
        """Do the prepared run."""
        assert self.work is not None
        result = await (serve if self.is_target else initiate)(self.arena, self.work)
        if self.notes.texts:
            result["staged"] = self.notes.texts
        write_answer(result)

    async def obey(self, line: str) -> bool:
        """Execute a line; return False if it ends the worker."""
        word, _, rest = line.partition(" ")
        if word == "peer":
            await self.meet(rest.strip())
        elif word == "run":
            self.prepare(Work.parse(line))
        elif word == "go":
            await self.go()
        return word != "quit"


async def drive(arguments: argparse.Namespace) -> None:
    """Serve one side until standard input ends."""
    rails = arguments.rails.split(",") if arguments.rails else None
    notes = StagedNotes()
    logging.getLogger("aiote.memory").addHandler(notes)
    # A thread reads the lines, so that the engine sends heartbeats between the runs.
    lines = anyio.wrap_file(sys.stdin)
    async with aiote.open_engine(arguments.provider, rails=rails, config=settings(arguments)) as engine:
        side = WorkerSide(arguments, Arena(engine, arguments.arena, arguments.memory), notes)
        write_answer({"address": side.arena.region.descriptor.hex(), "library": engine.rails[0].library})
        while (line := (await lines.readline()).strip()) and await side.obey(line):
            pass


def run_on(loop: str, arguments: argparse.Namespace) -> None:
    """Run the side on an event loop."""
    if loop == "trio":
        anyio.run(drive, arguments, backend="trio")
    elif loop == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(drive(arguments))
    else:
        asyncio.run(drive(arguments))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments from the driver."""
    parser = argparse.ArgumentParser(description="One side of a measurement; `aiote bench` starts it.")
    parser.add_argument("--role", choices=["target", "initiator"], required=True)
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--mode", choices=["spin", "event", "default"], default="spin")
    parser.add_argument("--loop", choices=["asyncio", "uvloop", "trio"], default="asyncio")
    parser.add_argument("--progress", choices=["adaptive", "loop", "thread"], default="adaptive")
    parser.add_argument("--spin-us", type=int)
    parser.add_argument("--rails", default="")
    parser.add_argument("--arena", type=int, default=64 << 20)
    parser.add_argument("--memory", choices=["host", "cuda"], default="host")
    parser.add_argument("--gpu-sharing", choices=["on", "off"])
    parser.add_argument("--cpu", type=int, default=-1)
    parser.add_argument("--host")
    parser.add_argument("--library")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if arguments.cpu >= 0:
        os.sched_setaffinity(0, {arguments.cpu})
    try:
        run_on(arguments.loop, arguments)
    except Exception as raised:
        error = raised
        # The coroutines of a window fail together with the same error, so the first one is enough.
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        write_answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
