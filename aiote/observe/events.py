"""What happened, for whoever listens.

The engine emits an event where a person who looks for the reason of something would want one: a peer connected or
lost, a connection refused. Each is counted and offered to `logging` (logs.py). Nothing is built when nobody listens,
and a listener's mistake is reported and does not reach the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .logs import EVENTS, log

__all__ = ["Event", "Events"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name ("peer.connected"), and its details."""

    name: str
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


class Events:
    """The listeners of one engine."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], object]] = []
        self._counts = dict.fromkeys(EVENTS, 0)
        self._failed: dict[object, int] = {}

    @property
    def counted(self) -> Mapping[str, int]:
        """How often each event was emitted, by its name."""
        return dict(self._counts)

    def failed(self, rail: str) -> int:
        """How often a rail failed toward a peer."""
        return self._failed.get(rail, 0)

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event from now on; what is returned stops that."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def emit(self, name: str, **details: object) -> None:
        """Count it, log it, and tell every listener."""
        self._counts[name] += 1
        if name == "rail.failed":
            self._failed[details["rail"]] = self._failed.get(details["rail"], 0) + 1
        try:
            log(name, details)
        except Exception:
            sys.excepthook(*sys.exc_info())
        if not self._listeners:
            return
        event = Event(name, MappingProxyType(details))
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                sys.excepthook(*sys.exc_info())
