"""Waiting for the first of several things."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

__all__ = ["first_of"]


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Start all and return when one of them is over, with the others cancelled."""
    async with anyio.create_task_group() as group:

        async def run(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)
