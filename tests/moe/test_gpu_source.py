"""The source of the GPU's kernels: what is emulated is what is compiled, nothing spills, and no barrier is too much."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aiote
from aiote.moe import device, kernels
from support import machine
from support.gpu import nvrtc
from support.gpu.emulation import THREADS, compiled, ordering_lines

ARCHITECTURES = ("sm_80", "sm_90", "sm_100") if machine.LONG else ("sm_90",)
"""NVRTC takes seconds for each."""
ORDERS = range(4)
RACE = 66
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def spills(program: nvrtc.Program) -> dict[str, tuple[int, ...]]:
    """Return what the assembler says of each kernel: bytes of stack, of spill stores and of spill loads."""
    names = re.findall(r"Compiling entry function '(\w+)'", program.log)
    return dict(zip(names, [tuple(map(int, found)) for found in SPILLS.findall(program.log)], strict=True))


def compiled_for(architecture: str, source: bytes, *more: str) -> nvrtc.Program:
    program = nvrtc.Program(source, f"--gpu-architecture={architecture}", *device.OPTIONS, "--ptxas-options=-v", *more)
    assert program.succeeded, program.log
    return program


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture):
    source = device.SOURCE.read_bytes()
    found = spills(compiled_for(architecture, source))
    names = re.findall(r"^KERNEL (moe_\w+)\(|^COMBINE\((\w+),", source.decode(), re.M)
    assert found == {first or second: (0, 0, 0) for first, second in names}
    assert len(found) == 8


@pytest.mark.needs_nvrtc
def test_no_sum_flushes_denormals():
    """Although cupy adds an option to ours that has intrinsics do so: float32's of weights, and bfloat16's."""
    ptx = compiled_for("sm_90", device.SOURCE.read_bytes(), "-ftz=true").ptx
    assert len(re.findall(r"(?:add|sub|mul)\.rn\.f32", ptx)) > 10
    assert not re.findall(r"(?:add|sub|mul|fma)\.(?:rn\.)?ftz", ptx)


@pytest.mark.needs_nvrtc
def test_a_kernel_that_spills_is_found():
    lines = "\n".join(f"  int v{i} = p[{i} * n];" for i in range(64))
    total = " + ".join(f"v{i} * p[v{i}]" for i in range(64))
    source = f'extern "C" __global__ void k(volatile int *p, int n) {{\n{lines}\n  p[0] = {total};\n}}'
    (found,) = spills(compiled_for("sm_90", source.encode(), "--maxrregcount=24")).values()
    assert min(found) > 0


@pytest.fixture(scope="module")
def program():
    return compiled("kernels", *THREADS)


@pytest.mark.needs_cxx
def test_what_is_emulated_is_what_is_compiled(emulation):
    """Byte by byte, and all of it: only the eight bytes' types and eight helpers are the emulation's own."""
    source = device.SOURCE.read_bytes()
    assert emulation.source() == source
    assert re.findall(rb"^ *#(?!define)(.*)", source, re.M) == [b"ifndef CUDA_ON_CPU", b"endif"]
    left_out = source[source.index(b"#ifndef") : source.index(b"#endif")]
    assert re.findall(rb"(\w+)\((?:const u32|float)|(\w+)\(u32|#define (\w+)", left_out) == [
        (b"", b"", b"SHARED"),
        (b"load_relaxed", b"", b""),
        (b"load_acquire", b"", b""),
        (b"", b"store_release", b""),
        (b"", b"add_acq_rel", b""),
        (b"added", b"", b""),
        (b"subtracted", b"", b""),
        (b"multiplied", b"", b""),
    ]


def races(program: Path, without: int) -> bool:
    """Whether ThreadSanitizer finds a race in the scenarios without what orders memory in a line; 0 is with all."""
    environment = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE}"}
    done = subprocess.run([program, str(without)], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode in (0, RACE), done.stderr
    assert ("data race" in done.stderr) is (done.returncode == RACE), done.stderr
    return done.returncode == RACE


@pytest.mark.needs_cxx
def test_whatever_orders_memory_is_needed(emulation, program):
    """Each barrier, acquire and release is left out in turn: then an order of fibres gives other results, or a race."""
    expected = emulation.play(0, 0)
    assert expected is not None
    assert {emulation.play(0, order) for order in range(12)} == {expected}
    assert not races(program, 0)
    lines = ordering_lines()
    assert len(lines) == 16
    unseen = [line for line in lines if all(emulation.play(line, order) == expected for order in ORDERS)]
    # What is left is seen by no fibre: they share one thread, and meet wherever values are exchanged.
    assert len(unseen) <= 6
    assert [line for line in (lines if machine.LONG else unseen) if not races(program, line)] == []


def test_without_a_device_numpys_arrays_are_taken():
    opened = device.open_kernels(None, 4, 2)
    assert opened is kernels
    out = np.empty((1, 2), np.int32)
    rows, _ = opened.number_rows(np.array([[3, 0]]), 4, 2, 2, False, out)
    assert (rows.tolist(), out.tolist()) == ([1, 0, 0, 1], [[1, 0]])


# Of cupy, as much as is asked before a kernel is compiled.
NO_GPU = """
class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.mark.parametrize(("module", "says"), [("raise ImportError('gone')", "aiote[cuda]"), (NO_GPU, "0 GPUs")])
def test_a_gpu_that_is_not_there_is_explained(tmp_path, module, says):
    """Also where a machine has both: cupy is hidden behind one of our own."""
    (tmp_path / "cupy.py").write_text(module)
    (tmp_path / "cupyx.py").write_text("empty_pinned = None")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom aiote.moe import device\ndevice.open_kernels(0, 4, 2)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{aiote.UsageError.__module__}.UsageError: device=0")
    assert says in last
    assert "device=None" in last


def test_nothing_optional_is_imported():
    code = "import sys, aiote.moe.device; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"cupy", "cupyx", "torch"} & set(done.stdout.split())
