"""Measure how Ray hands tensors from actor to actor: its object store, and the transports of aiote and NIXL.

`bench/run.py connectors` installs what this needs, and runs it outside of the checkout, which Ray's workers would
import. The optional argument is a file for the record. NIXL's column needs `nixl`.

A hand-over begins with the task that returns a tensor which its actor keeps, and ends when the other actor has seen its
first and last byte: so it has the copy into the store, or the registration. Each way has actors of its own, and is
measured alone, because NIXL's threads poll and take the other ways' processors; the ways take turns, a few times. Each
figure is the median of all rounds, in GB/s of hand-overs and in seconds of CPU that both actors took for a GB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch

from aiote.connectors.ray import NAME, register

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
ROUNDS = 5
TURNS = 3
KILL_S = 60
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

    def pid(self) -> int:
        return os.getpid()


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
    pids = ray.get([source.pid.remote(), sink.pid.remote()])
    for actor in (source, sink):
        ray.kill(actor)
    wait_ended(pids)
    return seen


def wait_ended(pids: list[int]) -> None:
    """Wait until processes have ended, because NIXL's threads poll until then. Raises TimeoutError."""
    deadline = time.monotonic() + KILL_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"killed actors still run after {KILL_S} s: {pids}")
        time.sleep(0.05)


def figures(size: int, turns: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Return the median rate in GB/s, the lowest and the highest median of a turn, and the median CPU s/GB."""
    medians = [size / statistics.median(took for took, _ in rounds) / 1e9 for rounds in turns]
    rounds = [one for turn in turns for one in turn]
    took, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
    rate = size / took / 1e9
    return {"rate": rate, "low": min(medians), "high": max(medians), "cpu": cpu * 1e9 / size}


def main() -> int:
    key = os.urandom(16).hex()
    os.environ["AIOTE_CLUSTER_KEY"] = key
    variables = {"AIOTE_CLUSTER_KEY": key, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=2, object_store_memory=3072 * MIB, include_dashboard=False, runtime_env={"env_vars": variables})
    ways = [way for way in WAYS if way != "nixl" or importlib.util.find_spec("nixl")]
    before = os.getloadavg()[0]
    print(f"load {before:.1f}; GB/s, and CPU s/GB")
    runs: dict[str, list[dict[int, list[tuple[float, float]]]]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way in ways:
            runs[way].append(measured(way))
    print(f"{'':>8}" + "".join(f"{way:>10}{'':>8}" for way in ways))
    rows = []
    for size in SIZES:
        found = {way: figures(size, [seen[size] for seen in runs[way]]) for way in ways}
        rows.append({"bytes": size, **found})
        print(f"{size // MIB:>5}MiB" + "".join(f"{one['rate']:10.2f}{one['cpu']:8.2f}" for one in found.values()))
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    print(f"load {load[1]}")
    ray.shutdown()
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps({"load": load, "turns": TURNS, "rounds": ROUNDS, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
