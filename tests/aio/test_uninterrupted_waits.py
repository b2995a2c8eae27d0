"""Waiting that nothing interrupts: it ends when the condition holds or its time runs out, and says which."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiote.aio import current_loop, finish, poll_until

NEVER_S = 1000.0


class Item:
    """Something that is over when it is told so."""

    def __init__(self) -> None:
        self.is_over = False
        self.on_over = None

    def end(self) -> None:
        self.is_over = True
        if self.on_over is not None:
            self.on_over(self)


@pytest.mark.virtual_time
@pytest.mark.parametrize("cancellations", [0, 1, 3])
async def test_a_time_limit_ends_a_wait_however_often_it_was_cancelled(cancellations):
    """The caller has to hear that it is not over: what it does then is what makes it end."""
    for wait in (lambda: finish(current_loop(), Item(), 0.05), lambda: poll_until(current_loop(), lambda: False, 0.05)):
        task = asyncio.ensure_future(wait())
        for _ in range(cancellations):
            await asyncio.sleep(0.005)
            assert task.cancel()
        assert await task is False


@pytest.mark.virtual_time
@pytest.mark.parametrize("cancellations", [0, 1, 3])
async def test_a_cancellation_does_not_end_a_wait(cancellations):
    item = Item()
    task = asyncio.ensure_future(finish(current_loop(), item, NEVER_S))
    for _ in range(cancellations):
        await asyncio.sleep(0.005)
        assert task.cancel()
    await asyncio.sleep(0.005)
    assert not task.done()
    item.end()
    assert await task is True


@pytest.mark.anyio
async def test_cancelled_scopes_do_not_end_a_wait():
    item = Item()
    with anyio.move_on_after(0.01) as outer:
        assert await finish(current_loop(), item, 0.05) is False
    assert outer.cancel_called
    with anyio.CancelScope() as outer:
        outer.cancel()
        assert await poll_until(current_loop(), lambda: False, 0.02) is False
