"""An async context that threads hold open on a bridge: entered when `hold` returns, left when `close` returns."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S
from support.service.bridges import aside, bridge_to


class Context:
    """A context that writes down what happens to it, and on which thread."""

    def __init__(self, *, fails: str = "", waits: bool = False) -> None:
        self.seen: list[str] = []
        self.threads: set[int] = set()
        self.begun = threading.Event()
        self._fails, self._waits = fails, waits

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        self.threads.add(threading.get_ident())
        self.begun.set()
        try:
            if self._waits:
                await anyio.sleep_forever()
            if self._fails == "entering":
                raise OSError(self._fails)
            self.seen.append("entered")
            yield 7
            self.seen.append("left")
            if self._fails == "leaving":
                raise OSError(self._fails)
        finally:
            self.seen.append("over")
            self.threads.add(threading.get_ident())


def test_a_context_is_entered_and_left_on_the_bridges_thread():
    context = Context()
    with bridge_to() as bridge:
        held = bridge.hold(context)
        assert (held.value, context.seen) == (7, ["entered"])
        held.close()
        assert context.seen == ["entered", "left", "over"]
        held.close()
        assert len(context.seen) == 3
        assert len(context.threads) == 1
        assert threading.get_ident() not in context.threads


def test_what_entering_and_leaving_raise_comes_out():
    with bridge_to() as bridge:
        with pytest.raises(OSError, match="entering"):
            bridge.hold(Context(fails="entering"))
        held = bridge.hold(Context(fails="leaving"))
        with pytest.raises(OSError, match="leaving"):
            held.close()
        held.close()


def test_a_bridge_that_is_closed_leaves_what_is_held_and_what_is_being_entered():
    entered, entering, found = Context(), Context(waits=True), []
    with bridge_to() as bridge:
        held = bridge.hold(entered)

        def hold() -> None:
            with pytest.raises(aiote.ClosedError, match="closed"):
                bridge.hold(entering)
            found.append("refused")

        thread = threading.Thread(target=hold)
        thread.start()
        assert entering.begun.wait(PATIENCE_S)
        aside(bridge.close)
        thread.join()
        assert (entered.seen, entering.seen, found) == (["entered", "over"], ["over"], ["refused"])
        held.close()
        with pytest.raises(aiote.ClosedError):
            bridge.hold(Context())


def test_the_bridges_own_thread_may_not_hold_nor_close():
    with bridge_to() as bridge:
        held = bridge.hold(Context())

        async def misuses() -> None:
            for misuse in (lambda: bridge.hold(Context()), held.close):
                with pytest.raises(aiote.UsageError):
                    misuse()

        bridge.call(misuses())
        held.close()
