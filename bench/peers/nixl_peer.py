"""Measure NIXL through its public Python API, `nixl_agent`.

What was chosen, each as the fastest of what was tried:
* Descriptor lists are prepared once (`prep_xfer_dlist`), one transfer a slot is made of them (`make_prepped_xfer`) and
  posted again and again (`transfer`): nothing but posting and looking is left in the measured loop. A request for
  pages is one transfer with as many descriptors.
* No progress thread: with one processor a side it competes with the thread that polls, and everything takes several
  times as long. What is measured polls anyway (`check_xfer_state`, `get_new_notifs`); there is nothing to sleep on, so
  the mode `event` is unsupported.
* Round trips and messages are notifications (`send_notif`) that carry the bytes: a write with a notification takes
  two to three times as long, for the data is flushed before the notification leaves.
* `ucx`: transports by UCX_TLS, TCP on the loopback interface, or shared memory with cross-memory attach. Segments of
  256 KiB on TCP, for reads are answered in segments: at the usual 8 KiB they reach a quarter.
* `ucx-copy`: shared memory without cross-memory attach, through UCX's own buffers. One system call for each descriptor
  is what it saves; so small pages are several times as fast, and the largest transfers slower.
* `libfabric`: NIXL's other back end, over libfabric's tcp. It cannot be opened on the loopback interface alone (a veth
  pair does). Its "DONE" need not mean that the target has the data, so the time includes a notification there and back.
  Each write carries a notification: the target keeps a record of each that has none, and looks through all of them
  whenever it is asked for notifications, so that after 60,000 writes everything took nine times as long.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Arena, Clock, Options, Outcome, Task, Unavailable, Worker, serve

SHARED_MEMORY = {"ucx": "posix,sysv,cma,self", "ucx-copy": "posix,self"}
HELLO, END, BYE, NOTE = b"hello", b"end", b"bye", b"note"
LARGEST_NOTIFICATION = 4096
STAND_INS = Path(sys.prefix) / "lib" / "stand-ins"  # what bench/install_peers.py builds where there is no NVIDIA driver


def use_ucx(options: Options) -> dict[str, str]:
    """Set UCX up by its variables, and return what the back end is to be given."""
    if options.provider == "shm":
        os.environ.setdefault("UCX_TLS", SHARED_MEMORY[options.variant or "ucx"])
        return {"ucx_error_handling_mode": "none"}  # shared memory has no other
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "256k")
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256k")
    return {}


def use_libfabric() -> dict[str, str]:
    """Load the libraries that NIXL's plugin needs and does not bring: it then finds them by their names."""
    os.environ.setdefault("FI_PROVIDER", "tcp")
    runtime = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
    for library in (STAND_INS / "libcuda.so.1", runtime, Path(sys.prefix) / "lib" / "mpich" / "libfabric.so.1"):
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return {}


class Nixl(Worker):
    """One agent with one back end, and one registration of the whole arena."""

    idle_period = 0.005

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self.backend = "LIBFABRIC" if options.variant == "libfabric" else "UCX"
        self.flushes = self.backend == "UCX"  # before a transfer is "DONE"
        settings = use_libfabric() if options.variant == "libfabric" else use_ucx(options)
        import nixl

        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self.agent = nixl.nixl_agent(f"{options.role}-{os.getpid()}", config)
        self.library = f"NIXL {version('nixl')} ({self.backend})"
        try:
            self.agent.create_backend(self.backend, settings)
        except nixl._bindings.nixlBackendError as error:
            raise Unavailable(f"{self.library} has no back end here; has it a network besides loopback?") from error
        self.memory = self.agent.register_memory([(arena.address, arena.size, 0, "")], "DRAM")
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
        if task.op in ("send", "latency") or not self.options.initiator:
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
                if not self.flushes:
                    self._end()
            if self.flushes:
                self._end()
        else:
            with clock:
                self._expect(END)
            self.agent.send_notif(self.peer, BYE)
        return clock.outcome()

    def _end(self) -> None:
        self.agent.send_notif(self.peer, END)
        self._expect(BYE)

    def _transfer(self, task: Task) -> None:
        transfer, check = self.agent.transfer, self.agent.check_xfer_state
        transfers, window = self.transfers, task.window
        note = b"" if self.flushes or task.op == "read" else NOTE
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
                state = transfer(transfers[slot], note)
                done[slot] = state == "DONE"
                if state == "ERR":
                    raise OSError("NIXL refused a transfer")

    def _ping(self, task: Task) -> Outcome:
        times, now, notify, peer = [], time.perf_counter_ns, self.agent.send_notif, self.peer
        message = bytes(self.arena.view[:8])
        with Clock() as clock:
            for _ in range(task.count):
                start = now()
                notify(peer, message)
                self._next()
                times.append(now() - start)
        return clock.outcome(times)

    def _pong(self, task: Task) -> Outcome:
        notify, peer, message = self.agent.send_notif, self.peer, b""
        with Clock() as clock:
            for _ in range(task.count):
                message = self._next()
                notify(peer, message)
        self.arena.view[:8] = message
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
                self.notifications.extend(message for message in messages if message != NOTE)

    def _expect(self, message: bytes) -> None:
        """Wait for a notification; what else arrives meanwhile stays for whoever waits for it."""
        while message not in self.notifications:
            self._poll()
        self.notifications.remove(message)

    def _next(self) -> bytes:
        """Wait for whatever notification comes next."""
        while not self.notifications:
            self._poll()
        return self.notifications.pop(0)

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
