"""Measure torch's transports, aiote's beside NIXL's, between two processes of this machine.

Run it with an environment of `tools/connectors.py torch` into which `nixl` is installed as well:

    .venv-hosts/torch/bin/python -m pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
    .venv-hosts/torch/bin/python -P tools/bench_transports.py

Both transports write and read the same tensors in turn, in one run. Each figure is the median of the rounds, in GB/s.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore
from torch.distributed._transport import new_transport_rank, register_transport

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
ROUNDS = 7
BACKENDS = ("aiote", "nixl")


def opened(port: int, rank: int, master: TCPStore | None = None) -> dict[str, object]:
    """Open a transport of each kind to the other process."""
    from torch.distributed._transport.nixl import NIXLTransport

    register_transport("nixl", NIXLTransport, replace=True)
    store = master or TCPStore("127.0.0.1", port, is_master=False)
    return {name: new_transport_rank(name, "cpu", store=store, rank=rank, peer_rank=1 - rank) for name in BACKENDS}


def serve(connection: Connection, port: int) -> None:
    """Expose a tensor to each transport; wait until the other side is done."""
    transports = opened(port, 1)
    tensors = {name: torch.ones(max(SIZES), dtype=torch.uint8) for name in transports}
    memory = {name: one.register_memory(tensors[name]) for name, one in transports.items()}  # type: ignore[attr-defined]
    connection.send({name: one.to_remote_buffer().serialize() for name, one in memory.items()})
    connection.recv()


def main() -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, store.port))
    process.start()
    transports = opened(store.port, 0, store)
    descriptors, tensor = connection.recv(), torch.zeros(max(SIZES), dtype=torch.uint8)
    memory = {name: one.register_memory(tensor) for name, one in transports.items()}  # type: ignore[attr-defined]
    remote = {name: type(one.to_remote_buffer()).deserialize(descriptors[name]) for name, one in memory.items()}
    print(f"{'':>8}{'':>8}" + "".join(f"{name:>10}" for name in BACKENDS) + f"{'ratio':>8}")
    for verb in ("write", "read"):
        for size in SIZES:
            took: dict[str, list[float]] = {name: [] for name in BACKENDS}
            for _ in range(ROUNDS + 1):
                for name, transport in transports.items():
                    view = memory[name].to_mutable_view(0, size)
                    started = time.perf_counter()
                    getattr(transport, verb)(view, remote[name])
                    took[name].append(time.perf_counter() - started)
            # The first round is a cold one.
            rates = [size / statistics.median(took[name][1:]) / 1e9 for name in BACKENDS]
            row = "".join(f"{rate:10.2f}" for rate in rates)
            print(f"{verb:>8}{size // MIB:>5}MiB{row}{rates[0] / rates[1]:8.2f}", flush=True)
    connection.send(None)
    process.join()
    for transport in transports.values():
        transport.close()  # type: ignore[attr-defined]
    return 0


if __name__ == "__main__":
    sys.exit(main())
