"""One rank or controller of the models of `models`, in a process of its own; see `children`."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from typing import Any

import numpy as np

import aiote
from aiote.weights import Controller, Layout, Target, serve_source, serve_target
from support.process import child_engine
from support.weights import models, shardings


class Commands(child_engine.Commands):
    """What a child can be told to do besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = Layout({})
        self.rank = 0
        self.arrays: dict[str, Any] = {}
        self.target: Target | None = None
        self.controller: Controller | None = None
        self.before = 0

    async def trainer(
        self, rank: int, training: str, model: str, fp8: bool, staging: int, folder: str = ""
    ) -> dict[str, Any]:
        """Begin to be a source; with a folder, where its ranks meet, of a torch module."""
        self.layout, self.rank = shardings.trainers(training, model), rank
        arrays = self.arrays = self._parts(0)
        if folder:
            from support.weights import torch_trainers

            state = torch_trainers.sharded(training, model, rank, folder).state_dict()
            self.layout, arrays = Layout.of_module(state, rank), state
            held = (name for name, tensor in self.layout.tensors.items() if tensor.ranks)
            self.arrays = {name: torch_trainers.array_of(state[name]) for name in held}
        recipe = shardings.recipe(model, fp8)
        await self._begin(serve_source(self.engine, self.layout, rank, arrays, recipe, staging_bytes=staging))
        return {"layout": self.layout.describe()}

    async def step(self, version: int) -> dict[str, Any]:
        """Bring a trainer's weights to a version."""
        for name, part in self._parts(version).items():
            self.arrays[name][...] = part
        return self._measured()

    async def server(
        self, rank: int, inference: str, model: str, fp8: bool, versions: Any, replica: str
    ) -> dict[str, Any]:
        """Begin to be a target, which holds nothing yet."""
        self.layout, self.rank = shardings.inference(inference, model, fp8), rank
        kinds = {name: np.dtype(models.KINDS[tensor.dtype]) for name, tensor in self.layout.tensors.items()}
        shapes = {name: tensor.held_by()[rank].shape for name, tensor in self.layout.tensors.items()}
        ends = np.cumsum([math.prod(shapes[name]) * kinds[name].itemsize for name in shapes]).tolist()
        # In one storage, as an allocator of device memory has them: each region of its own is lent by itself.
        storage = np.full(ends[-1], shardings.FILL, np.uint8)
        for name, start, end in zip(shapes, [0, *ends], ends, strict=False):
            self.arrays[name] = storage[start:end].view(kinds[name]).reshape(shapes[name])
        serving = serve_target(self.engine, self.layout, rank, self.arrays, replica=replica, versions=versions)
        self.target = await self._begin(serving)
        return self._measured()

    async def bring(
        self, sources: list[str], targets: list[str], model: str, fp8: bool, version: int
    ) -> dict[str, Any]:
        """Bring a version over, as the controller, and tell what was committed and sent."""
        if self.controller is None:
            self.controller = Controller(self.engine, sources, targets, shardings.recipe(model, fp8))
        report = await self.controller.update(version)
        plan = self.controller.plan
        return {
            "committed": report.committed,
            "failed": report.failed,
            "peak": max(sent.peak for sent in report.sent.values()),
            "gathered": sum(sent.gathered for sent in report.sent.values()),
            "sent": {rank: sent.written for rank, sent in report.sent.items()},
            "planned": None if plan is None else plan.traffic.sent,
        }

    async def save(self, path: str) -> dict[str, Any]:
        """Save what the rank has as bytes; tell the version, and by how much memory has grown at most since before."""
        grown = tracemalloc.get_traced_memory()[1] - self.before
        np.savez(path, **{name: array.reshape(-1).view(np.uint8) for name, array in self.arrays.items()})
        self._measured()
        return {"grown": grown, "version": None if self.target is None else self.target.version}

    def _measured(self) -> dict[str, Any]:
        """Count anew from here by how much memory grows."""
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        tracemalloc.reset_peak()
        self.before = tracemalloc.get_traced_memory()[0]
        return {}

    def _parts(self, version: int) -> dict[str, Any]:
        found = {}
        for name, tensor in self.layout.tensors.items():
            held = tensor.held_by().get(self.rank)
            if held is not None:
                part = found[name] = np.empty(held.shape, models.KINDS[tensor.dtype])
                for start, stop, local in held.pieces:
                    extent = zip(local, start, stop, strict=True)
                    place = tuple(slice(at, at + last - first) for at, first, last in extent)
                    part[place] = models.values(name, tensor.shape, tensor.dtype, version, start, stop)
        return found

    async def _begin(self, serving: Any) -> Any:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            try:
                async with serving as served:
                    ready.set_result(served)
                    await asyncio.Event().wait()
            except aiote.AioteError as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._start(serve())
        return await ready


if __name__ == "__main__":
    asyncio.run(child_engine.main(Commands()))
