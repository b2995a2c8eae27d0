"""Measure ucxx, UCX's Python binding, in its two ways: the core API and the one for asyncio.

Neither has one-sided operations, so a transfer is a tagged message, received where it belongs and acknowledged.
What was chosen, each as the fastest of what was tried:
* `core` (`ucxx._lib.libucxx`, what ucxx's own benchmark calls ucxx-core): all receives are posted a window ahead,
  every turn calls `progress` once and looks at the oldest request alone; one acknowledgement tells how many messages
  have come. The mode `event` waits in `progress_worker_event`, on UCX's descriptor.
* `asyncio` (`Endpoint.send`, `recv`): one coroutine a slot. The mode `spin` is its progress mode "polling". The mode
  `event` is "thread" with Python futures, its only one in which an await does not spin on `asyncio.sleep(0)`.
* Pages are copied into one piece and sent as one message: a message a page costs several times as much.
* UCX: transports by UCX_TLS, `tcp` on the loopback interface or shared memory with cross-memory attach.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

import numpy as np
from common import Arena, Clock, Gather, Options, Outcome, Task, Worker, serve

TRANSPORTS = {"tcp": "tcp,self", "shm": "posix,sysv,cma,self"}
DATA, ACKNOWLEDGEMENT = 1, 2
SLOT_TAGS = 16  # the asyncio way has two tags a slot, from here on
IN_FLIGHT = 64  # acknowledgements whose memory may still be in use


def set_up(options: Options) -> None:
    """Choose UCX's transports, before it is loaded."""
    os.environ.setdefault("UCX_TLS", TRANSPORTS[options.provider])
    if options.provider == "tcp":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "256k")
        os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256k")


class Ucxx(Worker):
    """What both ways have in common: messages, and the memory that they are sent from and received in."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        set_up(options)
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self.api, self.array = libucxx, Array
        ucx = ".".join(map(str, libucxx.get_ucx_version()))
        self.library = f"ucxx {version('ucxx-cu12')} (UCX {ucx}), {options.variant or 'core'}"
        self.buffers: list[Any] = []
        self.gather: Gather | None = None

    def _told(self, worker: Any) -> str:
        return base64.b64encode(bytes(worker.address)).decode()

    def _peer_address(self, peer: str) -> Any:
        return self.api.UCXAddress.create_from_buffer(base64.b64decode(peer))

    def refusal(self, task: Task) -> str:
        return "ucxx's Python API has no one-sided operations" if task.op == "read" else ""

    def prepare(self, task: Task) -> None:
        self.gather = Gather(self.arena, task) if task.op == "pages" and self.options.initiator else None
        if self.gather:
            self.buffers = [self.array(piece) for piece in self.gather.pieces]
        else:
            starts = range(0, task.used, task.stride)
            self.buffers = [self.array(self.arena.bytes[start : start + task.stride]) for start in starts]


class Core(Ucxx):
    """Requests that are polled, on one worker and one endpoint."""

    idle_period = 0.005

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        flags = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        self.worker = self.api.UCXWorker(self.api.UCXContext(feature_flags=flags))
        self.worker.init_blocking_progress_mode()
        self.progress = self.worker.progress if options.spins else self.worker.progress_worker_event
        self.data, self.acknowledgement = self.api.UCXXTag(DATA), self.api.UCXXTag(ACKNOWLEDGEMENT)
        self.endpoint: Any = None

    def address(self) -> str:
        return self._told(self.worker)

    def connect(self, peer: str) -> None:
        make = self.api.UCXEndpoint.create_from_worker_address
        self.endpoint = make(self.worker, self._peer_address(peer), endpoint_error_handling=False)
        word = np.ones(1, dtype=np.uint64)
        self._wait(self._post(np.zeros(1, dtype=np.uint64)), self.endpoint.tag_send(self.array(word), self.data))

    def idle(self) -> None:
        self.worker.progress()

    def _post(self, memory: Any) -> Any:
        return self.worker.tag_recv(self.array(memory), self.data)

    def _wait(self, *requests: Any) -> None:
        for request in requests:
            while not request.completed:
                self.progress()
            request.check_error()

    def run(self, task: Task) -> Outcome:
        if task.op == "latency":
            return self._ping(task) if self.options.initiator else self._pong(task)
        with Clock() as clock:
            if self.options.initiator:
                self._send(task)
            else:
                self._receive(task)
        return clock.outcome()

    def _send(self, task: Task) -> None:
        count, window, buffers, gather, data = task.count, task.window, self.buffers, self.gather, self.data
        send, progress = self.endpoint.tag_send, self.progress
        word = np.zeros(1, dtype=np.uint64)
        target = self.array(word)
        request = self.worker.tag_recv(target, self.acknowledgement)
        requests: list[Any] = [None] * window
        sent = 0
        while True:
            while request.completed:
                arrived = int(word[0])
                if arrived == count:
                    self._wait(*filter(None, requests))
                    return
                request = self.worker.tag_recv(target, self.acknowledgement)
            for number in range(sent, min(count, int(word[0]) + window)):
                slot = number % window
                if gather:
                    gather(slot)
                requests[slot] = send(buffers[slot], data)
                sent = number + 1
            progress()

    def _receive(self, task: Task) -> None:
        count, window, buffers, data = task.count, task.window, self.buffers, self.data
        receive, progress = self.worker.tag_recv, self.progress
        requests = [receive(buffers[slot], data) for slot in range(task.slots)]
        words = np.zeros(IN_FLIGHT, dtype=np.uint64)
        messages = [self.array(words[i : i + 1]) for i in range(IN_FLIGHT)]
        acknowledgements: list[Any] = [None] * IN_FLIGHT
        arrived = told = turn = 0
        while arrived < count:
            progress()
            while arrived < count and requests[arrived % window].completed:
                if arrived + window < count:
                    requests[arrived % window] = receive(buffers[arrived % window], data)
                arrived += 1
            if arrived > told:
                turn = (turn + 1) % IN_FLIGHT
                self._wait(*filter(None, acknowledgements[turn : turn + 1]))
                words[turn] = told = arrived
                acknowledgements[turn] = self.endpoint.tag_send(messages[turn], self.acknowledgement)
        self._wait(*filter(None, acknowledgements))

    def _ping(self, task: Task) -> Outcome:
        send, receive, progress = self.endpoint.tag_send, self.worker.tag_recv, self.progress
        message, answer = self.buffers[0], self.array(self.arena.bytes[8:16])
        times, now = [], time.perf_counter_ns
        with Clock() as clock:
            for _ in range(task.count):
                start = now()
                request = receive(answer, self.data)
                send(message, self.data)
                while not request.completed:
                    progress()
                times.append(now() - start)
        return clock.outcome(times)

    def _pong(self, task: Task) -> Outcome:
        send, receive, progress = self.endpoint.tag_send, self.worker.tag_recv, self.progress
        message = self.buffers[0]
        request = receive(message, self.data)
        with Clock() as clock:
            for left in range(task.count, 0, -1):
                while not request.completed:
                    progress()
                sent = send(message, self.data)
                if left > 1:
                    request = receive(message, self.data)
            self._wait(sent)
        return clock.outcome()

    def close(self) -> None:
        if self.endpoint:
            self.endpoint.close_blocking()


class Asyncio(Ucxx):
    """Awaited sends and receives, a coroutine a slot."""

    idle_period = 0.005

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        import ucxx

        self.ucxx = ucxx
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.endpoint: Any = None
        self._await(self._open())

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _open(self) -> None:
        if self.options.spins:
            self.ucxx.init(progress_mode="polling")
        else:
            self.ucxx.init(progress_mode="thread", enable_python_future=True)

    def address(self) -> str:
        return base64.b64encode(bytes(self.ucxx.get_worker_address())).decode()

    def connect(self, peer: str) -> None:
        self._await(self._connect(peer))

    async def _connect(self, peer: str) -> None:
        address = self._peer_address(peer)
        self.endpoint = await self.ucxx.create_endpoint_from_worker_address(address, endpoint_error_handling=False)
        word = np.ones(1, dtype=np.uint64)
        tag = self.api.UCXXTag(DATA)
        await asyncio.gather(
            self.endpoint.send(self.array(word), tag, force_tag=True),
            self.endpoint.recv(self.array(np.zeros_like(word)), tag, force_tag=True),
        )

    def idle(self) -> None:
        self._await(asyncio.sleep(0))

    def run(self, task: Task) -> Outcome:
        outcome: Outcome = self._await(self._run(task))
        return outcome

    async def _run(self, task: Task) -> Outcome:
        times: list[int] = []
        with Clock() as clock:
            if task.op == "latency":
                await (self._ping(task, times) if self.options.initiator else self._slot(task, 0))
            else:
                await asyncio.gather(*(self._slot(task, slot) for slot in range(task.slots)))
        return clock.outcome(times)

    async def _slot(self, task: Task, slot: int) -> None:
        """Do what goes through one slot: send and be acknowledged, or receive and acknowledge."""
        endpoint, buffer, gather = self.endpoint, self.buffers[slot], self.gather
        there, back = (self.api.UCXXTag(SLOT_TAGS + 2 * slot + way) for way in range(2))
        word = self.array(np.zeros(1, dtype=np.uint64))
        for _ in range(slot, task.count, task.window):
            if gather:
                gather(slot)
            if self.options.initiator:
                await endpoint.send(buffer, there, force_tag=True)
                await endpoint.recv(word, back, force_tag=True)
            else:
                await endpoint.recv(buffer, there, force_tag=True)
                await endpoint.send(word, back, force_tag=True)

    async def _ping(self, task: Task, times: list[int]) -> None:
        endpoint, message, now = self.endpoint, self.buffers[0], time.perf_counter_ns
        there, back = (self.api.UCXXTag(SLOT_TAGS + way) for way in range(2))
        answer = self.array(self.arena.bytes[8:16])
        for _ in range(task.count):
            start = now()
            await endpoint.send(message, there, force_tag=True)
            await endpoint.recv(answer, back, force_tag=True)
            times.append(now() - start)

    def close(self) -> None:
        if self.endpoint:
            self._await(self.endpoint.close())
        self.ucxx.stop_notifier_thread()


def make(options: Options, arena: Arena) -> Worker:
    return (Asyncio if options.variant == "asyncio" else Core)(options, arena)


if __name__ == "__main__":
    serve(make)
