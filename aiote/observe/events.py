"""Count an engine's events and pass them to its listeners and to `logging` (logs.py).

The engine emits an event wherever a person who searches for the cause of a problem would want one: a peer connected or
lost, a connection refused. An `Event` object is built only if there are listeners. An exception in a listener is
reported and does not reach the engine.
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
    """One event: its name (such as "peer.connected") and its details."""

    name: str
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


class Events:
    """The listeners of one engine, and the counts of its events."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], object]] = []
        self._counts = dict.fromkeys(EVENTS, 0)
        self._failed: dict[object, int] = {}

    @property
    def counted(self) -> Mapping[str, int]:
        """How often the engine emitted each event, by name."""
        return dict(self._counts)

    def failed(self, rail: str) -> int:
        """Return how often a rail failed toward a peer."""
        return self._failed.get(rail, 0)

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event from now on; return a function that stops this."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def emit(self, name: str, **details: object) -> None:
        """Count an event, log it, and pass it to every listener."""
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
