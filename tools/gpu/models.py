"""A model that writes a KV cache layer by layer, and adds 1 to a value behind each: a captured graph, or kernels of the
stand-in. A layer reads 1 GiB of weights, as one of a large model does in a decode step, and writes its part of pages.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from device import THREADS, Gpu, Part, RealGpu, StandinGpu

from aiote.gpu import WatchedValue

PAGES, FIELDS, PAGE_TOKENS, ITEM = 4, 2, 16, 2048
ROWS, IN = 8192, 4096
READS = 8
"""How often a layer reads its matrix of 128 MiB, which is far larger than a GPU's cache."""


class Mark:
    """A step that was launched: when it began and ended, by the GPU's clock, and when the host saw the end."""

    def __init__(self, wait: Any, length: Any) -> None:
        self._wait, self._length = wait, length
        self.ended_ns = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self._wait()
        self.ended_ns = time.monotonic_ns()

    def seconds(self) -> float:
        """Return how long the step took; wait for it, 10 s at most."""
        self._thread.join(10)
        if self._thread.is_alive():
            raise TimeoutError("a step of the model did not end within 10 s")
        return float(self._length())


class CapturedModel:
    """The model on a GPU. `cache` is its KV cache; a step begins from what its number makes."""

    def __init__(self, gpu: RealGpu, layers: int, word: WatchedValue) -> None:
        cupy = gpu.cupy
        self.gpu, self.layers = gpu, layers
        self.stream = gpu.stream()
        self.cache = gpu.array(layers, PAGES, FIELDS, PAGE_TOKENS, ITEM)
        self.lent = word.device
        self.counter = np.uint64(self.lent.__cuda_array_interface__["data"][0])
        self.x, self.y = cupy.zeros(IN, cupy.float32), cupy.zeros(ROWS, cupy.float32)
        self.matrices = [cupy.empty(ROWS * IN, cupy.float32) for _ in range(layers)]
        cupy.cuda.Device(0).synchronize()
        for number, matrix in enumerate(self.matrices):
            given = np.uint64(ROWS * IN), np.uint32(number * 0x1234567), np.float32(2 * (3 / IN) ** 0.5)
            gpu.launch("weights", 2048, (matrix, *given), self.stream)
        self._begin(0)
        self._layers()  # whatever is loaded at its first launch
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            self._layers()
            self.graph = self.stream.end_capture()
            self.graph.upload()
        self.stream.synchronize()

    def _begin(self, step: int) -> None:
        self.gpu.launch("begin", IN // THREADS, (self.x, np.uint32(IN), np.uint32(step)), self.stream)

    def _layers(self) -> None:
        rows, size = np.uint32(ROWS), np.uint32(IN)
        for number, matrix in enumerate(self.matrices):
            part = self.cache[number]
            words = part.nbytes // 4
            for _ in range(READS):
                self.gpu.launch("product", ROWS * 32 // THREADS, (matrix, self.x, self.y, rows, size), self.stream)
            blocks = -(-max(words, IN) // THREADS)
            given = self.y, rows, self.x, size, part, np.uint32(words)
            self.gpu.launch("written", blocks, given, self.stream)
            self.gpu.launch("bump", 1, (self.counter,), self.stream, 1)

    def step(self, number: int) -> Mark:
        """Launch a step, over a cache whose bytes are all wrong before."""
        self.gpu.fill(self.cache, 0xEE, 0, self.stream)
        self._begin(number)
        cuda = self.gpu.cupy.cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record(self.stream)
        self.graph.launch(self.stream)
        end.record(self.stream)
        return Mark(end.synchronize, lambda: cuda.get_elapsed_time(begin, end) / 1000)


class StandinModel:
    """As much of it as the stand-in can do: each layer is filled with a byte of its own, late."""

    LATE_US = 500

    def __init__(self, gpu: StandinGpu, layers: int, word: WatchedValue) -> None:
        self.gpu, self.layers, self.word = gpu, layers, word
        self.stream = gpu.stream()
        self.cache = gpu.array(layers, PAGES, FIELDS, PAGE_TOKENS, ITEM)

    def step(self, number: int) -> Mark:
        """Launch a step. The stand-in's kernels set a value's first byte, so the host begins each step from 0."""
        self.gpu.synchronize(self.stream)
        self.word.value = 0
        self.gpu.fill(self.cache, 0xEE, 0, self.stream)
        begin, size = time.monotonic(), self.cache.nbytes // self.layers
        for layer in range(self.layers):
            value = 1 + (number * self.layers + layer) % 199
            self.gpu.standin.launched(Part(self.cache, layer * size, size), value, self.LATE_US, self.stream)
            self.gpu.store(self.word.device, layer + 1, 0, self.stream)
        ended: list[float] = []

        def wait() -> None:
            self.gpu.synchronize(self.stream)
            ended.append(time.monotonic())

        return Mark(wait, lambda: ended[0] - begin)


def model_on(gpu: Gpu, layers: int, word: WatchedValue) -> CapturedModel | StandinModel:
    """Make the model of a GPU."""
    if isinstance(gpu, StandinGpu):
        return StandinModel(gpu, layers, word)
    assert isinstance(gpu, RealGpu)
    return CapturedModel(gpu, layers, word)
