"""Two sources and two targets of an update in one process, each with an engine of its own, and what they must have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

import aiote
from aiote.weights import Controller, Layout, Recipe, Replicate, Shard, cat, serve_source, serve_target
from support.engines.opening import opened

HIDDEN, KEYS = 96, 32
SOURCES = Layout.over(
    [0, 1],
    {
        "q": ((HIDDEN, HIDDEN), "F32", Shard(0)),
        "k": ((KEYS, HIDDEN), "F32", Shard(0)),
        "up": ((HIDDEN, HIDDEN), "F32", Shard(1)),
        "norm": ((HIDDEN,), "F32", Replicate()),
    },
)
TARGETS = Layout.over(
    [0, 1],
    {
        "qk": ((HIDDEN + KEYS, HIDDEN), "F32", Shard(0)),
        "up": ((HIDDEN, HIDDEN), "F32", Shard(0)),
        "norm": ((HIDDEN,), "F32", Replicate()),
    },
)
RECIPE = Recipe({"qk": cat("q", "k")})


def whole(version: int) -> dict[str, Any]:
    """Return the sources' tensors in a version, each element a number of its own."""
    made, first = {}, version * 1_000_000
    for name, tensor in SOURCES.tensors.items():
        made[name] = np.arange(first, first + np.prod(tensor.shape)).astype(np.float32).reshape(tensor.shape)
        first += made[name].size
    return made


def wanted(version: int) -> dict[str, Any]:
    """Return the targets' tensors in a version."""
    values = whole(version)
    return {"qk": np.concatenate([values["q"], values["k"]]), "up": values["up"], "norm": values["norm"]}


def part(layout: Layout, rank: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank holds of whole tensors, in arrays of its own."""
    arrays = {}
    for name, tensor in layout.tensors.items():
        (piece,) = tensor.held_by()[rank].pieces
        box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
        arrays[name] = np.ascontiguousarray(values[name][box])
    return arrays


class Ranks:
    """Two sources and two targets, each with an engine of its own, and a controller."""

    def __init__(self) -> None:
        self.sources: list[dict[str, Any]] = [part(SOURCES, rank, whole(0)) for rank in range(2)]
        blank = {name: np.full(tensor.shape, -1, np.float32) for name, tensor in TARGETS.tensors.items()}
        self.arrays: list[dict[str, Any]] = [part(TARGETS, rank, blank) for rank in range(2)]
        self.engines: list[aiote.Engine] = []
        self.targets: list[Any] = []
        self.controller: Controller

    def train(self, version: int) -> None:
        for rank in range(2):
            for name, array in part(SOURCES, rank, whole(version)).items():
                self.sources[rank][name][...] = array

    def check(self, version: int) -> None:
        for rank in range(2):
            for name, array in part(TARGETS, rank, wanted(version)).items():
                assert np.array_equal(self.arrays[rank][name], array), f"{name} of rank {rank}"


@asynccontextmanager
async def ranks(
    provider: str, versions: Any = "shadow", lend: Callable[[Any], Any] = lambda array: array, **settings: Any
) -> AsyncIterator[Ranks]:
    """Serve them. The bytes go over rails of `provider`, unless the settings have share_memory=True."""
    made, settings = Ranks(), {"share_memory": False} | settings
    async with AsyncExitStack() as stack:
        made.engines = [await stack.enter_async_context(opened(provider)) for _ in range(5)]
        for rank, engine in enumerate(made.engines[:2]):
            arrays = {name: lend(array) for name, array in made.sources[rank].items()}
            await stack.enter_async_context(serve_source(engine, SOURCES, rank, arrays, RECIPE))
        for rank, engine in enumerate(made.engines[2:4]):
            arrays = {name: lend(array) for name, array in made.arrays[rank].items()}
            target = serve_target(engine, TARGETS, rank, arrays, versions=versions, **settings)
            made.targets.append(await stack.enter_async_context(target))
        addresses = [engine.address for engine in made.engines]
        made.controller = Controller(made.engines[4], addresses[:2], addresses[2:4], RECIPE)
        yield made
