"""What docs/connectors.md says of torch runs as it stands there, in two processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import textwrap
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from support.connectors.recipes import recipe

SOON_S = 60


async def follow(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run code that awaits; the names that it has bound."""
    whole = f"async def followed():\n{textwrap.indent(code, '    ')}\n    return dict(locals())\n"
    exec(compile(whole, "docs/connectors.md", "exec"), names)
    found: dict[str, Any] = await names["followed"]()
    return found


def target(connection: Connection, port: int) -> None:
    """Be the side that is written to: what the recipe does before its write."""
    connection.send("imported")
    tensor, store = torch.zeros(1000), TCPStore("127.0.0.1", port, is_master=False)
    names = {
        "store": store,
        "rank": 1,
        "peer": 0,
        "tensor": tensor,
        "send": connection.send,
        "receive": connection.recv,
    }
    found = asyncio.run(follow(recipe("torch").split("work =")[0], names))
    connection.recv()
    connection.send(float(tensor.sum()))
    found["transport"].close()


def test_the_recipe_writes_to_another_process():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, store.port), daemon=True)
    process.start()
    assert connection.recv() == "imported"
    names = {"store": store, "rank": 0, "peer": 1, "send": connection.send, "receive": connection.recv}
    found = asyncio.run(follow(recipe("torch"), {**names, "tensor": torch.ones(1000)}))
    connection.send("written")
    assert connection.poll(SOON_S)
    assert connection.recv() == 1000
    found["transport"].close()
    process.join(SOON_S)
    assert process.exitcode == 0
