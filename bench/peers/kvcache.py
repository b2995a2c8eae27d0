"""The task of a KV-cache service, the same for every library: who asks for which pages, and what has to arrive where.

The decode side (the pair's initiator) asks for prompts: a message with the number of the request, the pages that it has
for it and the prompt's tokens. The prefill side (the target) sends the prompt's cache layer by layer, each layer from
its own pages of that request into the pages that were named. A layer counts when all of it is in those pages, and a
request is over with its last layer; `window` of them are under way at a time.

A side's memory is [layers, pool, page], with pool = window * pages. What is scattered, and how:
* The decode side takes pages off the end of a list that was shuffled by the seed, and puts them back there.
* The prefill side has request n's pages in the (n modulo window)-th part of a permutation of its own.

Word i of page j of layer l is a random word i of the seed plus (l * pool + j) * WORD_FACTOR, so that no two pages are
alike. With check=1 every layer is compared in the moment in which it counts, and its pages are cleared before they are
asked for: such a run says nothing about speed. After every run all pages are compared with what came to them last.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from common import MASK, WORD_FACTOR, Arena, Clock, Options, Outcome, Worker

PAGE_TOKENS = 16
ASK = struct.Struct("<II")
Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ServiceTask:
    """One `run` line: `count` prompts of `pages` pages of `size` bytes in each of `layers` layers."""

    op: str
    size: int
    pages: int
    layers: int
    window: int
    count: int
    seed: int
    check: int = 0
    layer_us: int = 0
    pause_us: int = 0
    in_thread: int = 0
    signal: int = 0

    @classmethod
    def parse(cls, text: str) -> ServiceTask:
        given = dict(item.split("=", 1) for item in text.split())
        task = cls(given.pop("op"), **{name: int(value) for name, value in given.items()})
        if min(task.size, task.pages, task.layers, task.window, task.count) < 1 or task.size % 32:
            raise ValueError(f"not a task: {text}")
        return task

    @property
    def pool(self) -> int:
        """Return how many pages a layer has, on either side."""
        return self.window * self.pages

    @property
    def used(self) -> int:
        return self.layers * self.pool * self.size

    @property
    def layer_bytes(self) -> int:
        """Return how many bytes of one request are one layer."""
        return self.pages * self.size

    def ours(self, number: int) -> npt.NDArray[np.int64]:
        """Return the prefill side's pages of a request."""
        start = number % self.window * self.pages
        return self.permutation(2)[start : start + self.pages]

    def permutation(self, which: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self.seed, which)).permutation(self.pool)


@dataclass
class Request:
    """A prompt that was asked for: its pages at the decode side, and how many layers of it are there."""

    number: int
    pages: Numbers
    started: int
    layers: int = 0


class Cache:
    """The memory of one side for one task, and at the decode side the requests."""

    def __init__(self, arena: Arena, task: ServiceTask) -> None:
        if task.used > arena.size:
            raise ValueError(f"the task uses {task.used} bytes, the arena has {arena.size}")
        self.task = task
        self.bytes = arena.bytes[: task.used].reshape(task.layers, task.pool, task.size)
        self._words = self.bytes.view(np.uint64)
        self._tile = np.random.default_rng(task.seed).integers(0, MASK, task.size // 8, np.uint64)
        self._free: list[int] = task.permutation(1).tolist()
        self._origin = np.full(task.pool, -1, np.int64)
        self._ours = [task.ours(slot) for slot in range(task.window)]
        self._begun = 0
        self.left = task.count
        self.times: list[int] = []

    # The prefill side.

    def fill(self) -> None:
        for layer in range(self.task.layers):
            np.add(self._tile, self._steps(layer, np.arange(self.task.pool)), out=self._words[layer])

    def ours(self, number: int) -> npt.NDArray[np.int64]:
        """Return the prefill side's pages of a request."""
        return self._ours[number % self.task.window]

    # The decode side.

    @property
    def free(self) -> list[int]:
        """Return the free pages, for who keeps them elsewhere."""
        return self._free

    @property
    def more(self) -> bool:
        """Return whether there are requests that were not begun."""
        return self._begun < self.task.count

    def clear(self) -> None:
        self.bytes[:] = 0

    def number(self) -> int:
        """Return the number of the next request."""
        self._begun += 1
        return self._begun - 1

    def begin(self) -> Request:
        """Begin the next request: its clock runs."""
        started = time.perf_counter_ns()
        taken = [self._free.pop() for _ in range(self.task.pages)]
        return self.begin_in(taken, self.number(), started)

    def begin_in(self, pages: Any, number: int, started: int) -> Request:
        """Begin a request in pages that somebody else has chosen."""
        request = Request(number, np.array(pages, np.uint32), started)
        if self.task.check:
            self.bytes[:, request.pages] = 0
        return request

    def arrived(self, request: Request) -> bool:
        """Take note that the next layer of a request is here, and tell whether that was the last one."""
        if self.task.check and not self._holds(request.layers, request.pages, self.ours(request.number)):
            raise ValueError(f"layer {request.layers} of request {request.number} was counted before it was there")
        request.layers += 1
        if request.layers < self.task.layers:
            return False
        self.times.append(time.perf_counter_ns() - request.started)
        self.left -= 1
        self._origin[request.pages] = self.ours(request.number)
        return True

    def end(self, request: Request) -> None:
        """Put the pages of a request back."""
        self._free += request.pages.tolist()

    def verified(self) -> bool:
        """Tell whether every page has the bytes of the request that it was used for last."""
        pages = np.flatnonzero(self._origin >= 0)
        origin = self._origin[pages]
        return self.left == 0 and all(self._holds(layer, pages, origin) for layer in range(self.task.layers))

    def _steps(self, layer: int, pages: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        return (pages.astype(np.uint64) + np.uint64(layer * self.task.pool))[:, np.newaxis] * np.uint64(WORD_FACTOR)

    def _holds(self, layer: int, pages: npt.NDArray[Any], origin: npt.NDArray[np.int64]) -> bool:
        steps, words = self._steps(layer, origin), self._words[layer]
        return all(np.array_equal(words[page], self._tile + step) for page, step in zip(pages, steps, strict=True))


class Service(Worker):
    """A worker of this task in one library. Comes before the library's own `Worker` in the bases."""

    idle_period = 0.05  # as many as twenty of them wait while one pair is measured

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.cache: Cache

    @property
    def decodes(self) -> bool:
        return self.options.initiator

    def parse(self, text: str) -> ServiceTask:
        return ServiceTask.parse(text)

    def refusal(self, task: ServiceTask) -> str:
        return "" if task.op == "service" else f"{task.op} is measured of aiote alone"

    def fill(self, task: ServiceTask) -> None:
        self.cache = Cache(self.arena, task)
        if self.decodes:
            self.cache.clear()
        else:
            self.cache.fill()

    def verified(self, task: ServiceTask) -> bool:
        return not self.decodes or self.cache.verified()

    def run(self, task: ServiceTask) -> Outcome:
        with Clock() as clock:
            self.work(task)
        return clock.outcome(self.cache.times)

    def work(self, task: ServiceTask) -> None:
        """Do this side's part, which is timed."""
        if self.decodes:
            self.decode(task)
        else:
            self.prefill(task)

    def decode(self, task: ServiceTask) -> Any:
        """Ask for all prompts, and take them."""
        raise NotImplementedError

    def prefill(self, task: ServiceTask) -> Any:
        """Send what is asked for."""
        raise NotImplementedError

    def tokens(self, task: ServiceTask) -> Numbers:
        """Return the tokens of a prompt, which go with the request for it."""
        return np.arange(task.pages * PAGE_TOKENS, dtype=np.uint32)


def ask(request: Request, tokens: Numbers) -> bytes:
    """Return the message that asks for a prompt."""
    return ASK.pack(request.number, len(request.pages)) + request.pages.tobytes() + tokens.tobytes()


def asked(message: Any) -> tuple[int, Numbers]:
    """Return the number of a request, and the pages that it names."""
    number, pages = ASK.unpack_from(message)
    return number, np.frombuffer(message, np.uint32, pages, ASK.size)


def ask_bytes(task: ServiceTask) -> int:
    """Return the length of such a message."""
    return ASK.size + task.pages * 4 * (1 + PAGE_TOKENS)


def pack(cache: Cache, layer: int, number: int, out: npt.NDArray[np.uint8]) -> None:
    """Copy one layer of a request into one piece, for libraries of messages: cheaper than a message a page."""
    # "clip" lets numpy write where it is told; otherwise it fills a buffer of its own first
    np.take(cache.bytes[layer], cache.ours(number), axis=0, out=out, mode="clip")
