"""The other process of torch_host.py: a transport that exposes tensors, and says what is in them."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed._transport import new_transport_rank

from aiote import EngineConfig
from support.process.idleness import assert_idle

PATIENCE_S = 120
"""For the other side to come."""
LOST_S = EngineConfig().heartbeat_timeout + 4
"""A peer that is killed is lost by then: after `heartbeat_timeout`, and a few seconds for a busy machine."""


class Peer:
    """What the other process can be asked for, by name."""

    def __init__(self, port: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False)
        self.transport = new_transport_rank(
            "aiote", "cpu", store=store, rank=1, peer_rank=0, bootstrap_timeout=PATIENCE_S
        )
        self.tensors: dict[str, torch.Tensor] = {}
        self.memory: dict[str, Any] = {}

    def expose(self, name: str, nbytes: int, value: int = 0) -> bytes:
        """Register bytes; the descriptor."""
        self.tensors[name] = torch.full((nbytes,), value, dtype=torch.uint8)
        self.memory[name] = self.transport.register_memory(self.tensors[name])
        return self.memory[name].to_remote_buffer().serialize()

    def unregister(self, name: str) -> None:
        self.transport.unregister_memory(self.memory[name])

    def values(self, name: str) -> list[int]:
        """How often 0, 1 and 2 stand there."""
        return [int((self.tensors[name] == value).sum()) for value in range(3)]

    def await_first(self, name: str) -> None:
        """Wait until something was written there."""
        tensor = self.tensors[name]
        while not tensor[0]:
            pass

    def assert_idle(self) -> None:
        asyncio.run(assert_idle(self.transport._bridge.engine))

    def write(self, name: str, descriptor: bytes) -> None:
        remote = type(self.memory[name].to_remote_buffer()).deserialize(descriptor)
        self.transport.write(self.memory[name].to_view(), remote)


def serve(connection: Connection, port: int) -> None:
    """Answer what is asked until the other side is gone."""
    # What it took to import torch counts for nobody's limit.
    connection.send("imported")
    peer = Peer(port)
    connection.send("connected")
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(peer, name)(*arguments))
