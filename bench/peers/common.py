"""Run one side of a pair for a peer library: its arguments, the line protocol, the pattern in memory, the clock.

A peer's module defines a `Worker` and hands it to `serve`, which owns the process: it pins it to its processor, keeps
the standard output for the protocol alone (what a library prints goes to the standard error), reads the parent's lines
on a thread, fills and checks the memory, and turns any failure into one line and exit status 1. The worker knows its
library and nothing of that.

Protocol, one line each way at a time; a worker's lines are JSON objects:
    {"address": text, "library": text}    first, unasked
    peer TEXT                             the other side's address; answered by {"ready": true}
    run op=write size=... window=...      answered by {"prepared": true}, or {"unsupported": why} and nothing more
    go                                    answered by the result: seconds, cpu, verified, and quantiles of round trips
    quit, or the end of the input         ends the worker with status 0

The end of the input in the middle of a run ends the process at once, so that nothing waits for a peer that has died.
"""

from __future__ import annotations

import abc
import argparse
import ctypes
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PR_SET_PDEATHSIG = 1
SEED_FACTOR = 0x9E3779B97F4A7C15
WORD_FACTOR = 0xBF58476D1CE4E5B9
MASK = (1 << 64) - 1
PAGE_STEP = 7919  # a prime: page j of a request goes to page j * 7919 modulo the number of pages, so each is hit once
CHUNK_WORDS = 1 << 20  # the pattern is made 8 MiB at a time, so that making it costs no memory worth speaking of
OPERATIONS = ("write", "read", "pages", "latency", "rate", "send")
GRACE_SECONDS = 2.0  # for a worker to end by itself after the end of its input


@dataclass(frozen=True)
class Options:
    """What a worker is started with."""

    role: str
    provider: str
    mode: str
    arena: int
    cpu: int
    variant: str

    @property
    def initiator(self) -> bool:
        return self.role == "initiator"

    @property
    def spins(self) -> bool:
        return self.mode == "spin"


@dataclass(frozen=True)
class Task:
    """One `run` line: what is moved, in which pieces, how many of them at a time."""

    op: str
    size: int
    window: int
    count: int
    pages: int = 0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Task:
        given = dict(item.split("=", 1) for item in text.split())
        task = cls(given.pop("op"), **{name: int(value) for name, value in given.items()})
        if task.op not in OPERATIONS or min(task.size, task.window, task.count) < 1:
            raise ValueError(f"not a task: {text}")
        if task.op == "pages" and (task.pages < 1 or task.pages % PAGE_STEP == 0):
            raise ValueError(f"pages={task.pages}: one or more, and no multiple of {PAGE_STEP}")
        if task.op in ("latency", "rate"):
            return cls(task.op, 8, 1 if task.op == "latency" else task.window, task.count, 0, task.seed)
        return task

    @property
    def stride(self) -> int:
        """Return the bytes of one slot: of one transfer, or of all pages of one request."""
        return self.size * self.pages if self.op == "pages" else self.size

    @property
    def slots(self) -> int:
        """Return how many slots are used at all."""
        return min(self.window, self.count)

    @property
    def used(self) -> int:
        """Return how many bytes at the start of the arena are moved."""
        return self.slots * self.stride

    @property
    def landing(self) -> list[int]:
        """Return, for every local page of a request, the remote page that it goes to."""
        return [page * PAGE_STEP % self.pages for page in range(self.pages)]

    @property
    def gathered(self) -> list[int]:
        """Return, for every remote page of a request in turn, the local page that it comes from."""
        return sorted(range(self.pages), key=self.landing.__getitem__)


@dataclass(frozen=True)
class Outcome:
    """What a worker measured: wall and processor seconds, and the nanoseconds of each round trip."""

    seconds: float
    cpu: float
    round_trips: list[int] = field(default_factory=list)

    def quantiles(self) -> dict[str, float]:
        if not self.round_trips:
            return {}
        ordered = sorted(self.round_trips)
        return {
            "p50_us": ordered[len(ordered) // 2] / 1000,
            "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1000,
            "max_us": ordered[-1] / 1000,
        }


class Clock:
    """Measure the wall and the processor time of a `with` block."""

    def __enter__(self) -> Clock:
        self._cpu = time.process_time()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu = time.process_time() - self._cpu

    def outcome(self, round_trips: list[int] | None = None) -> Outcome:
        return Outcome(self.seconds, self.cpu, round_trips or [])


class Arena:
    """Own the memory that is transferred from or into: page-aligned, and huge pages where the kernel gives them."""

    def __init__(self, size: int) -> None:
        # numpy asks for huge pages for what is this large, as torch's own tensors would have them
        raw = np.zeros(size + 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        self.bytes: npt.NDArray[np.uint8] = raw[start : start + size]
        self.view = self.bytes.data
        self.size = size
        self.address: int = self.bytes.ctypes.data

    def fill(self, used: int, seed: int) -> None:
        for start, chunk in pattern(used, seed):
            self.bytes[start : start + len(chunk)] = chunk

    def zero(self, used: int) -> None:
        self.bytes[:used] = 0

    def holds(self, task: Task) -> bool:
        """Tell whether the bytes that a task moves here have arrived, each in its place."""
        if task.op == "pages":
            return self._holds_pages(task)
        return all(
            np.array_equal(self.bytes[start : start + len(chunk)], chunk)
            for start, chunk in pattern(task.used, task.seed)
        )

    def _holds_pages(self, task: Task) -> bool:
        sent = np.empty(task.used, dtype=np.uint8)
        for start, chunk in pattern(task.used, task.seed):
            sent[start : start + len(chunk)] = chunk
        shape = (task.slots, task.pages, task.size)
        arrived = self.bytes[: task.used].reshape(shape)
        return np.array_equal(arrived[:, task.landing], sent.reshape(shape))


def pattern(used: int, seed: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Make the first `used` bytes of the pattern of a seed: (offset, bytes) in pieces of 8 MiB."""
    words = -(-used // 8)
    for start in range(0, words, CHUNK_WORDS):
        numbers = np.arange(start, min(start + CHUNK_WORDS, words), dtype=np.uint64)
        numbers *= np.uint64(WORD_FACTOR)
        numbers += np.uint64(seed * SEED_FACTOR & MASK)
        yield start * 8, numbers.astype("<u8").view(np.uint8)[: used - start * 8]


class Gather:
    """Copy the pages of one request into one piece, in the order in which they go to the other side.

    For libraries of messages: one copy of a page costs a tenth of what one more message or buffer costs them.
    """

    def __init__(self, arena: Arena, task: Task) -> None:
        shape = (task.slots, task.pages, task.size)
        self._pages = arena.bytes[: task.used].reshape(shape)
        self._order = np.array(task.gathered)
        self._pieces = np.empty(shape, dtype=np.uint8)
        self.pieces: list[npt.NDArray[np.uint8]] = [piece.reshape(-1) for piece in self._pieces]

    def __call__(self, slot: int) -> None:
        # "clip" lets numpy write where it is told; otherwise it fills a buffer of its own first
        np.take(self._pages[slot], self._order, axis=0, out=self._pieces[slot], mode="clip")


class Worker(abc.ABC):
    """One side of a pair in one library. Made after the process is pinned; its memory is the arena."""

    library: str
    idle_period: float | None = None  # seconds between calls of `idle` while the parent is waited for

    def __init__(self, options: Options, arena: Arena) -> None:
        self.options = options
        self.arena = arena

    @abc.abstractmethod
    def address(self) -> str:
        """Return what the other side needs to reach this one, as one line of text."""

    @abc.abstractmethod
    def connect(self, peer: str) -> None:
        """Connect to the other side, and wait until data can flow both ways."""

    @abc.abstractmethod
    def run(self, task: Any) -> Outcome:
        """Do a task, and time it: the initiator until all has arrived, the target until it was told so."""

    def refusal(self, task: Any) -> str:
        """Return why the library cannot do a task, or nothing. Both sides must answer alike."""
        return ""

    def parse(self, text: str) -> Any:
        """Return the task of a `run` line."""
        return Task.parse(text)

    def fill(self, task: Any) -> None:
        """Put the bytes of a task into the memory, or clear what it will write to."""
        if task.used > self.arena.size:
            raise ValueError(f"the task uses {task.used} bytes, the arena has {self.arena.size}")
        if self._receives(task):
            self.arena.zero(task.used)
        else:
            self.arena.fill(task.used, task.seed)

    def verified(self, task: Any) -> bool:
        """Tell whether what a task moves to this side has arrived, each byte in its place."""
        return not self._receives(task) or self.arena.holds(task)

    def _receives(self, task: Any) -> bool:
        return self.options.initiator == (task.op == "read")

    def prepare(self, task: Any) -> None:  # noqa: B027
        """Do what need not be repeated for every transfer of a task."""

    def idle(self) -> None:  # noqa: B027
        """Let the library make progress while the parent is waited for."""

    def close(self) -> None:  # noqa: B027
        """Let go of the library's resources."""


class Unavailable(Exception):
    """Raised while a worker is made: the library is there, but cannot be used on this machine."""


class Refusing(Worker):
    """Stand in for a worker that is unavailable: connect to nothing, and refuse every task."""

    def __init__(self, options: Options, arena: Arena, why: str) -> None:
        super().__init__(options, arena)
        self.library = self._why = why

    def address(self) -> str:
        return "-"

    def connect(self, peer: str) -> None:
        pass

    def refusal(self, task: Task) -> str:
        return self._why

    def run(self, task: Task) -> Outcome:
        raise NotImplementedError


class Parent:
    """Speak the protocol: lines from the standard input, objects to what was the standard output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip())
        self._lines.put("quit")
        if not self._ended.wait(GRACE_SECONDS):
            os._exit(1)  # in the middle of a run, whose native loop hears of nothing else

    def line(self, worker: Worker) -> str:
        while True:
            try:
                return self._lines.get(timeout=worker.idle_period)
            except queue.Empty:
                worker.idle()

    def say(self, **items: Any) -> None:
        self._out.write(json.dumps(items) + "\n")

    def end(self, status: int) -> None:
        self._ended.set()
        sys.stderr.flush()
        # The libraries' destructors at the interpreter's end, in an order that no one chose, crash now and then
        os._exit(status)


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="One side of a pair; the parent speaks to it by lines.")
    parser.add_argument("--role", choices=("target", "initiator"), required=True)
    parser.add_argument("--provider", choices=("tcp", "shm"), required=True)
    parser.add_argument("--mode", choices=("spin", "event"), required=True)
    parser.add_argument("--arena", type=int, required=True, help="bytes of memory to transfer from or into")
    parser.add_argument("--cpu", type=int, required=True, help="the processor to stay on; -1: any")
    parser.add_argument("--variant", default="", help="which of the library's ways, where it has several")
    return Options(**vars(parser.parse_args(arguments)))


def do_task(parent: Parent, worker: Worker, task: Any) -> None:
    if why := worker.refusal(task):
        parent.say(unsupported=why)
        return
    worker.fill(task)
    worker.prepare(task)
    parent.say(prepared=True)
    word = parent.line(worker)
    if word != "go":
        raise ValueError(f"'go' was expected, not {word!r}")
    outcome = worker.run(task)
    parent.say(seconds=outcome.seconds, cpu=outcome.cpu, verified=worker.verified(task), **outcome.quantiles())


@contextmanager
def reporting(parent: Parent) -> Iterator[None]:
    """Turn an error into one line and exit status 1."""
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        parent.say(error=f"{type(error).__name__}: {error}")
        parent.end(1)


def serve(make: Callable[[Options, Arena], Worker]) -> None:
    """Be a worker until the parent says that it is enough."""
    options = parse_options()
    # A worker is stopped between its runs, and must not stay so after the program that started it was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if options.cpu >= 0:
        os.sched_setaffinity(0, {options.cpu})
    parent = Parent()
    with reporting(parent):
        arena = Arena(options.arena)
        try:
            worker = make(options, arena)
        except Unavailable as error:
            worker = Refusing(options, arena, str(error))
        # As services do: a collection that looks through all that was imported holds a process up for 15 to 20 ms.
        gc.collect()
        gc.freeze()
        parent.say(address=worker.address(), library=worker.library)
        while (line := parent.line(worker)) != "quit":
            word, _, rest = line.partition(" ")
            if word == "peer":
                worker.connect(rest)
                parent.say(ready=True)
            elif word == "run":
                do_task(parent, worker, worker.parse(rest))
            else:
                raise ValueError(f"not a line of the protocol: {line!r}")
        worker.close()
    parent.end(0)
