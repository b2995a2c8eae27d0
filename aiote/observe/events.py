"""What happened, for whoever listens.

The engine emits an event where a person who looks for the reason of something would want one: a peer connected or
lost, a connection refused. Nothing is built when nobody listens, and a listener's mistake is reported and does not
reach the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event from now on; what is returned stops that."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def emit(self, name: str, **details: object) -> None:
        """Tell every listener."""
        if not self._listeners:
            return
        event = Event(name, MappingProxyType(details))
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                sys.excepthook(*sys.exc_info())
