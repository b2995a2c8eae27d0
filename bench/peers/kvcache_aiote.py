"""The KV-cache service through `aiote.kvcache`, as a program uses it: a `Decoder` and a `Prefiller`, one engine a side.

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
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
from common import Arena, Options, serve
from kvcache import PAGE_TOKENS, Numbers, Service, ServiceTask

import aiote
from aiote.kvcache import CacheLayout, Chunk, Decoder, Prefiller
from aiote.kvcache import Job as Prompt

TAIL_BYTES = 16384
LAST = b"last"
"""The request that ends a task whose number of requests the prefill side does not know."""
CRUNCH = 64
SPIN_US = 1_000_000
RAILS = {"shm": "local", "tcp": "socket"}
"""Our own rails for what the peers' transports are called."""


class Held:
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


class KvAiote(Service):
    """One engine; a decoder or a prefiller for each shape of a cache."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.loop = self._make_loop()
        asyncio.set_event_loop(self.loop)
        provider = options.provider if options.variant == "libfabric" else RAILS[options.provider]
        config = None if options.variant == "default" else aiote.EngineConfig(spin_us=SPIN_US)
        self._held = Held(self.loop, aiote.open_engine(provider, config=config))
        self.engine: aiote.Engine = self._held.value
        rail = self.engine.rails[0]
        self.library = f"aiote {aiote.__version__} ({rail.library}), {options.variant or 'asyncio'}"
        self.peer: aiote.Address
        self.peer_process = 0
        self._side: Held | None = None
        self.side: Any = None
        self.tail: aiote.Region = self.engine.register(np.zeros(TAIL_BYTES, np.uint8))

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
        await self.engine.connect(self.peer)

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def idle(self) -> None:
        self._await(asyncio.sleep(0))

    def refusal(self, task: ServiceTask) -> str:
        return "" if task.op in RUNS else f"{task.op} is nothing to measure"

    def prepare(self, task: ServiceTask) -> None:
        """Open a decoder or a prefiller on the task's memory."""
        self._let_go()
        # one head, and elements of a byte: a page is its keys and its values
        layout = CacheLayout(task.layers, 1, task.size // 2 // PAGE_TOKENS, PAGE_TOKENS, "uint8")
        if not self.decodes:
            self._side = Held(self.loop, Prefiller(self.engine, layout, self.cache.bytes))
        else:
            tail = 0 if task.op == "service" else TAIL_BYTES
            decoder = Decoder(self.engine, layout, self.cache.bytes, slots=task.window + 1, tail_bytes=tail)
            self._side = Held(self.loop, decoder)
            # a decoder that has just begun gives pages in a row; this one is as one that has been at work for a while
            decoder._pool._free[:] = self.cache.free
        self.side = self._side.value

    def _let_go(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None

    def work(self, task: ServiceTask) -> None:
        self._await(RUNS[task.op][not self.decodes](self, task))

    def verified(self, task: ServiceTask) -> bool:
        return super().verified(task) if task.op in ("service", "ttft") else True

    # The service, and the time to the first token.

    async def decode(self, task: ServiceTask) -> None:
        tokens = self.tokens(task)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(task.window, task.count)):
                group.create_task(self._lane(tokens))

    async def _lane(self, tokens: Numbers) -> None:
        cache, decoder, prefillers = self.cache, self.side, [self.peer]
        while cache.more:
            number, started = cache.number(), time.perf_counter_ns()
            async with decoder.request(tokens, prefillers, request_id=number.to_bytes(4, "big")) as slot:
                request = cache.begin_in(slot.pages, number, started)
                async for _ in slot.layers():
                    cache.arrived(request)

    async def prefill(self, task: ServiceTask) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(task.count):
                group.create_task(self._serve(await self.side.next_job(), task))

    async def _serve(self, prompt: Prompt, task: ServiceTask) -> None:
        async with prompt:
            number = int.from_bytes(prompt.request_id, "big")
            chunk = prompt.chunk(0, len(prompt.tokens), self.cache.ours(number))
            await compute(task, chunk)
            await prompt.tail(self.tail)

    async def first_tokens(self, task: ServiceTask) -> None:
        """Ask for one prompt after another; its time is that until everything is here, the tail included."""
        tokens, cache = self.tokens(task), self.cache
        while cache.more:
            if task.pause_us:
                await asyncio.sleep(task.pause_us / 1e6)
            number, started = cache.number(), time.perf_counter_ns()
            async with self.side.request(tokens, [self.peer], request_id=number.to_bytes(4, "big")) as slot:
                request = cache.begin_in(slot.pages, number, started)
                await slot.arrived()
                ended = time.perf_counter_ns()
                for _ in range(task.layers):
                    cache.arrived(request)
                cache.times[-1] = ended - started

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
            while True:
                prompt = await self.side.next_job()
                if prompt.request_id == LAST:
                    prompt.refuse("it was the last one")
                    return
                group.create_task(self._serve(prompt, task))

    async def cancel(self, task: ServiceTask) -> None:
        longest = await self._uncancelled(task)
        while len(self.cache.times) < task.count:
            took = await self._cancel_one(task, random.uniform(0, longest), lambda: None)
            if took is not None:
                self.cache.times.append(took)
        with contextlib.suppress(aiote.AioteError):
            async with self.side.request([0], [self.peer], request_id=LAST) as slot:
                await slot.arrived()

    async def lose(self, task: ServiceTask) -> None:
        longest = await self._uncancelled(task)
        took = await self._cancel_one(
            task, random.uniform(0.2, 0.8) * longest, lambda: os.kill(self.peer_process, task.signal)
        )
        self.cache.times.append(-1 if took is None else took)

    async def _uncancelled(self, task: ServiceTask) -> float:
        """Return how many seconds a request takes that nobody cancels; the second one, which finds all warm."""
        for _ in range(2):
            started = time.perf_counter()
            async with self.side.request(self.tokens(task), [self.peer], request_id=bytes(4)) as slot:
                await slot.arrived()
        return time.perf_counter() - started

    async def _cancel_one(self, task: ServiceTask, moment: float, before: Callable[[], object]) -> int | None:
        """Cancel a request after so many seconds; return the time until its pages are free, None if it was over."""
        arrived, ended = False, 0

        async def request() -> None:
            nonlocal arrived, ended
            slot = None
            try:
                async with self.side.request(self.tokens(task), [self.peer], request_id=bytes(4)) as slot:
                    await slot.arrived()
            finally:
                arrived = slot is not None and slot.complete
                ended = time.perf_counter_ns()
                if self.side.free_pages != task.pool:
                    raise ValueError(f"{self.side.free_pages} pages are free after the block, of {task.pool}")

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


def crunch(task: ServiceTask, word: np.ndarray[Any, Any]) -> None:
    """Multiply matrices for the time of each layer, with the interpreter's lock released, and bump a word after it."""
    matrix = np.ones((CRUNCH, CRUNCH))
    for _ in range(task.layers):
        end = time.thread_time_ns() + task.layer_us * 1000
        while time.thread_time_ns() < end:
            matrix @ matrix
        word += 1


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


async def compute(task: ServiceTask, chunk: Chunk | None) -> None:
    """Take the time of all layers, and say of a chunk's that they are done."""
    if task.in_thread:
        word = np.zeros(1, np.uint64)
        computing = asyncio.create_task(asyncio.to_thread(crunch, task, word))
        if chunk is not None:
            await chunk.follow(word)
        await computing
        return
    done = asyncio.Semaphore(0)
    with ticking(task, done.release) if task.layer_us else contextlib.nullcontext():
        for layer in range(task.layers):
            if task.layer_us:
                await done.acquire()
            if chunk is not None:
                await chunk.done(layer)


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
