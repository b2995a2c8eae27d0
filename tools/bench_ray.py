"""Measure how Ray hands tensors from actor to actor: its object store, and the transports of aiote and NIXL.

Run it with the environment of `tools/connectors.py ray`, outside of the checkout, which Ray's workers would import:

    cd /tmp && CHECKOUT/.venv-hosts/ray/bin/python -P CHECKOUT/tools/bench_ray.py

NIXL's column needs `nixl` there as well (see bench_transports.py). A hand-over begins with the task that returns a
tensor which its actor keeps, and ends when the other actor has seen its first and last byte: so it has the copy into
the store, or the registration. Each way has actors of its own, and is measured alone, because NIXL's threads poll and
take the other ways' processors; the ways take turns, a few times. Each figure is the median of all rounds, in GB/s of
hand-overs and in seconds of CPU that both actors took for a GB.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from typing import Any

import ray
import torch

from aiote.connectors.ray import NAME, register

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
ROUNDS = 5
TURNS = 3
WAYS = {"store": "hand", "aiote": "hand_aiote", "nixl": "hand_nixl"}

register()


class Actor:
    """A source that keeps a tensor of each size, and a sink."""

    def __init__(self) -> None:
        self.kept = {size: torch.ones(size, dtype=torch.uint8) for size in SIZES}

    def hand(self, size: int, number: int) -> torch.Tensor:
        tensor = self.kept[size]
        tensor[0] = tensor[-1] = number
        return tensor

    hand_aiote = ray.method(tensor_transport=NAME)(lambda self, size, number: self.hand(size, number))
    hand_nixl = ray.method(tensor_transport="NIXL")(lambda self, size, number: self.hand(size, number))

    def take(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        return len(tensor), int(tensor[0]), int(tensor[-1])

    def cpu(self) -> float:
        return time.process_time()


def handed(source: Any, sink: Any, way: str, size: int, number: int) -> tuple[float, float]:
    """Hand a tensor over; return how long it took, and the CPU time of both processes."""
    before = sum(ray.get([source.cpu.remote(), sink.cpu.remote()]))
    started = time.perf_counter()
    found = ray.get(sink.take.remote(getattr(source, WAYS[way]).remote(size, number)))
    took = time.perf_counter() - started
    assert found == (size, number, number), f"{way} brought {found}"
    return took, sum(ray.get([source.cpu.remote(), sink.cpu.remote()])) - before


def measured(way: str) -> dict[int, list[tuple[float, float]]]:
    """Measure one way between two actors that are there for it alone; return the rounds of each size."""
    kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(Actor)
    source, sink = kind.remote(), kind.remote()
    # The first round of a size is a cold one.
    seen = {size: [handed(source, sink, way, size, number) for number in range(ROUNDS + 1)][1:] for size in SIZES}
    for actor in (source, sink):
        ray.kill(actor)
    return seen


def main() -> int:
    key = os.urandom(16).hex()
    os.environ["AIOTE_CLUSTER_KEY"] = key
    variables = {"AIOTE_CLUSTER_KEY": key, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=2, object_store_memory=3072 * MIB, include_dashboard=False, runtime_env={"env_vars": variables})
    ways = [way for way in WAYS if way != "nixl" or importlib.util.find_spec("nixl")]
    print(f"load {os.getloadavg()[0]:.1f}; GB/s, and CPU s/GB")
    runs: dict[str, list[dict[int, list[tuple[float, float]]]]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way in ways:
            runs[way].append(measured(way))
    print(f"{'':>8}" + "".join(f"{way:>10}{'':>8}" for way in ways))
    for size in SIZES:
        row = ""
        for way in ways:
            rounds = [one for seen in runs[way] for one in seen[size]]
            took, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            row += f"{size / took / 1e9:10.2f}{cpu * 1e9 / size:8.2f}"
        print(f"{size // MIB:>5}MiB{row}")
    print(f"load {os.getloadavg()[0]:.1f}")
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
