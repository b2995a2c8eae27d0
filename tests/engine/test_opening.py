"""An engine whose opening ends early leaves nothing: no descriptor, no watch, no task; the next one works."""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Coroutine, Generator
from typing import Any

import anyio
import pytest
from anyio.abc import SocketListener

import aiote
from support.engines.opening import PATIENCE_S, linked, opened, served_on

MOST_STEPS = 50
WAKEUP_SLOTS = 1000


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
async def test_an_engine_cancelled_at_any_wait_of_its_life_leaves_nothing(provider):
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
async def test_a_control_port_that_cannot_listen_closes_its_sockets(monkeypatch):
    """The sockets that were bound are closed, which the leak check sees."""
    taken: list[object] = []

    async def fails(raw: Any) -> SocketListener:
        taken.append(raw)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(SocketListener, "from_socket", fails)
    with anyio.fail_after(PATIENCE_S), pytest.raises(aiote.FabricError, match="Too many open files"):
        await opened("socket")
    assert taken


@pytest.mark.parametrize("provider", ["local", "socket", pytest.param("shm", marks=pytest.mark.libfabric)])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_system_errors_while_an_endpoint_opens_are_fabric_errors(provider, number, monkeypatch):
    """They are FabricErrors, one that connects hears of them, and they use up no wake-up slot."""

    def fails(_rail: object) -> None:
        raise OSError(number, os.strerror(number))

    async with opened(provider) as left, opened(provider) as right:
        with monkeypatch.context() as patch:
            patch.setattr(type(left._runtime.rail_set.rails[0]), "open_endpoint", fails)
            for _ in range(WAKEUP_SLOTS + 1):
                with pytest.raises(aiote.FabricError, match=os.strerror(number)) as caught:
                    left._runtime.rail_set.open_channel(0, 0)
            assert (caught.value.errno, caught.value.operation) == (number, "open endpoint")
            with pytest.raises(aiote.PeerError, match=os.strerror(number)):
                await left.connect(right.address)
        await left.connect(right.address)
        await served_on(left, right)
