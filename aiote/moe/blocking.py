"""A group for synchronous programs: it lives on the process's bridge, and threads wait for its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, Self, TypeVar

import aiote

from ..bridge import Bridge, Call
from .config import MoeConfig
from .opening import open_group

__all__ = ["HeldGroup", "PendingStep"]

T = TypeVar("T")


class PendingStep(Generic[T]):
    """A step in progress on the bridge. Calling it waits for the step and runs `on_result` in the calling thread, once.

    Any thread may call it, any number of times. Each call raises the error of the step, if it failed.
    """

    def __init__(self, call: Call[T], on_result: Callable[[T], object] | None = None) -> None:
        self._call, self._on_result = call, on_result
        self._lock = Lock()

    def __call__(self) -> None:
        # Check before taking the lock, because its holder waits for the bridge's thread.
        self._call.require_elsewhere()
        with self._lock:
            result = self._call.wait()
            if self._on_result is not None:
                self._on_result(result)
                self._on_result = None


class HeldGroup:
    """A rank of a group on a bridge, open until `close`. Only the bridge's thread may use `moe`, the group."""

    def __init__(
        self,
        bridge: Bridge,
        members: Sequence[aiote.Address | str],
        rank: int,
        config: MoeConfig,
        *,
        group: int = 0,
        masked: Iterable[int] = (),
        open_timeout: float | None = None,
    ) -> None:
        """Open the group, and wait until every rank has, within `open_timeout` seconds, as in `open_group`.

        Raises the errors of `open_group`, and UsageError on the bridge's own thread. An interruption cancels opening.
        """
        self.config, self._bridge = config, bridge
        self._at_close: Callable[[], object] | None = None
        given = tuple(masked)
        self._held = bridge.hold(
            lambda: open_group(
                bridge.engine, members, rank, config, group=group, masked=given, open_timeout=open_timeout
            )
        )
        self.moe = self._held.value

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the group on the bridge's thread, and return its result."""

        async def call_function() -> T:
            return function(*arguments)

        return self._bridge.call(call_function())

    def start(self, step: Any) -> Call[Any]:
        """Start a coroutine of the group on the bridge; the returned `Call` is done when the coroutine has ended."""
        return self._bridge.submit(step)

    def call_at_close(self, function: Callable[[], object]) -> None:
        """Make `close` call a function at its end, such as one that closes the bridge."""
        self._at_close = function

    def close(self) -> None:
        """Leave the group, and return once no peer and no transfer uses its memory. Idempotent."""
        with suppress(aiote.ClosedError):
            self._held.close()
        then, self._at_close = self._at_close, None
        if then is not None:
            then()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
