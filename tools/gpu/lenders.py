"""Write and read between the memories of two processes that array libraries have allocated on a GPU.

    python tools/gpu/lenders.py [--standin] [cupy torch ...]

For each library two processes, which are given memory by it: over `local` with sharing and without, and over `socket`.
What was written is looked at by the library itself, or by `aiote.gpu.copy` where it has no copy to the host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aiote
import aiote.gpu

SIZE = (24 << 20) + 17
IMM = 7
LIMIT_S = 60
WIRES = {"local": {}, "staged": {"gpu_sharing": False}, "socket": {}}
TESTS = Path(__file__).parents[2] / "tests"


class Library(NamedTuple):
    """How a library makes an array of bytes, fills it, and shows it; `version` is its own."""

    version: str
    make: Callable[[int], Any]
    fill: Callable[[Any, Any], object]
    shown: Callable[[Any], Any]


def of_cupy(pool: str = "") -> Library:
    import cupy

    if pool:
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    return Library(
        cupy.__version__, lambda size: cupy.zeros(size, np.uint8), lambda to, data: to.set(data), cupy.asnumpy
    )


def of_torch(settings: str = "") -> Library:
    if settings:  # both spellings: the second is of torch 2.9 and later
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = settings
    import torch

    return Library(
        torch.__version__,
        lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"),
        lambda to, data: to.copy_(torch.from_numpy(data)),
        lambda array: array.cpu().numpy(),
    )


def of_numba() -> Library:
    import numba
    from numba import cuda

    return Library(
        numba.__version__,
        lambda size: cuda.to_device(np.zeros(size, np.uint8)),
        lambda to, data: to.copy_to_device(data),
        lambda array: array.copy_to_host(),
    )


def copied(array: Any) -> Any:
    """Return the bytes of an array of which the library itself shows none."""
    found = np.empty(SIZE, np.uint8)
    aiote.gpu.copy(found, array)
    return found


def of_cuda_core() -> Library:
    try:
        import cuda.core as core

        device = core.Device()
    except (ImportError, AttributeError):
        import cuda.core.experimental as core

        device = core.Device()
    device.set_current()
    stream = device.default_stream

    def make(size: int) -> Any:
        buffer = device.allocate(size, stream=stream)
        stream.sync()
        return buffer

    return Library(getattr(core, "__version__", "?"), make, aiote.gpu.copy, copied)


def of_aiote() -> Library:
    return Library(aiote.__version__, aiote.gpu.allocate, aiote.gpu.copy, copied)


def of_standin(name: str) -> Library:
    """Lend memory of the stand-in as that library does."""
    sys.path.insert(0, str(TESTS))
    from support.gpu import lenders as gpu_lenders

    lender = gpu_lenders.LENDERS.get(name.split("-")[0], gpu_lenders.Cupy)

    def fill(to: Any, data: Any) -> None:
        to.seen[:] = data

    return Library("as on the stand-in", lender, fill, lambda array: array.seen.copy())


LIBRARIES: dict[str, Callable[[], Library]] = {
    "cupy": of_cupy,
    "cupy-async": lambda: of_cupy("async"),
    "torch": of_torch,
    "torch-expandable": lambda: of_torch("expandable_segments:True"),
    "numba": of_numba,
    "cuda.core": of_cuda_core,
    "aiote": of_aiote,
}


def opened(wire: str) -> Any:
    config = aiote.EngineConfig(heartbeat_timeout=30.0, **WIRES[wire])
    return aiote.open_engine("socket" if wire == "socket" else "local", config=config)


def contents(seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 256, SIZE, np.uint8)


async def target(library: Library, wire: str) -> None:
    """Lend memory to the other process until it closes the pipe, and say whether the first write arrived whole."""
    array = library.make(SIZE)
    async with opened(wire) as engine:
        region = engine.register(array)
        print(json.dumps({"descriptor": region.descriptor.hex()}), flush=True)
        await engine.counter(IMM).wait(1)
        print(json.dumps({"whole": bool((library.shown(array) == contents(1)).all())}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def source(library: Library, wire: str, child: Any) -> dict[str, Any]:
    """Write to the other process's memory and read it back; tell how."""
    events: list[str] = []
    async with opened(wire) as engine:
        engine.listen_events(lambda event: events.append(str(event.details)) if event.name == "memory.staged" else None)
        array, back = library.make(SIZE), library.make(SIZE)
        library.fill(array, contents(1))
        region, fetched = engine.register(array), engine.register(back)
        remote = engine.attach(bytes.fromhex(json.loads(await asyncio.to_thread(child.stdout.readline))["descriptor"]))
        await engine.write_imm(region, remote, IMM)
        whole = json.loads(await asyncio.to_thread(child.stdout.readline))["whole"]
        await engine.read(remote, fetched)
        read = bool((library.shown(back) == contents(1)).all())
        (reach,) = region.reach.values()
        await region.aclose()
        await fetched.aclose()
    return {
        "device": region.device,
        "way": reach.way,
        "reason": reach.reason,
        "write": whole,
        "read": read,
        "events": events,
    }


def pair(name: str, wire: str, standin: bool) -> dict[str, Any]:
    """Run both ends over one wire, this process the source."""
    library = of_standin(name) if standin else LIBRARIES[name]()
    command = [sys.executable, "-P", __file__, "--end", "target", "--wire", wire, *(["--standin"] * standin), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            found = asyncio.run(asyncio.wait_for(source(library, wire, child), LIMIT_S))
            assert child.stdin is not None
            child.stdin.close()
            child.wait(LIMIT_S)
        finally:
            child.kill()
    return {"version": library.version, **found}


def tried(name: str, wire: str, standin: bool) -> dict[str, Any]:
    """Run a pair in a process of its own, so that what one library sets is not another's."""
    command = [sys.executable, "-P", __file__, "--end", "source", "--wire", wire, *(["--standin"] * standin), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"was not over after {2 * LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines and not done.returncode else {"error": (done.stdout + done.stderr)[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--standin", action="store_true", help="lend memory of the stand-in for the driver")
    parser.add_argument("--end", choices=("source", "target"), help=argparse.SUPPRESS)
    parser.add_argument("--wire", choices=WIRES, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", default=[*LIBRARIES], metavar="LIBRARY")
    chosen = parser.parse_args()
    if chosen.standin and not chosen.end:
        sys.path.insert(0, str(TESTS))
        from support.gpu import standin_cuda

        os.environ["AIOTE_LIBCUDA"] = standin_cuda.standin_path()
    if chosen.standin and chosen.end:
        sys.path.insert(0, str(TESTS))
        from support.gpu import standin_cuda

        standin_cuda.standin_path = lambda: os.environ["AIOTE_LIBCUDA"]
        standin_cuda.driver()
    if chosen.end == "target":
        library = of_standin(chosen.names[0]) if chosen.standin else LIBRARIES[chosen.names[0]]()
        asyncio.run(target(library, chosen.wire))
        return 0
    if chosen.end == "source":
        try:
            print(json.dumps(pair(chosen.names[0], chosen.wire, chosen.standin)))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    return compared(chosen.names, chosen.standin)


def compared(names: list[str], standin: bool) -> int:
    """Run all pairs, several at a time, and print the result."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ThreadPoolExecutor(2 if standin else 8) as pool:
        jobs = {(name, wire): pool.submit(tried, name, wire, standin) for name in names for wire in WIRES}
        for (name, wire), job in jobs.items():
            result = found[name][wire] = job.result()
            print(f"{name:18} {wire:8}", result, flush=True)
    bad = [f"{n} {w}" for n, each in found.items() for w, r in each.items() if not (r.get("write") and r.get("read"))]
    ways = [f"{n} {each['local'].get('way', 'failed')}" for n, each in found.items()]
    told = {"claim": "lenders", "ok": not bad, "measured": "; ".join([*ways, *bad]), "detail": found}
    print("RESULT", json.dumps(told))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
