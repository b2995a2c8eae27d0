"""Copies between two transports of one process: memory that is unregistered meanwhile is its owner's again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed._transport import new_transport

from aiote.connectors import torch as connector
from aiote.connectors import torch_memory
from aiote.connectors.torch import AioteTransport

SIZE = 64 << 20
"""A copy takes a hundred times as long as an unregistration that does not wait for it."""
SOON_S = 60


def unregistered(transport: AioteTransport, memory: connector.AioteMemory) -> None:
    transport.unregister_memory(memory)


def closed(transport: AioteTransport, _: connector.AioteMemory) -> None:
    transport.close()


def closed_on_a_loop(transport: AioteTransport, _: connector.AioteMemory) -> None:
    asyncio.run(transport.close_async())


@pytest.mark.parametrize("way", [unregistered, closed, closed_on_a_loop])
def test_a_copy_that_has_begun_ends_before_its_target_is_its_owners(monkeypatch, way: Callable[..., None]):
    a, b = new_transport("aiote", "cpu"), new_transport("aiote", "cpu")
    a.connect(b.bind())
    b.connect(a.bind())
    source, target = torch.full((SIZE,), 1, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    local, exposed = a.register_memory(source), b.register_memory(target)
    remote, copyto = exposed.to_remote_buffer(), np.copyto

    def end() -> None:
        way(b, exposed)
        target.fill_(2)

    ending = threading.Thread(target=end)

    def copy(to: object, what: object) -> None:
        ending.start()
        while (remote.endpoint, remote.descriptor) in connector.registered_here:
            pass
        copyto(to, what)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_memory.np, "copyto", copy)
    work = a.write(local.to_view(), remote, async_op=True)
    assert work.wait()
    ending.join(SOON_S)
    assert torch.equal(target, torch.full_like(target, 2))
    with pytest.raises(RuntimeError, match="unregistered"):
        a.write(local.to_view(), remote)
    a.close()
    b.close()
