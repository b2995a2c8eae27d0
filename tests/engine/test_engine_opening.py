"""An engine whose opening ends early leaves nothing: no descriptor, no watch, no task; the next one works."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any

import anyio
import pytest
from anyio.abc import SocketListener

import aiote
from engines import PATIENCE_S, linked, opened, served_on

MOST_STEPS = 50


@types.coroutine
def cancelled_at(step: int, coroutine: Coroutine[Any, Any, Any], scope: anyio.CancelScope) -> Generator[Any, Any, int]:
    """Run a coroutine and cancel its scope where it waits for the `step`-th time; return how often it waited."""
    waits = 0
    resume, value = coroutine.send, None
    while True:
        try:
            item = resume(value)
        except StopIteration:
            return waits
        waits += 1
        if waits == step:
            scope.cancel()
        try:
            resume, value = coroutine.send, (yield item)
        except BaseException as error:
            resume, value = coroutine.throw, error


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["socket", pytest.param("shm", marks=pytest.mark.libfabric)])
async def test_cancelled_at_every_wait(provider):
    async def whole_life() -> None:
        async with opened(provider):
            pass

    with anyio.fail_after(PATIENCE_S):
        for step in range(1, MOST_STEPS):
            with anyio.CancelScope() as scope:
                waits = await cancelled_at(step, whole_life(), scope)
            if not scope.cancelled_caught and waits < step:
                break
        else:
            pytest.fail(f"an engine waits over {MOST_STEPS} times to be opened and closed")
        assert step > 1
        async with linked(provider) as (left, right):
            await served_on(left, right)


@pytest.mark.anyio
async def test_an_engine_that_was_aborted_is_not_watched_any_more():
    """The next engine may get its descriptors' numbers."""
    with anyio.fail_after(PATIENCE_S):
        for _ in range(3):
            engine = await opened("socket")
            await anyio.lowlevel.checkpoint()
            engine.abort()
        async with linked("socket") as (left, right):
            await served_on(left, right)


@pytest.mark.anyio
async def test_a_control_port_that_comes_to_nothing(monkeypatch):
    """The sockets that were bound are closed, which the leak check sees."""
    taken: list[object] = []

    async def fails(raw: Any) -> SocketListener:
        taken.append(raw)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(SocketListener, "from_socket", fails)
    with anyio.fail_after(PATIENCE_S), pytest.raises(aiote.FabricError, match="Too many open files"):
        await opened("socket")
    assert taken
