"""Ranks of verl for verl_host.py: real workers around stand-ins for a trainer and for an inference server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from aiote.connectors.host import party

MIB = 1 << 20
SHAPES: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.bfloat16, (1000, 37)),
    (torch.float32, ()),
    (torch.float32, (0, 8)),
    (torch.bfloat16, (MIB // 2,)),  # a bucket
    (torch.float32, (MIB // 4 + 1,)),  # and a little more
    (torch.bfloat16, (700, 3000)),  # four of them
    (torch.int64, (11,)),
    (torch.float8_e4m3fn, (129, 127)),
    (torch.bool, (3, 3)),
] * 3


def weights(step: int, large: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a step, every element from the step and its place; `large` adds tensors of 4 MiB."""
    for number, (dtype, shape) in enumerate(SHAPES):
        count = int(torch.Size(shape).numel())
        values = (torch.arange(count) * 31 + step * 1009 + number) % 251
        yield f"layer.{number}.weight", values.to(dtype).reshape(shape)
    for number in range(large):
        yield f"large.{number}", torch.full((2 * MIB,), (step + number) % 100, dtype=torch.bfloat16)


class Facts:
    """What the driver asks of either kind of rank; their loops answer meanwhile."""

    def _facts(self) -> dict[str, Any]:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {"registrations": party().registrations, "resident": pages * 4096, "address": party().address}


class Trainer(Facts, Worker):
    def __init__(self, config: CheckpointEngineConfig) -> None:
        Worker.__init__(self)
        import_external_libs(config.custom_backend_module)
        size = config.update_weights_bucket_megabytes << 20
        self.engine = CheckpointEngineRegistry.new("aiote", bucket_size=size, **config.engine_kwargs.get("aiote", {}))
        self.large, self.die_at = 0, -1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.engine.send_weights(self._weights(global_steps), global_steps=global_steps)

    def _weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(weights(step, self.large)):
            if number == self.die_at:
                os._exit(9)
            yield pair

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.engine, method)(*arguments, **named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def configure(self, large: int = 0, die_at: tuple[int, int] = (-1, -1)) -> None:
        self.large, self.die_at = large, die_at[1] if self.rank == die_at[0] else -1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def facts(self) -> dict[str, Any]:
        return self._facts()

    async def ping(self) -> float:
        return time.monotonic()


class Server:
    """What would be an inference server: it keeps what it was given, or fails in the middle."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.fail_at, self.how = -1, ""

    async def update_weights(self, received: Any, global_steps: int | None = None, **_: Any) -> None:
        self.got, number = {}, 0
        async for name, tensor in received:
            if number == self.fail_at:
                if self.how == "die":
                    os._exit(9)
                raise ValueError("the server is out of memory")
            # What is yielded stays as it is until the next is asked for, however long that takes.
            copy = tensor.clone()
            await asyncio.sleep(0)
            assert torch.equal(bits(copy), bits(tensor)), name
            self.got[name] = copy
            number += 1


class Rollout(Facts, CheckpointEngineWorker):
    def __init__(self, rollout_config: RolloutConfig) -> None:
        CheckpointEngineWorker.__init__(self, rollout_config, None, Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def configure(self, fail_at: int = -1, how: str = "") -> None:
        self.server_adapter.fail_at, self.server_adapter.how = fail_at, how

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wrong(self, step: int, large: int = 0) -> list[str]:
        """Return what is not as it should be after the update of a step."""
        got, wanted = self.server_adapter.got, dict(weights(step, large))
        found = [f"{name} is missing" for name in wanted if name not in got]
        for name, tensor in got.items():
            other = wanted.get(name)
            if other is None or other.dtype != tensor.dtype or other.shape != tensor.shape:
                found.append(f"{name} is {tensor.dtype} {tensor.shape}")
            elif not torch.equal(bits(other), bits(tensor)):
                found.append(f"{name} differs")
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def facts(self) -> dict[str, Any]:
        return self._facts()

    async def ping(self) -> float:
        return time.monotonic()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
