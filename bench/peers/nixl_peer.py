"""Measure NIXL through its public Python API, `nixl_agent`.

What was chosen, each as the fastest of what was tried:
* Descriptor lists are prepared once (`prep_xfer_dlist`), one transfer per slot is made of them (`make_prepped_xfer`) and
  posted again and again (`transfer`): nothing but posting and looking is left in the measured loop. A request for pages
  is one transfer with as many descriptors.
* No progress thread: with one processor a side it competes with the thread that polls. What is measured polls anyway
  (`check_xfer_state`, `get_new_notifs`); there is nothing to sleep on, so the mode `event` is unsupported.
* A transfer that is "DONE" has been flushed to the target by NIXL; round trips are writes with a notification.
* UCX: transports by UCX_TLS, `tcp` on the loopback interface or shared memory with cross-memory attach.
"""

from __future__ import annotations

import base64
import json
import os
import time
from importlib.metadata import version
from typing import Any

from common import Arena, Clock, Options, Outcome, Task, Worker, serve

TRANSPORTS = {"tcp": "tcp,self", "shm": "posix,sysv,cma,self"}
HELLO, END, BYE, PING = b"hello", b"end", b"bye", b"ping"
LARGEST_NOTIFICATION = 4096


def load(options: Options) -> Any:
    """Import NIXL with the settings that must be there before."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_TLS", TRANSPORTS[options.provider])
    if options.provider == "tcp":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    import nixl

    return nixl


class Nixl(Worker):
    """One agent with one back end, and one registration of the whole arena."""

    idle_period = 0.005

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        nixl = load(options)
        self.backend = options.variant.upper() or "UCX"
        config = nixl.nixl_agent_config(enable_prog_thread=bool(os.environ.get("PROG")), backends=[])
        self.agent = nixl.nixl_agent(f"{options.role}-{os.getpid()}", config)
        self.agent.create_backend(self.backend, {"ucx_error_handling_mode": os.environ.get("EH","none")})
        self.memory = self.agent.register_memory([(arena.address, arena.size, 0, "")], "DRAM")
        self.library = f"NIXL {version('nixl')} ({self.backend})"
        self.notifications: list[bytes] = []
        self.transfers: list[Any] = []
        self.lists: list[Any] = []
        self.peer = ""
        self.peer_arena = 0

    def address(self) -> str:
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "arena": self.arena.address})

    def connect(self, peer: str) -> None:
        told = json.loads(peer)
        self.peer_arena = told["arena"]
        name = self.agent.add_remote_agent(base64.b64decode(told["metadata"]))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.agent.send_notif(self.peer, HELLO)
        self._expect(HELLO)

    def refusal(self, task: Task) -> str:
        if not self.options.spins:
            return "NIXL's Python API has nothing to sleep on"
        if task.op == "send" and task.size > LARGEST_NOTIFICATION:
            return f"NIXL's messages are notifications, meant to be short; {task.size} bytes are not"
        return ""

    def prepare(self, task: Task) -> None:
        self._release()
        if task.op == "send" or not (self.options.initiator or task.op == "latency"):
            return
        pieces = task.used // task.size
        ours, theirs = (
            self.agent.prep_xfer_dlist(name, [(base + i * task.size, task.size, 0) for i in range(pieces)], "DRAM")
            for name, base in (("NIXL_INIT_AGENT", self.arena.address), (self.peer, self.peer_arena))
        )
        self.lists = [ours, theirs]
        operation = "READ" if task.op == "read" else "WRITE"
        for slot in range(task.slots):
            local, remote = [slot], [slot]
            if task.op == "pages":
                local = [slot * task.pages + page for page in range(task.pages)]
                remote = [slot * task.pages + page for page in task.landing]
            self.transfers.append(self.agent.make_prepped_xfer(operation, ours, local, theirs, remote))

    def run(self, task: Task) -> Outcome:
        if task.op == "latency":
            return self._ping(task) if self.options.initiator else self._pong(task)
        if task.op == "send":
            return self._send(task) if self.options.initiator else self._receive(task)
        clock = Clock()
        if self.options.initiator:
            with clock:
                self._transfer(task)
            self.agent.send_notif(self.peer, END)
            self._expect(BYE)
        else:
            with clock:
                self._expect(END)
            self.agent.send_notif(self.peer, BYE)
        return clock.outcome()

    def _transfer(self, task: Task) -> None:
        transfer, check, transfers, window = self.agent.transfer, self.agent.check_xfer_state, self.transfers, task.window
        done = [True] * len(transfers)
        for number in range(task.count + window):
            slot = number % window
            if slot >= len(transfers):
                continue
            while not done[slot]:
                state = check(transfers[slot])
                done[slot] = state == "DONE"
                if state == "ERR":
                    raise OSError("NIXL reports a failed transfer")
            if number < task.count:
                state = transfer(transfers[slot])
                done[slot] = state == "DONE"
                if state == "ERR":
                    raise OSError("NIXL refused a transfer")

    def _write_with_notification(self) -> None:
        if os.environ.get("LAT"):
            self.agent.send_notif(self.peer, PING); return
        if self.agent.transfer(self.transfers[0], PING) == "DONE":
            return
        while self.agent.check_xfer_state(self.transfers[0]) != "DONE":
            pass

    def _ping(self, task: Task) -> Outcome:
        times, now = [], time.perf_counter_ns
        with Clock() as clock:
            for _ in range(task.count):
                start = now()
                self._write_with_notification()
                self._expect(PING)
                times.append(now() - start)
        return clock.outcome(times)

    def _pong(self, task: Task) -> Outcome:
        with Clock() as clock:
            for _ in range(task.count):
                self._expect(PING)
                self._write_with_notification()
        return clock.outcome()

    def _send(self, task: Task) -> Outcome:
        """Send notifications, half a window at a time: NIXL has no back-pressure of its own."""
        half = max(1, task.window // 2)
        messages = [bytes(self.arena.view[slot * task.size :][: task.size]) for slot in range(task.slots)]
        granted = 2 * half
        with Clock() as clock:
            for number in range(task.count):
                if number >= granted:
                    self._expect(BYE)
                    granted += half
                self.agent.send_notif(self.peer, messages[number % task.window])
            self._expect(END)
        self.notifications.clear()
        return clock.outcome()

    def _receive(self, task: Task) -> Outcome:
        half = max(1, task.window // 2)
        latest: list[bytes] = [b""] * task.slots
        got = granted = 0
        with Clock() as clock:
            while got < task.count:
                self._poll()
                for message in self.notifications:
                    latest[got % task.window] = message
                    got += 1
                self.notifications.clear()
                while got - granted >= half:
                    granted += half
                    self.agent.send_notif(self.peer, BYE)
            self.agent.send_notif(self.peer, END)
        for slot, message in enumerate(latest):
            self.arena.view[slot * task.size :][: task.size] = message
        return clock.outcome()

    def _poll(self) -> None:
        new = self.agent.get_new_notifs()
        if new:
            for messages in new.values():
                self.notifications.extend(messages)

    def _expect(self, message: bytes) -> None:
        """Wait for a notification; what else arrives meanwhile stays for whoever waits for it."""
        while message not in self.notifications:
            self._poll()
        self.notifications.remove(message)

    def idle(self) -> None:
        self._poll()

    def _release(self) -> None:
        for transfer in self.transfers:
            self.agent.release_xfer_handle(transfer)
        for prepared in self.lists:
            self.agent.release_dlist_handle(prepared)
        self.transfers, self.lists = [], []

    def close(self) -> None:
        self._release()
        self.agent.deregister_memory(self.memory)
        if self.peer:
            self.agent.remove_remote_agent(self.peer)


if __name__ == "__main__":
    serve(Nixl)
