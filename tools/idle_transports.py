"""Measure what torch's transports cost while nothing moves, aiote's beside NIXL's, in two processes of this machine.

It needs what `tools/bench_transports.py` needs, which says how to install that:

    .venv-hosts/torch/bin/python -P tools/idle_transports.py

Each backend has a pair of processes of its own, in turn, because one that spins would hide the other.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed._transport import new_transport_rank, register_transport

BACKENDS = ("aiote", "nixl")
NBYTES = 16 << 20
TRANSFERS = 20
SETTLE_S = 1.0
SECONDS = 6.0
TIMES = 2


def opened(name: str, port: int, rank: int) -> tuple[Any, Any]:
    """Open one end; the transport and its registered memory."""
    if name == "nixl":
        from torch.distributed._transport.nixl import NIXLTransport

        register_transport("nixl", NIXLTransport, replace=True)
    store = TCPStore("127.0.0.1", port, is_master=False)
    transport = new_transport_rank(name, "cpu", store=store, rank=rank, peer_rank=1 - rank)
    return transport, transport.register_memory(torch.ones(NBYTES, dtype=torch.uint8))


def idle() -> str:
    """Do nothing; say what that took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(SECONDS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    percent, sleeps = 100 * cpu / SECONDS, (after.ru_nvcsw - before.ru_nvcsw) / SECONDS
    return f"{percent:6.2f} % of a core, {sleeps:6.1f} sleeps/s"


def serve(connection: Connection, name: str, port: int) -> None:
    """Be the target of transfers, and idle beside the initiator."""
    transport, memory = opened(name, port, 1)
    connection.send(memory.to_remote_buffer().serialize())
    connection.recv()
    connection.send(idle())
    connection.recv()
    transport.close()


def measure(name: str) -> None:
    """Use a pair of a backend's transports, then leave them alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, name, store.port))
    process.start()
    transport, memory = opened(name, store.port, 0)
    remote = type(memory.to_remote_buffer()).deserialize(connection.recv())
    for _ in range(TRANSFERS):
        transport.read(memory.to_mutable_view(), remote)
        transport.write(memory.to_view(), remote)
    time.sleep(SETTLE_S)
    connection.send(None)
    line = f"initiator {idle()}; target {connection.recv()}"
    print(f"{name:6} {line}; load {os.getloadavg()[0]:.1f}", flush=True)
    connection.send(None)
    process.join()
    transport.close()


def main() -> int:
    for _ in range(TIMES):
        for name in BACKENDS:
            # A process for each, in which no other transport is.
            child = multiprocessing.get_context("spawn").Process(target=measure, args=(name,))
            child.start()
            child.join()
            if child.exitcode:
                # After its figures: NIXL 1.5.1 has crashed at the exit of a process.
                print(f"{name} ended with {child.exitcode}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
