"""Actors of ray_host.py, and what it runs in their processes beside their tasks."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import ray
import torch
from ray.experimental.rdt.util import get_tensor_transport_manager

from aiote.connectors.ray import NAME, AioteTensorTransport, register
from support.process.idleness import come_to_rest

GATE_S = 120
"""A gate that nobody opens hangs for so long at most."""

# Before the classes: Ray knows the name when it meets it at a method.
register()


def manager() -> AioteTensorTransport:
    found = get_tensor_transport_manager(NAME)
    assert isinstance(found, AioteTensorTransport)
    return found


def beside(actor: Any, what: Any, *arguments: Any) -> Any:
    """Run a function in an actor's process, on the thread on which Ray aborts transfers."""
    return actor.__ray_call__.options(concurrency_group="_ray_system_error").remote(what, *arguments)


def registrations(_: Any) -> int:
    return manager().registrations


def fetching(_: Any) -> int:
    return len(manager()._calls)


def carried(_: Any) -> int:
    return sum(manager().bridge.engine.statistics().carried)


def served(_: Any) -> int:
    return sum(manager().bridge.engine.statistics().served)


def at_rest(_: Any) -> None:
    """Wait until this process's engine does nothing; what spins never gets there. Ray's own threads have their work."""
    asyncio.run(come_to_rest(manager().bridge.engine))


def open_gate(actor: Any) -> None:
    actor.gate.set()


def abort(_: Any, obj_id: str) -> None:
    manager().abort_transport(obj_id, None)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    """A source and a receiver."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.gate = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def block(self) -> bool:
        """Occupy the actor's thread until `open_gate`."""
        return self.gate.wait(GATE_S)

    @ray.method(tensor_transport=NAME)
    def full(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.uint8)

    @ray.method(tensor_transport=NAME)
    def echo(self, what: Any) -> Any:
        self.kept = what
        return what

    @ray.method(tensor_transport=NAME)
    def several(self) -> list[torch.Tensor]:
        return [torch.arange(10.0), torch.zeros(0, 3), torch.tensor(5), torch.ones(7, 9).to(torch.bfloat16)]

    @ray.method(tensor_transport=NAME)
    def duplicate(self) -> list[torch.Tensor]:
        tensor = torch.arange(1000)
        return [tensor, tensor]

    @ray.method(tensor_transport=NAME)
    def overlapping(self) -> list[torch.Tensor]:
        self.kept = torch.arange(100)
        return [self.kept[:60], self.kept[40:], self.kept.view(10, 10)]

    @ray.method(tensor_transport=NAME)
    def mixed(self, plasma: int) -> dict[str, Any]:
        return {"tensor": torch.arange(5), "text": "a" * plasma, "list": [torch.ones(3), 7]}

    @ray.method(tensor_transport=NAME)
    def uneven(self) -> torch.Tensor:
        return torch.zeros(4, 4).t()[1:]

    @ray.method(tensor_transport=NAME)
    def never(self) -> torch.Tensor:
        os._exit(9)

    def put(self, count: int, value: int) -> list[Any]:
        """A reference that the actor itself owns."""
        return [ray.put(torch.full((count,), value, dtype=torch.uint8), _tensor_transport=NAME)]

    def take(self, what: list[Any]) -> int:
        return int(ray.get(what[0]).sum())

    def describe(self, what: Any) -> Any:
        if isinstance(what, torch.Tensor):
            return str(what.dtype), tuple(what.shape), what.sum(dtype=torch.float64).item()
        return [self.describe(one) for one in what]

    def alike(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        return torch.equal(first, second)

    def text(self, what: dict[str, Any]) -> tuple[int, int, int]:
        return len(what["text"]), int(what["tensor"].sum()), int(what["list"][0].sum()) + what["list"][1]


@ray.remote(num_cpus=0, enable_tensor_transport=True, max_restarts=1)
class Restarted:
    """One that Ray starts again when it has died; what its creator told the first process is lost then."""

    def __init__(self) -> None:
        register()

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)

    @ray.method(tensor_transport=NAME)
    def full(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.uint8)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Async:
    """One whose tasks run on an event loop."""

    @ray.method(tensor_transport=NAME)
    async def full(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.uint8)

    async def total(self, what: torch.Tensor) -> int:
        return int(what.sum())
