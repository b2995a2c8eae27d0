"""Check and measure aiote on this machine's GPU, or on the stand-in for its driver, for the tables of docs/gpu.md.

    python tools/check_gpu.py promises        # what has to hold
    python tools/check_gpu.py figures         # what it takes
    python tools/check_gpu.py promises --standin

Each of the two takes less than four minutes on a machine with a GPU. It needs aiote, pytest with the plugins of the
`dev` extra, hypothesis and trio; on a GPU also cupy, torch, numba-cuda and cuda-core, of which what is missing fails.
A part runs in a process of its own with a limit; its output goes to a file of --logs, and its end here as it comes.
Exit status: 0, or 1 if a part failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PYTHON = (sys.executable, "-P")
PYTEST = (*PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE", "--maxfail=8")
ENGINE = "tests/engine/test_"
AT_ONCE = 5
EXAMPLES = ("kvcache", "weights", "moe")
SHOWN = 40
REPORTS = {"bench": "--json", "prove": "--report"}
"""Of these commands: the option that names the file they write."""
SLOWER_ON_STANDIN = 4


@dataclass
class Part:
    """One claim or figure: what is run for it, and how it went. `hardware`: only a real GPU can tell."""

    name: str
    claim: str
    command: tuple[str, ...]
    limit_s: float
    hardware: bool = False
    takes_standin: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    ended: str = "not run"
    measured: str = ""
    seconds: float = 0.0


def tool(name: str, *more: str) -> tuple[str, ...]:
    return (sys.executable, f"tools/gpu/{name}.py", *more)  # without -P: they share a module


def tests(*given: str) -> tuple[str, ...]:
    return (*PYTEST, *given)


def prove(wire: str) -> tuple[str, ...]:
    return (*PYTHON, "-m", "aiote", "prove", "cuda", "--over", wire, "--no-bench", "--no-suites")


def example(name: str) -> tuple[str, ...]:
    return (sys.executable, f"examples/gpu/{name}.py")


def memcheck() -> tuple[str, ...]:
    checked = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    return (*checked, *tool("lenders", "--end", "source", "--wire", "local", "aiote"))


def promises() -> list[Part]:
    """Return what has to hold, in the order of docs/gpu.md."""
    on_gpu = {"AIOTE_TESTS_ON_GPU": "1"}
    suites = ("gpu_memory", "gpu_values", "gpu_sharing", "gpu_segments", "gpu_streams", "gpu_lenders")
    return [
        Part("contract", "the contract suite", tests("tests/rails", "-k", "gpu"), 150, environment=on_gpu),
        *(
            Part(f"engine-{each}", f"tests of {each}", tests(f"{ENGINE}{each}.py"), 100, environment=on_gpu)
            for each in suites
        ),
        Part("lenders", "array libraries as lenders", tool("lenders"), 150, takes_standin=True),
        Part("order", "no transfer overtakes a kernel", tool("order"), 90, takes_standin=True),
        Part("broken", "a context that breaks", tool("broken"), 90, takes_standin=True),
        Part("prove-local", "aiote prove cuda --over local", prove("local"), 90, hardware=True),
        Part("prove-socket", "aiote prove cuda --over socket", prove("socket"), 90, hardware=True),
        Part("moe", "MoE's kernels", tests("tests/moe", "-m", "needs_gpu", "-k", "not sanitizer"), 150, hardware=True),
        *(Part(f"example-{each}", f"examples/gpu/{each}.py", example(each), 60, hardware=True) for each in EXAMPLES),
        Part("memcheck", "compute-sanitizer --tool memcheck", memcheck(), 120, hardware=True),
    ]


def bench(op: str, sizes: str, memory: str, *more: str) -> tuple[str, ...]:
    chosen = ("--provider", "local", "--sizes", sizes, "--mode", "default", "--runs", "3", "--memory", memory)
    return (*PYTHON, "-m", "aiote", "bench", op, *chosen, *more)


def of_bench(records: Path) -> str:
    """Return the medians that `aiote bench` has written."""
    found = json.loads(records.read_text())["records"]
    return ", ".join(f"{each['size']} B {each['value']['median']:.4g} {each['unit']}" for each in found)


def figures() -> list[Part]:
    """Return what is measured, one after the other."""
    staged, socket = ("--no-gpu-sharing",), ("--provider", "socket")
    return [
        Part("calls", "the driver's own calls", tool("calls"), 40, takes_standin=True),
        Part("batches", "pages by cuMemcpyBatchAsync", tool("calls", "--batches"), 40, takes_standin=True),
        Part("shared", "GPU to GPU, shared", bench("write", "64K,1M,16M,64M", "cuda"), 40),
        Part("staged", "GPU to GPU staged over local", bench("write", "64K,1M,16M", "cuda", *staged), 40),
        Part("to-host", "GPU to host over local", bench("write", "1M,16M", "cuda-host"), 40),
        Part("from-host", "host to GPU over local", bench("write", "1M,16M", "host-cuda"), 40),
        Part("host", "host to host over local", bench("write", "1M,16M", "host"), 40),
        Part("socket-cuda", "GPU to GPU over socket", bench("write", "1M,16M", "cuda", *socket), 40),
        Part("socket-host", "host to host over socket", bench("write", "1M,16M", "host", *socket), 40),
        Part("pages", "pages of 16 and 64 KiB, shared", bench("pages", "16K,64K", "cuda", "--pages", "512"), 40),
        Part("latency", "8 bytes there and back", bench("latency", "8", "cuda", "--mode", "spin"), 40),
        Part("latency-asleep", "8 bytes there and back, asleep", bench("latency", "8", "cuda"), 40),
        Part("model", "a captured model's KV cache, layer by layer", tool("model"), 60, takes_standin=True),
        Part("values", "a kernel's change until Python sees it", tool("values"), 60, takes_standin=True),
        Part("streams", "stream= at submission", tool("streams"), 40, takes_standin=True),
        Part("idle", "10 regions and peers at rest", tool("idle"), 40, takes_standin=True),
    ]


def run(part: Part, logs: Path, standin: str) -> Part:
    """Run one part to its end or its limit, and say how it went."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    log, records = logs / f"{part.name}.log", logs / f"{part.name}.json"
    command, limit_s = [*part.command], part.limit_s
    for name, option in REPORTS.items():
        command += [option, str(records)] * (name in part.command)
    if standin:
        environment["AIOTE_LIBCUDA"] = standin
        command += ["--standin"] * part.takes_standin
        limit_s *= SLOWER_ON_STANDIN
    else:
        environment |= part.environment
    begun = time.monotonic()
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
            part.ended = "passed" if done.returncode == 0 else f"failed ({done.returncode})"
        except subprocess.TimeoutExpired:
            part.ended = f"not over after {limit_s:g} s"
        except OSError as error:
            part.ended = f"failed ({error})"
    part.seconds = time.monotonic() - begun
    lines = log.read_text(errors="replace").splitlines()
    told = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    last = next((line for line in reversed(lines) if line.strip()), "")
    part.measured = (
        str(told[-1]["measured"]) if told else of_bench(records) if "bench" in command and records.exists() else last
    )
    print(f"--- {part.name}: {part.ended} in {part.seconds:.1f} s", *lines[-SHOWN:], sep="\n", flush=True)
    return part


def machine() -> str:
    """Name the GPU, its driver, and the Python."""
    asked = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except OSError:
        found = []
    return f"{', '.join(found) or 'no GPU'}; Python {platform.python_version()}, {os.cpu_count()} processors"


def table(parts: Iterable[Part], where: str) -> str:
    rows = [f"| {part.claim} | {part.ended}, {part.seconds:.0f} s | {part.measured} |" for part in parts]
    return "\n".join([f"{where}, {datetime.date.today()}", "", "| Claim | Result | Measured |", "|---|---|---|", *rows])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("promises", "figures"))
    parser.add_argument("--standin", action="store_true", help="run what can on the stand-in; its figures mean nothing")
    parser.add_argument("--only", default="", metavar="NAMES", help="parts, with commas")
    parser.add_argument("--logs", type=Path, metavar="DIR", default=None)
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    parts: list[Part] = {"promises": promises, "figures": figures}[chosen.which]()
    names = [name for name in chosen.only.split(",") if name]
    if unknown := {*names} - {part.name for part in parts}:
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
        return 2
    standin = ""
    if chosen.standin:
        sys.path.insert(0, str(TESTS))
        from support.gpu import standin_cuda

        standin = standin_cuda.standin_path()
    logs = chosen.logs or Path(tempfile.mkdtemp(prefix="aiote-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    where = "the stand-in for the driver" if standin else machine()
    print(f"{where}\nlogs: {logs}", flush=True)
    due = [part for part in parts if (not names or part.name in names) and not (standin and part.hardware)]
    # Promises are no matter of speed, and imports take most of their time; figures have the machine to themselves.
    with ThreadPoolExecutor(1 if standin or chosen.which == "figures" else AT_ONCE) as pool:
        for job in [pool.submit(run, part, logs, standin) for part in due]:
            job.result()
    print(table(parts, where))
    return int(any(part.ended != "passed" for part in due))


if __name__ == "__main__":
    sys.exit(main())
