"""A source process sends many times its limit of staging memory: it grows by no more than the limit and a tenth."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator

import anyio
import ml_dtypes  # noqa: F401 - what targets' arrays are made of
import numpy as np
import pytest

import aiote
from aiote.weights import Controller, serve_target
from aiote.weights.convert import dtype_of
from support.engines.opening import PATIENCE_S, opened
from support.machine import LONG
from support.process.modules import command
from support.weights import source_process as sources

pytestmark = pytest.mark.blocking_allowed("the other process is what is measured")

UPDATES = 2 if LONG else 1
ALL = list(itertools.product(["local", "socket"], sources.WAYS))
CASES = ALL if LONG else [("local", "quantized")]


class Process:
    """A source in a process of its own."""

    def __init__(self, provider: str, way: str) -> None:
        arguments = command("support.weights.source_process", provider, way)
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self) -> None:
        print(file=self.process.stdin, flush=True)

    def hear(self) -> list[str]:
        return self.process.stdout.readline().split()

    def memory(self) -> tuple[int, int]:
        """Return what is resident, and the most since this was asked last."""
        self.tell()
        now, most = self.hear()
        return int(now), int(most)


@pytest.fixture
def process(provider: str, way: str) -> Iterator[Process]:
    made = Process(provider, way)
    with made.process:
        yield made
        made.process.kill()


@pytest.mark.parametrize(("provider", "way"), CASES)
async def test_a_source_grows_by_its_limit_and_no_more(provider, way, process):
    assert sources.UPDATE_BYTES >= 6 * sources.LIMIT
    with anyio.fail_after(2 * PATIENCE_S):
        async with opened(provider) as engine, opened(provider) as own:
            await updated(process, way, sources.FEW_ROWS, engine, own)
            process.tell()
            await updated(process, way, sources.ROWS, engine, own)


async def updated(process: Process, way: str, rows: int, engine: aiote.Engine, own: aiote.Engine) -> None:
    """Update a target here from the source there, and measure that with many rows."""
    _, layout, recipe = sources.layouts(way, rows)
    arrays = {name: np.zeros(one.shape, dtype_of(one.dtype)) for name, one in layout.tensors.items()}
    (address,) = process.hear()
    async with serve_target(engine, layout, 0, arrays, versions="inplace"):
        controller = Controller(own, [address], [engine.address], recipe)
        await controller.prepare()
        before = process.memory()[0] if rows == sources.ROWS else 0
        for version in range(1, UPDATES + 1):
            sent = (await controller.update(version)).sent[0]
            assert sent.written == sum(array.nbytes for array in arrays.values())
            assert 0 < sent.peak <= sources.LIMIT
            if rows == sources.ROWS:
                assert process.memory()[1] - before <= 1.1 * sources.LIMIT
    for name, values in sources.tensors(rows):
        for target, expected in sources.wanted(way, name, values).items():
            assert np.array_equal(arrays[target].reshape(-1).view(np.uint8), expected), target
