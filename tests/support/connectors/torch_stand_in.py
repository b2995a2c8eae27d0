"""torch as its connector uses it, without torch, and a transport with a peer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

import aiote
from support.connectors.tensors import Tensor, tensor
from support.service.bridges import aside, bridge_to

__all__ = ["SIZE", "Pair", "connector", "paired", "registered"]

SIZE = 1 << 16
NAMES = ("torch", "torch.distributed", "torch.distributed._transport", "torch.futures")


class Transport:
    def __init__(self, device: Any) -> None:
        self.device = device

    def _check_device(self, device: Any) -> None:
        assert device.type == "cpu"


class Future(futures.Future[Any]):
    """torch's has `wait`, and its callbacks run where it ends."""

    def wait(self) -> Any:
        return self.result()


async def wait_all(works: list[Any], timeout: float | None) -> None:  # noqa: ASYNC109
    for work in works:
        await work._call.join()


@contextmanager
def connector() -> Iterator[Any]:
    """Import the connector, as it is with stand-ins for torch."""
    contents: tuple[dict[str, Any], ...] = (
        {"Tensor": Tensor},
        {"Work": type("Work", (), {})},
        {"Transport": Transport, "wait_all": wait_all},
        {"Future": Future},
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, content in zip(NAMES, contents, strict=True):
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        sys.modules["torch"].futures = sys.modules["torch.futures"]  # type: ignore[attr-defined]
        patch.delitem(sys.modules, "aiote.connectors.torch", raising=False)
        yield importlib.import_module("aiote.connectors.torch")
        sys.modules.pop("aiote.connectors.torch", None)


class Pair:
    """A transport whose peer is an engine of the test's own, on the same loop."""

    def __init__(self, torch: Any, bridge: Any) -> None:
        self.torch, self.bridge = torch, bridge
        self.peer = bridge.call(opened())
        self.transport = torch.AioteTransport()
        self.transport.connect(torch.TransportEndpoint("peer", str(self.peer.address)).serialize())
        self.local, self.theirs = tensor(SIZE, 1), tensor(SIZE, 2)
        self.memory = self.transport.register_memory(self.local)
        self.descriptor = bridge.call(self.peer.register_async(self.theirs, "read-write")).descriptor
        self.remote = torch.AioteRemoteBuffer("peer", self.descriptor)

    def close(self) -> None:
        self.transport.close()
        self.bridge.call(self.peer.aclose())


async def opened() -> aiote.Engine:
    return await aiote.open_engine("local")


@contextmanager
def paired(torch: Any) -> Iterator[Pair]:
    """Have a pair for the length of a `with`."""
    with bridge_to() as bridge:
        made = aside(Pair, torch, bridge)
        yield made
        aside(made.close)


def registered(bridge: Any) -> int:
    """How many registrations the engine has."""
    return len(bridge._thread.memory._table)
