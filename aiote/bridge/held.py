"""An async context that a thread holds open on a bridge, such as a group or a service that it uses by calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

from ..aio import Condition
from ..errors import ClosedError
from .promise import Promise

if TYPE_CHECKING:
    from .bridge import Bridge

__all__ = ["HeldContext"]

T = TypeVar("T")


class HeldContext(Generic[T]):
    """A context that is open on a bridge until `close`, made by `bridge.hold`.

    `value` is what the context gave when it was entered; only the bridge's thread may use it.
    """

    def __init__(self, bridge: Bridge, context: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        bridge.require_elsewhere()
        self._bridge = bridge
        self._entered: Promise[T] = Promise()
        self._closing, self._asked = False, Condition()
        self._life = bridge.submit(self._live(context))
        self._life.add_done_callback(self._ended)
        try:
            self.value = self._entered.result()
        except BaseException:
            self._life.cancel()
            raise

    async def _live(self, context: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        async with context() as value:
            self._entered.settle(None, value)
            await self._asked.until(lambda: self._closing)

    def _ended(self, life: futures.Future[None]) -> None:
        # Of a context that was entered this is the second outcome, which has no effect.
        error = None if life.cancelled() else life.exception()
        self._entered.settle(error or ClosedError("it was closed before it was open"))

    def close(self) -> None:
        """Leave the context, and wait until that is done. Idempotent.

        Raises what leaving raises, ClosedError if the bridge is closed, UsageError on the bridge's own thread.
        """
        self._bridge.require_elsewhere()
        if not self._life.done():
            self._bridge.call(self._ask())
            self._life.result()

    async def _ask(self) -> None:
        self._closing = True
        self._asked.wake_all()
