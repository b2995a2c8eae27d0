"""The KV-cache service over ucxx, in its two ways: the core API, polled, and the one for asyncio.

Neither has one-sided operations. What was chosen, by what the workers for single transfers have shown to be fast:
* A layer is copied into one piece and sent as one tagged message, and copied into its pages at the other side.
* Each slot has a tag, and a ring of buffers: layers are received ahead while those before are copied, and sent ahead.
* `core` polls for all slots in one loop; `asyncio` has a coroutine for each slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import Arena, Options, Worker, serve
from ucxx_peer import SLOT_TAGS, Asyncio, Core

from kvcache import Request, Service, ServiceTask, ask, ask_bytes, asked, pack

RING = 4


@dataclass
class Lane:
    """One slot: its requests follow one another, and its layers are in a ring of buffers."""

    asks: Any
    layers: Any
    pieces: np.ndarray[Any, Any]
    buffers: list[Any]
    message: np.ndarray[Any, Any]
    request: Request | None = None
    flying: deque[Any] = field(default_factory=deque)
    left: int = 0
    next: int = 0
    number: int = 0


def make_lanes(worker: Any, task: ServiceTask) -> list[Lane]:
    """Return a lane for each slot. `worker` is one of ucxx's."""
    lanes = []
    for slot in range(min(task.window, task.count)):
        pieces = np.empty((RING, task.pages, task.size), np.uint8)
        lanes.append(
            Lane(
                worker.api.UCXXTag(SLOT_TAGS + 2 * slot),
                worker.api.UCXXTag(SLOT_TAGS + 2 * slot + 1),
                pieces,
                [worker.array(piece.reshape(-1)) for piece in pieces],
                np.empty(ask_bytes(task), np.uint8),
                left=len(range(slot, task.count, task.window)),
            )
        )
    return lanes


def message_of(request: Request, tokens: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(ask(request, tokens)), np.uint8)


class KvCore(Service, Core):
    """Requests that are polled."""

    def prepare(self, task: ServiceTask) -> None:
        self.lanes = make_lanes(self, task)

    def work(self, task: ServiceTask) -> None:
        step = self._decode if self.decodes else self._prefill
        begin = self._ask if self.decodes else self._await_ask
        for lane in self.lanes:
            begin(task, lane)
        live = list(self.lanes)
        while live:
            self.progress()
            live = [lane for lane in live if step(task, lane)]

    # The decode side.

    def _ask(self, task: ServiceTask, lane: Lane) -> None:
        lane.request = self.cache.begin()
        lane.message = message_of(lane.request, self.tokens(task))
        lane.flying.clear()
        for turn in range(min(RING, task.layers)):
            lane.flying.append(self.worker.tag_recv(lane.buffers[turn], lane.layers))
        self.sent = self.endpoint.tag_send(self.array(lane.message), lane.asks)

    def _decode(self, task: ServiceTask, lane: Lane) -> bool:
        """Take what has come; False when the lane has no more requests."""
        request = lane.request
        assert request is not None
        while lane.flying[0].completed:
            lane.flying.popleft().check_error()
            layer = request.layers
            self.cache.bytes[layer][request.pages] = lane.pieces[layer % RING]
            if layer + RING < task.layers:
                lane.flying.append(self.worker.tag_recv(lane.buffers[layer % RING], lane.layers))
            if self.cache.arrived(request):
                self.cache.end(request)
                lane.left -= 1
                if lane.left:
                    self._ask(task, lane)
                return lane.left > 0
        return True

    # The prefill side.

    def _await_ask(self, task: ServiceTask, lane: Lane) -> None:
        lane.next = task.layers
        lane.flying.append(self.worker.tag_recv(self.array(lane.message), lane.asks))

    def _prefill(self, task: ServiceTask, lane: Lane) -> bool:
        """Send what there is room for; False when all of the lane's requests are answered."""
        if lane.next == task.layers:
            if not lane.flying[0].completed:
                return True
            lane.flying.popleft().check_error()
            lane.number, _ = asked(lane.message.data)
            lane.next = 0
        while lane.flying and lane.flying[0].completed:
            lane.flying.popleft().check_error()
        if lane.next < task.layers and len(lane.flying) < RING:
            turn = lane.next % RING
            pack(self.cache, lane.next, lane.number, lane.pieces[turn])
            lane.flying.append(self.endpoint.tag_send(lane.buffers[turn], lane.layers))
            lane.next += 1
        if lane.next < task.layers:
            return True
        # a lane's last layers have to leave before the next request may use their buffers
        self._wait(*lane.flying)
        lane.flying.clear()
        lane.left -= 1
        if lane.left:
            self._await_ask(task, lane)
        return lane.left > 0


class KvAsyncio(Service, Asyncio):
    """Awaited sends and receives, a coroutine a slot."""

    def prepare(self, task: ServiceTask) -> None:
        self.lanes = make_lanes(self, task)

    def work(self, task: ServiceTask) -> None:
        self._await(self._all_lanes(task))

    async def _all_lanes(self, task: ServiceTask) -> None:
        side = self._decode if self.decodes else self._prefill
        await asyncio.gather(*(side(task, lane) for lane in self.lanes))

    async def _decode(self, task: ServiceTask, lane: Lane) -> None:
        cache, tokens, endpoint, flying = self.cache, self.tokens(task), self.endpoint, lane.flying
        for _ in range(lane.left):
            request = cache.begin()
            for turn in range(min(RING, task.layers)):
                flying.append(self._start(endpoint.recv(lane.buffers[turn], lane.layers, force_tag=True)))
            await endpoint.send(self.array(message_of(request, tokens)), lane.asks, force_tag=True)
            for layer in range(task.layers):
                await flying.popleft()
                cache.bytes[layer][request.pages] = lane.pieces[layer % RING]
                if layer + RING < task.layers:
                    flying.append(self._start(endpoint.recv(lane.buffers[layer % RING], lane.layers, force_tag=True)))
                cache.arrived(request)
            cache.end(request)

    async def _prefill(self, task: ServiceTask, lane: Lane) -> None:
        endpoint, flying = self.endpoint, lane.flying
        for _ in range(lane.left):
            await endpoint.recv(self.array(lane.message), lane.asks, force_tag=True)
            number, _ = asked(lane.message.data)
            for layer in range(task.layers):
                if len(flying) == RING:
                    await flying.popleft()
                pack(self.cache, layer, number, lane.pieces[layer % RING])
                flying.append(self._start(endpoint.send(lane.buffers[layer % RING], lane.layers, force_tag=True)))
            while flying:
                await flying.popleft()

    def _start(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work)


def make(options: Options, arena: Arena) -> Worker:
    return (KvAsyncio if options.variant == "asyncio" else KvCore)(options, arena)


if __name__ == "__main__":
    serve(make)
