"""Measure what torch's transports cost while nothing moves, aiote's beside NIXL's, in two processes of this machine.

`bench/run.py connectors` installs what this needs, and runs it. The optional argument is a file for the record.
Each backend has a pair of processes of its own, in turn, because one that spins would hide the other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
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


def idle() -> tuple[float, float]:
    """Do nothing; return the per cent of a core and the sleeps per second that it took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(SECONDS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 100 * cpu / SECONDS, (after.ru_nvcsw - before.ru_nvcsw) / SECONDS


def serve(connection: Connection, name: str, port: int) -> None:
    """Be the target of transfers, and idle beside the initiator."""
    transport, memory = opened(name, port, 1)
    connection.send(memory.to_remote_buffer().serialize())
    connection.recv()
    connection.send(idle())
    connection.recv()
    transport.close()


def measure(name: str, result: Connection) -> None:
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
    sides = dict(zip(("initiator", "target"), (idle(), connection.recv()), strict=True))
    load = round(os.getloadavg()[0], 1)
    line = "; ".join(f"{side} {cpu:6.2f} % of a core, {sleeps:6.1f} sleeps/s" for side, (cpu, sleeps) in sides.items())
    print(f"{name:6} {line}; load {load}", flush=True)
    result.send({"backend": name, "load": load, **sides})
    connection.send(None)
    process.join()
    transport.close()


def main() -> int:
    rows, context = [], multiprocessing.get_context("spawn")
    for _ in range(TIMES):
        for name in BACKENDS:
            # A process for each, in which no other transport is.
            told, result = context.Pipe(duplex=False)
            child = context.Process(target=measure, args=(name, result))
            child.start()
            result.close()
            rows.append(told.recv())
            child.join()
            if child.exitcode:
                # After its figures: NIXL 1.5.1 has crashed at the exit of a process.
                print(f"{name} ended with {child.exitcode}", file=sys.stderr)
    load = [rows[0]["load"], rows[-1]["load"]]
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps({"load": load, "turns": TIMES, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
