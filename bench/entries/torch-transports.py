"""Measure torch's transports, aiote's beside NIXL's, between two processes of this machine.

`bench/run.py connectors` installs what this needs, and runs it. The optional argument is a file for the record.
Each transport is measured alone, in two processes of its own, because NIXL's threads poll and take the other's
processors; the two take turns, a few times. Each figure is the median of all rounds, in GB/s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed._transport import new_transport_rank, register_transport

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
ROUNDS = 7
TURNS = 3
BACKENDS = ("aiote", "nixl")
VERBS = ("write", "read")

Times = dict[tuple[str, int], list[float]]
"""Seconds of each round, by verb and size."""


def opened(backend: str, rank: int, store: TCPStore) -> Any:
    """Open one transport to the other process."""
    if backend == "nixl":
        from torch.distributed._transport.nixl import NIXLTransport

        register_transport("nixl", NIXLTransport, replace=True)
    return new_transport_rank(backend, "cpu", store=store, rank=rank, peer_rank=1 - rank)


def serve(backend: str, connection: Connection, port: int) -> None:
    """Expose a tensor; wait until the other side is done."""
    transport = opened(backend, 1, TCPStore("127.0.0.1", port, is_master=False))
    memory = transport.register_memory(torch.ones(max(SIZES), dtype=torch.uint8))
    connection.send(memory.to_remote_buffer().serialize())
    connection.recv()
    transport.close()


def move(backend: str, connection: Connection, port: int, result: Connection) -> None:
    """Write and read each size in turn, and tell how long each round took."""
    transport = opened(backend, 0, TCPStore("127.0.0.1", port, is_master=False))
    memory = transport.register_memory(torch.zeros(max(SIZES), dtype=torch.uint8))
    remote = type(memory.to_remote_buffer()).deserialize(connection.recv())
    took: Times = {(verb, size): [] for verb in VERBS for size in SIZES}
    for (verb, size), seconds in took.items():
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            getattr(transport, verb)(memory.to_mutable_view(0, size), remote)
            seconds.append(time.perf_counter() - started)
        del seconds[0]  # a cold one
    connection.send(None)
    transport.close()
    result.send(took)


def measured(backend: str) -> Times:
    """Measure one transport between two processes that are there for it alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    (here, there), (result, told) = context.Pipe(), context.Pipe(duplex=False)
    processes = [
        context.Process(target=serve, args=(backend, there, store.port), daemon=True),
        context.Process(target=move, args=(backend, here, store.port, told), daemon=True),
    ]
    for process in processes:
        process.start()
    # If this process kept it open, `recv` would wait for ever for a `move` that has died.
    told.close()
    took: Times = result.recv()
    for process in processes:
        process.join()
    return took


def figures(size: int, turns: list[list[float]]) -> dict[str, float]:
    """Return the median rate in GB/s, and the lowest and the highest median of a turn."""
    medians = [size / statistics.median(seconds) / 1e9 for seconds in turns]
    rate = size / statistics.median(one for seconds in turns for one in seconds) / 1e9
    return {"rate": rate, "low": min(medians), "high": max(medians)}


def main() -> int:
    before, rows = os.getloadavg()[0], []
    print(f"load before: {before:.1f}")
    runs: dict[str, list[Times]] = {name: [] for name in BACKENDS}
    for _ in range(TURNS):
        for name in BACKENDS:
            runs[name].append(measured(name))
    print(f"{'':>8}{'':>8}" + "".join(f"{name:>10}" for name in BACKENDS) + f"{'ratio':>8}")
    for verb in VERBS:
        for size in SIZES:
            found = {name: figures(size, [took[verb, size] for took in runs[name]]) for name in BACKENDS}
            rows.append({"verb": verb, "bytes": size, **found})
            rates = [one["rate"] for one in found.values()]
            row = "".join(f"{rate:10.2f}" for rate in rates)
            print(f"{verb:>8}{size // MIB:>5}MiB{row}{rates[0] / rates[1]:8.2f}")
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    print(f"load after: {load[1]}")
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps({"load": load, "turns": TURNS, "rounds": ROUNDS, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
