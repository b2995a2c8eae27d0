"""What only a GPU can tell, and the same emulated where that says something: captured rounds, and the sanitizer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiote.moe import device, kernels
from support.gpu.emulation import Emulation
from support.moe import twins as moe_twins

EXPERTS, RANKS, TOKENS, TOP_K, HIDDEN = 12, 3, 20, 4, 64
SANITIZER_S = 900


class Recorder:
    """Emulated launches that are kept for later while something is captured, as a stream keeps them."""

    interface = "__array_interface__"

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.zeros, self.host, self.fetch = emulation.zeros, emulation.host, emulation.fetch
        self.captured: list[tuple[Any, ...]] | None = None

    def launch(self, *given: Any) -> None:
        if self.captured is None:
            self._emulation.launch(*given)
        else:
            self.captured.append(given)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        launched = self.captured = []
        body()
        self.captured = None
        return lambda: [self._emulation.launch(*given) for given in launched] and None


def capture_on_gpu(body: Callable[[], None]) -> Callable[[], None]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        body()
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(stream)
        stream.synchronize()

    return replay


class Place(NamedTuple):
    """Where kernels run, and how arrays get there and back."""

    launcher: Any
    there: Callable[[Any], Any]
    back: Callable[[Any], Any]
    capture: Callable[[Callable[[], None]], Callable[[], None]]


GPU = pytest.param("gpu", marks=[pytest.mark.needs_gpu, pytest.mark.needs_cupy])


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.needs_cxx), GPU])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "gpu":
        import cupy

        return Place(device.CudaLauncher(0), cupy.asarray, cupy.asnumpy, capture_on_gpu)
    recorder = Recorder(request.getfixturevalue("emulation"))
    return Place(recorder, np.array, np.array, recorder.capture)


def test_a_captured_round_is_replayed_with_other_tokens(place):
    """The number of the round and the tokens are read from memory: each replay raises the next round's flags."""
    rng = np.random.default_rng(1)
    opened = device.GpuKernels(place.launcher, EXPERTS, RANKS, threads=64)
    shape = EXPERTS, EXPERTS // RANKS, RANKS, False
    ids, weights = (place.there(np.zeros((TOKENS, TOP_K), kind)) for kind in (np.int64, np.float32))
    x, sums = (place.there(np.zeros((TOKENS, 2 * HIDDEN), np.uint8)) for _ in range(2))
    at, sent = place.there(np.zeros((TOKENS, TOP_K), np.int32)), place.there(np.zeros((80, 2 * HIDDEN), np.uint8))

    def body() -> None:
        opened.number_rows(ids, *shape, at, begins=True, raises=1)
        opened.pack(sent, sent, 0, 0, at, x, scales=x[:, :0], tail=x[:, :0], raises=2)
        opened.combine(sums, sent, at, weights, "bfloat16", False, raises=3)

    # What is captured must have run before: a kernel may be loaded at its first launch.
    body()
    place.back(sums)
    replay = place.capture(body)
    for number in range(2, 6):
        drawn = rng.integers(-1, EXPERTS, (TOKENS, TOP_K))
        factors = rng.standard_normal((TOKENS, TOP_K)).astype(np.float32)
        rows = moe_twins.rounded(rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32), "bfloat16")
        ids[...], weights[...], x[...] = place.there(drawn), place.there(factors), place.there(rows)
        place.back(x)
        replay()
        assert opened.words[1:4].tolist() == [number] * 3
        positions, packed, expected = np.empty((TOKENS, TOP_K), np.int32), place.back(sent).copy(), place.back(sums) * 0
        kernels.number_rows(drawn, *shape, positions)
        kernels.pack(packed, packed, 0, 0, positions, rows, scales=rows[:, :0], tail=rows[:, :0])
        kernels.combine(expected, packed, positions, factors, "bfloat16", False)
        assert place.back(sent).tobytes() == packed.tobytes()
        assert place.back(sums).tobytes() == expected.tobytes()


@pytest.mark.needs_gpu
@pytest.mark.needs_cupy
@pytest.mark.needs_compute_sanitizer
@pytest.mark.timeout(SANITIZER_S)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool):
    """In every kernel, at shapes of all kinds."""
    tests = Path(__file__).with_name("test_gpu_kernels.py")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    command += [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-m", "needs_gpu", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests.parents[2], timeout=SANITIZER_S)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
