"""Measure pyzmq, with one DEALER socket a side.

ZeroMQ moves messages by a thread of its own, and has no one-sided operations: a transfer is a message, received into
the slot where it belongs (`recv_into`) and acknowledged. What was chosen, each as the fastest of what was tried:
* Blocking calls in both modes. With one processor a side, a caller that spins takes it from the very thread that it
  waits for; so the mode `spin` is the mode `event`.
* Large messages are sent without a copy (`copy=False`), smaller ones with: there the copy costs less than the notice
  that the memory is free again.
* One acknowledgement tells how many messages have come, for all that were there to be received.
* Pages are copied into one piece and sent as one message; as a message of many parts they cost several times as much.
* `tcp` is ZeroMQ over TCP on the loopback interface, `shm` its `ipc`, which is a Unix socket.
"""

from __future__ import annotations

import os
import time
from typing import Any

import zmq
from common import Arena, Clock, Gather, Options, Outcome, Task, Worker, serve

COPIED_BELOW = 1 << 18
SOCKET_BUFFER = 1 << 20


class Pyzmq(Worker):
    """One context with one thread for input and output, and one socket."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.library = f"pyzmq {zmq.pyzmq_version()} (ZeroMQ {zmq.zmq_version()})"
        self.context = zmq.Context(io_threads=1)
        self.socket = self.context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.socket.setsockopt(option, 0)
        for option in (zmq.SNDBUF, zmq.RCVBUF):
            self.socket.setsockopt(option, SOCKET_BUFFER)
        self.buffers: list[Any] = []
        self.gather: Gather | None = None

    def address(self) -> str:
        if self.options.initiator:
            return "-"
        # "@" makes it a name that is no file, so that nothing is left over if a worker is killed
        self.socket.bind("tcp://127.0.0.1:*" if self.options.provider == "tcp" else f"ipc://@aiote-bench-{os.getpid()}")
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, peer: str) -> None:
        if self.options.initiator:
            self.socket.connect(peer)
        self.socket.send(b"hello")
        self.socket.recv()

    def refusal(self, task: Task) -> str:
        return "ZeroMQ has no one-sided operations" if task.op == "read" else ""

    def prepare(self, task: Task) -> None:
        self.gather = Gather(self.arena, task) if task.op == "pages" and self.options.initiator else None
        if self.gather:
            self.buffers = [piece.data for piece in self.gather.pieces]
        else:
            self.buffers = [self.arena.view[start : start + task.stride] for start in range(0, task.used, task.stride)]

    def run(self, task: Task) -> Outcome:
        times: list[int] = []
        with Clock() as clock:
            if task.op == "latency":
                if self.options.initiator:
                    self._ping(task, times)
                else:
                    self._pong(task)
            elif self.options.initiator:
                self._send(task)
            else:
                self._receive(task)
        return clock.outcome(times)

    def _send(self, task: Task) -> None:
        count, window, buffers, gather = task.count, task.window, self.buffers, self.gather
        send, receive, copy = self.socket.send, self.socket.recv, task.stride < COPIED_BELOW
        sent = arrived = 0
        while arrived < count:
            for number in range(sent, min(count, arrived + window)):
                slot = number % window
                if gather:
                    gather(slot)
                send(buffers[slot], copy=copy)
                sent = number + 1
            arrived = int.from_bytes(receive(), "little")

    def _receive(self, task: Task) -> None:
        count, window, buffers = task.count, task.window, self.buffers
        send, receive = self.socket.send, self.socket.recv_into
        arrived = 0
        while arrived < count:
            receive(buffers[arrived % window])
            arrived += 1
            try:
                while arrived < count:
                    receive(buffers[arrived % window], flags=zmq.DONTWAIT)
                    arrived += 1
            except zmq.Again:
                pass
            send(arrived.to_bytes(8, "little"))

    def _ping(self, task: Task, times: list[int]) -> None:
        send, receive, now = self.socket.send, self.socket.recv_into, time.perf_counter_ns
        message, answer = self.buffers[0], self.arena.view[8:16]
        for _ in range(task.count):
            start = now()
            send(message)
            receive(answer)
            times.append(now() - start)

    def _pong(self, task: Task) -> None:
        send, receive, message = self.socket.send, self.socket.recv_into, self.buffers[0]
        for _ in range(task.count):
            receive(message)
            send(message)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


if __name__ == "__main__":
    serve(Pyzmq)
