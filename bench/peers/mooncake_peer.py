"""Measure Mooncake's transfer engine over TCP, its one way without RDMA hardware.

What was chosen, each as the fastest of what was tried:
* The connection pool (MC_TCP_ENABLE_CONNECTION_POOL): without it every transfer makes a connection.
* Transfers are submitted and looked at later (`batch_transfer_async_write` and its kin), a request for pages as one
  batch. Looking gives the processor away (`sched_yield`) to the engine's thread, which moves the bytes and has the same
  processor: twice as fast as the engine's own waiting. There is nothing to sleep on: the mode `event` is unsupported.
* A round trip is a write that the other side sees in its memory: a notification takes several times as long.
* The wheel without CUDA: the other one does not load where there is no GPU.
"""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from typing import Any

from common import Arena, Clock, Options, Outcome, Task, Unavailable, Worker, serve

END = "end"
PENDING, DONE = 0, 1


class Mooncake(Worker):
    """One engine, and one registration of the whole arena."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        if options.provider != "tcp":
            raise Unavailable("Mooncake's wheel has no shared memory between processes")
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake import engine

        self.api = engine
        self.engine = engine.TransferEngine()
        if self.engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", ""):
            raise OSError("Mooncake's engine cannot be initialized")
        if self.engine.register_memory(arena.address, arena.size):
            raise OSError("Mooncake cannot register the memory")
        self.library = f"Mooncake {version('mooncake-transfer-engine-non-cuda')}"
        self.peer = ""
        self.peer_arena = 0
        self.requests: list[tuple[list[int], list[int], list[int]]] = []

    def address(self) -> str:
        return json.dumps({"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "arena": self.arena.address})

    def connect(self, peer: str) -> None:
        told = json.loads(peer)
        self.peer, self.peer_arena = told["name"], told["arena"]
        # Opening the segment and the first connection is no part of a transfer
        spare = self.arena.size - 8
        if self.engine.transfer_sync_read(self.peer, self.arena.address + spare, self.peer_arena + spare, 8):
            raise OSError("Mooncake cannot reach the other side")

    def refusal(self, task: Task) -> str:
        if not self.options.spins:
            return "Mooncake's Python API has nothing to sleep on"
        return "Mooncake's Python API has no messages" if task.op == "send" else ""

    def prepare(self, task: Task) -> None:
        self.requests = []
        for start in range(0, task.used, task.stride):
            ours, theirs = self.arena.address + start, self.peer_arena + start
            if task.op == "pages":
                local = [ours + page * task.size for page in range(task.pages)]
                remote = [theirs + page * task.size for page in task.landing]
                self.requests.append((local, remote, [task.size] * task.pages))
            else:
                self.requests.append(([ours], [theirs], [task.size]))

    def run(self, task: Task) -> Outcome:
        if task.op == "latency":
            return self._ping(task) if self.options.initiator else self._pong(task)
        clock = Clock()
        if not self.options.initiator:
            with clock:
                self._wait_for_end()
            return clock.outcome()
        with clock:
            self._transfer(task)
        self._tell_end()
        return clock.outcome()

    def _transfer(self, task: Task) -> None:
        submit = self.engine.batch_transfer_async_read if task.op == "read" else self.engine.batch_transfer_async_write
        peer, requests, window = self.peer, self.requests, task.window
        batches: list[int] = [0] * window
        for number in range(task.count + window):
            slot = number % window
            if batches[slot]:
                self._finish(batches[slot])
                batches[slot] = 0
            if number < task.count:
                batches[slot] = submit(peer, *requests[slot])
                if not batches[slot]:
                    raise OSError("Mooncake refused a transfer")

    def _finish(self, batch: int) -> None:
        check, give_way = self.engine.transfer_check_status, os.sched_yield
        while (state := check(batch)) == PENDING:
            give_way()
        if state != DONE:
            raise OSError(f"Mooncake reports a failed transfer: {state}")

    def _tell_end(self) -> None:
        notify = self.api.TransferNotify(END, "")
        spare = self.arena.size - 8
        local, remote = self.arena.address + spare, self.peer_arena + spare
        if self.engine.transfer_sync(self.peer, local, remote, 8, self.api.TransferOpcode.Read, notify):
            raise OSError("Mooncake cannot notify the other side")

    def _wait_for_end(self) -> None:
        while not any(notify.name == END for notify in self.engine.get_notifies()):
            time.sleep(0.0005)  # the engine's thread has the work, and the same processor

    def _words(self) -> Any:
        return self.arena.view[:16].cast("Q")

    def _ping(self, task: Task) -> Outcome:
        """Write a word and wait for its return; it differs each time, and ends as the pattern's own."""
        words, give_way, now = self._words(), os.sched_yield, time.perf_counter_ns
        peer, ours, theirs = self.peer, self.arena.address, self.peer_arena
        base, times = words[0], []
        with Clock() as clock:
            for left in reversed(range(task.count)):
                start = now()
                words[0] = base ^ left
                self._finish(self.engine.batch_transfer_async_write(peer, [ours], [theirs], [8]))
                while words[1] != words[0]:
                    give_way()
                times.append(now() - start)
        return clock.outcome(times)

    def _pong(self, task: Task) -> Outcome:
        words, give_way, peer = self._words(), os.sched_yield, self.peer
        ours, theirs = self.arena.address, self.peer_arena + 8
        seen = words[0]
        with Clock() as clock:
            for _ in range(task.count):
                while words[0] == seen:
                    give_way()
                seen = words[0]
                self._finish(self.engine.batch_transfer_async_write(peer, [ours], [theirs], [8]))
        return clock.outcome()

    def close(self) -> None:
        self.engine.unregister_memory(self.arena.address)


if __name__ == "__main__":
    serve(Mooncake)
