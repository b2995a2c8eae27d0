"""The KV-cache service through `aiote.kvcache`, as a program uses it: a `Consumer` and a `Producer`, one engine a side.

The decode side receives a request and sends its number and tokens to the prefill side by a call, as a proxy would.

The variants are the event loops, with engines that spin while something is outstanding, as NIXL and ucxx poll, over the
rails that need no library (`local` where the peers share memory, `socket` where they use TCP); `libfabric`, the same on
uvloop over libfabric's `shm` and `tcp`; and `default`: asyncio, and engines as they are without a configuration, which
sleep after 50 us. Besides the task of all others there are some that only a prefiller which computes can have:

* `ttft`: each layer takes `layer_us`. A GPU does not wait for its host, so layer l is there at l + 1 times that, while
  the event loop sleeps; or, with `in_thread`, a thread computes with numpy, bumps a word after each layer and takes the
  processor from the event loop. The times are those from asking to the arrival of the tail.
* `alone`: the same computation, by the prefill side alone; its times are of the target.
* `cancel`: requests are cancelled at random moments; the times are those from the cancellation to the end of the
  block, when the pages are anybody's. Requests that were too fast are not counted, and repeated.
* `lost`: the same, of one request whose prefiller is sent `signal` just before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
from common import Arena, Options, serve

import aiote
from aiote import service
from aiote.kvcache import Cache, Consumer, Offer, PageRow, Producer, Reception
from kvcache import PAGE_TOKENS, Numbers, Service, ServiceTask

TAIL_BYTES = 16384
LAST = 1 << 32
"""The request that ends a task whose number of requests the prefill side does not know."""
CRUNCH = 64
SPIN_US = 1_000_000
RAILS = {"shm": "local", "tcp": "socket"}
"""Our own rails for what the peers' transports are called."""


class OpenContext:
    """An async context that is open, in a task of its own: some are to be entered and left in one task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: AbstractAsyncContextManager[Any]) -> None:
        self._loop = loop
        self._over = asyncio.Event()
        self._opened: asyncio.Future[Any] = loop.create_future()
        self._task = loop.create_task(self._hold(context))
        loop.run_until_complete(asyncio.wait([self._opened, self._task], return_when=asyncio.FIRST_COMPLETED))
        if not self._opened.done():
            self._task.result()
        self.value = self._opened.result()

    async def _hold(self, context: AbstractAsyncContextManager[Any]) -> None:
        async with context as value:
            self._opened.set_result(value)
            await self._over.wait()

    def close(self) -> None:
        self._over.set()
        self._loop.run_until_complete(self._task)


class Prompts(service.Service):
    """What the decode side tells the prefill side: numbers of requests, and their tokens."""

    name = "bench.Prompts"

    def __init__(self) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()

    @service.method
    async def compute(self, number: int, tokens: Numbers) -> None:
        """Have a prompt computed."""
        self.asked.put_nowait(number)


class KvAiote(Service):
    """One engine; a consumer or a producer for each shape of a cache."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.loop = self._make_loop()
        asyncio.set_event_loop(self.loop)
        provider = options.provider if options.variant == "libfabric" else RAILS[options.provider]
        config = None if options.variant == "default" else aiote.EngineConfig(spin_us=SPIN_US)
        self._held = OpenContext(self.loop, aiote.open_engine(provider, config=config))
        self.engine: aiote.Engine = self._held.value
        rail = self.engine.rails[0]
        self.library = f"aiote {aiote.__version__} ({rail.library}), {options.variant or 'asyncio'}"
        self.peer: aiote.Address
        self.peer_process = 0
        self._side: OpenContext | None = None
        self.side: Any = None
        self.prompts = Prompts()
        self.client: Any = None
        self._numbers = itertools.count(1)
        self._tokens = np.empty(0, np.uint32)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        if self.options.variant in ("uvloop", "libfabric"):
            import uvloop

            return uvloop.new_event_loop()
        return asyncio.new_event_loop()

    def address(self) -> str:
        return f"{os.getpid()} {bytes(self.engine.address).hex()}"

    def connect(self, peer: str) -> None:
        process, _, address = peer.partition(" ")
        self.peer_process, self.peer = int(process), aiote.Address.from_bytes(bytes.fromhex(address))
        self._await(self._meet())

    async def _meet(self) -> None:
        peer = await self.engine.connect(self.peer)
        if self.decodes:
            self.client = service.client(self.engine, peer, Prompts)

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def idle(self) -> None:
        self._await(asyncio.sleep(0))

    def refusal(self, task: ServiceTask) -> str:
        return "" if task.op in RUNS else f"{task.op} is nothing to measure"

    def prepare(self, task: ServiceTask) -> None:
        """Open a consumer or a producer on the task's memory."""
        self._let_go()
        cache = Cache("decode" if self.decodes else "prefill")
        # one head, and elements of a byte: a page is its keys and its values
        pages = self.cache.bytes.reshape(task.layers, task.pool, 2, 1, PAGE_TOKENS, task.size // 2 // PAGE_TOKENS)
        cache.add(pages, "layer page field head token item", fields=["k", "v"])
        if task.op != "service":
            cache.add(np.zeros((task.pool, TAIL_BYTES), np.uint8), "page item", layer=task.layers, group=1)
        self._side = OpenContext(self.loop, self._opened(cache, task))
        self.side = self._side.value

    @contextlib.asynccontextmanager
    async def _opened(self, cache: Cache, task: ServiceTask) -> AsyncIterator[Any]:
        if self.decodes:
            async with Consumer(self.engine, cache) as consumer:
                yield consumer
            return
        # what is cancelled in the moment of asking is offered to nobody
        limit = 30.0 if task.op in ("service", "ttft") else 1.0
        async with (
            service.serve(self.engine, self.prompts),
            Producer(self.engine, cache, match_timeout=limit) as producer,
        ):
            yield producer

    def _let_go(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None

    def work(self, task: ServiceTask) -> None:
        self._await(RUNS[task.op][not self.decodes](self, task))

    def verified(self, task: ServiceTask) -> bool:
        return super().verified(task) if task.op in ("service", "ttft") else True

    # The service, and the time to the first token.

    @contextlib.asynccontextmanager
    async def _receive(self, task: ServiceTask, number: int, pages: Numbers) -> AsyncIterator[Reception]:
        """Have a request come: the prefill side hears of its pages, and then of its tokens."""
        rows = rows_of(task, pages)
        tokens = task.pages * PAGE_TOKENS
        async with self.side.receive([self.peer], str(number), tokens=tokens, rows=rows) as reception:
            await self.client.compute(number, self._tokens)
            yield reception

    async def decode(self, task: ServiceTask) -> None:
        self._tokens = self.tokens(task)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(task.window, task.count)):
                group.create_task(self._lane(task))

    async def _lane(self, task: ServiceTask) -> None:
        cache = self.cache
        while cache.more:
            request = cache.begin()
            async with self._receive(task, request.number, request.pages) as reception:
                for layer in range(task.layers):
                    await reception.arrived(layer + 1)
                    cache.arrived(request)
            cache.end(request)

    async def prefill(self, task: ServiceTask) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(task.count):
                group.create_task(self._serve(await self.prompts.asked.get(), task))

    async def _serve(self, number: int, task: ServiceTask) -> None:
        pages = self.cache.ours(number)
        rows = rows_of(task, pages)
        async with self.side.offer(str(number), tokens=task.pages * PAGE_TOKENS, rows=rows) as offer:
            await compute(task, offer)

    async def first_tokens(self, task: ServiceTask) -> None:
        """Ask for one prompt after another; its time is that until everything is here, the tail included."""
        cache = self.cache
        self._tokens = self.tokens(task)
        while cache.more:
            if task.pause_us:
                await asyncio.sleep(task.pause_us / 1e6)
            request = cache.begin()
            async with self._receive(task, request.number, request.pages) as reception:
                await reception.arrived()
                ended = time.perf_counter_ns()
                for _ in range(task.layers):
                    cache.arrived(request)
                cache.times[-1] = ended - request.started
            cache.end(request)

    async def compute_alone(self, task: ServiceTask) -> None:
        for _ in range(task.count):
            started = time.perf_counter_ns()
            await compute(task, None)
            self.cache.times.append(time.perf_counter_ns() - started)

    async def nothing(self, task: ServiceTask) -> None:
        pass

    # Cancelling.

    async def prefill_until_last(self, task: ServiceTask) -> None:
        async with asyncio.TaskGroup() as group:
            while (number := await self.prompts.asked.get()) != LAST:
                group.create_task(self._serve(number, task))

    async def cancel(self, task: ServiceTask) -> None:
        longest = await self._uncancelled(task)
        while len(self.cache.times) < task.count:
            took = await self._cancel_one(task, random.uniform(0, longest), lambda: None)
            if took is not None:
                self.cache.times.append(took)
        await self.client.compute(LAST, self._tokens[:1])

    async def lose(self, task: ServiceTask) -> None:
        longest = await self._uncancelled(task)
        took = await self._cancel_one(
            task, random.uniform(0.2, 0.8) * longest, lambda: os.kill(self.peer_process, task.signal)
        )
        self.cache.times.append(-1 if took is None else took)

    async def _uncancelled(self, task: ServiceTask) -> float:
        """Return how many seconds a request takes that nobody cancels; the second one, which finds all warm."""
        self._tokens = self.tokens(task)
        for _ in range(2):
            request = self.cache.begin_in(self.cache.free[: task.pages], next(self._numbers), time.perf_counter_ns())
            async with self._receive(task, request.number, request.pages) as reception:
                await reception.arrived()
        return (time.perf_counter_ns() - request.started) / 1e9

    async def _cancel_one(self, task: ServiceTask, moment: float, before: Callable[[], object]) -> int | None:
        """Cancel a request after so many seconds; return the time until its pages are free, None if it was over."""
        arrived, ended = False, 0
        pages = np.array(self.cache.free[: task.pages], np.uint32)

        async def request() -> None:
            nonlocal arrived, ended
            reception = None
            try:
                async with self._receive(task, next(self._numbers), pages) as reception:
                    await reception.arrived()
            finally:
                arrived = reception is not None and reception.complete
                ended = time.perf_counter_ns()

        asking = asyncio.create_task(request())
        await asyncio.sleep(moment)
        before()
        started = time.perf_counter_ns()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return None if arrived else ended - started

    def close(self) -> None:
        self._let_go()
        self._held.close()


def rows_of(task: ServiceTask, pages: Numbers) -> dict[int, PageRow]:
    """Return a request's pages; its tail is in a page of its own, where it has one."""
    rows = {0: PageRow(pages)}
    return rows if task.op == "service" else rows | {1: PageRow(pages[-1:])}


def crunch(task: ServiceTask, word: np.ndarray[Any, Any]) -> None:
    """Multiply matrices for the time of each layer, with the interpreter's lock released, and bump a word after it."""
    matrix = np.ones((CRUNCH, CRUNCH))
    for _ in range(task.layers):
        end = time.thread_time_ns() + task.layer_us * 1000
        while time.thread_time_ns() < end:
            matrix @ matrix
        word += 1
    word += 1  # the tail


@contextlib.contextmanager
def ticking(task: ServiceTask, done: Callable[[], object]) -> Iterator[None]:
    """Call from the event loop after the time of each layer.

    With a descriptor: timers of loops have milliseconds, and a thread would wait for a processor, of which engines that
    spin leave none.
    """
    loop, libc = asyncio.get_running_loop(), ctypes.CDLL(None, use_errno=True)
    seconds, micros = divmod(task.layer_us, 1_000_000)
    every = (ctypes.c_long * 4)(seconds, micros * 1000, seconds, micros * 1000)
    timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if timer < 0 or libc.timerfd_settime(timer, 0, every, None) < 0:
        raise OSError(ctypes.get_errno(), "timerfd")

    def tick() -> None:
        for _ in range(int.from_bytes(os.read(timer, 8), "little")):
            done()

    loop.add_reader(timer, tick)
    try:
        yield
    finally:
        loop.remove_reader(timer)
        os.close(timer)


async def compute(task: ServiceTask, offer: Offer | None) -> None:
    """Take the time of all layers, and say of an offer's that they are computed; the last is the tail."""
    if task.in_thread:
        word = np.zeros(1, np.uint64)
        computing = asyncio.create_task(asyncio.to_thread(crunch, task, word))
        if offer is not None:
            await offer.follow(word)
        await computing
        return
    done = asyncio.Semaphore(0)
    with ticking(task, done.release) if task.layer_us else contextlib.nullcontext():
        for layer in range(task.layers):
            if task.layer_us:
                await done.acquire()
            if offer is not None:
                offer.computed(layer)
    if offer is not None and task.op != "service":
        offer.computed(task.layers)


RUNS: dict[str, tuple[Callable[..., Coroutine[Any, Any, None]], Callable[..., Coroutine[Any, Any, None]]]] = {
    "service": (KvAiote.decode, KvAiote.prefill),
    "ttft": (KvAiote.first_tokens, KvAiote.prefill),
    "alone": (KvAiote.nothing, KvAiote.compute_alone),
    "cancel": (KvAiote.cancel, KvAiote.prefill_until_last),
    "lost": (KvAiote.lose, KvAiote.prefill_until_last),
}
"""What the decode side and the prefill side do, by the task."""


if __name__ == "__main__":
    serve(KvAiote)
