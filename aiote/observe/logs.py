"""Log each event of an engine through `logging`, with the logger of its subject.

aiote does not configure logging. As libraries do, it adds a NullHandler to the logger `aiote`, so records, warnings
included, are printed only if the program has a handler. A record carries the event's details as the attribute `aiote`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["EVENTS", "log"]

EVENTS: Mapping[str, tuple[str, int, str]] = MappingProxyType(
    {
        "engine.opened": ("aiote.engine", logging.INFO, "engine %(address)s opened with rails %(rails)s"),
        "engine.closed": ("aiote.engine", logging.INFO, "engine %(address)s closed"),
        "peer.connected": ("aiote.peers", logging.INFO, "peer %(peer)s connected"),
        "peer.lost": ("aiote.peers", logging.WARNING, "peer %(peer)s lost: %(reason)s"),
        "connection.refused": ("aiote.peers", logging.WARNING, "connection refused: %(reason)s"),
        "rail.failed": ("aiote.rails", logging.WARNING, "rail %(rail)s failed toward %(peer)s: %(reason)s"),
        "rail.back": ("aiote.rails", logging.INFO, "rail %(rail)s is in use again toward %(peer)s"),
        "rail.full": ("aiote.rails", logging.WARNING, "rail %(rail)s is not used toward %(peer)s: %(reason)s"),
        "rail.down": ("aiote.rails", logging.WARNING, "rail %(rail)s is down: %(reason)s"),
        "rail.up": ("aiote.rails", logging.INFO, "rail %(rail)s is up"),
        "memory.staged": (
            "aiote.memory",
            logging.WARNING,
            "memory of %(device)s is staged through the host for rail %(rail)s: %(reason)s",
        ),
    }
)
"""The logger, the level and the text of each event; the event's details fill the text."""

logging.getLogger("aiote").addHandler(logging.NullHandler())


def log(name: str, details: Mapping[str, object]) -> None:
    """Log an event if its logger is enabled for the event's level. `Events.emit` catches a handler's exceptions."""
    logger_name, level, text = EVENTS[name]
    logger = logging.getLogger(logger_name)
    if logger.isEnabledFor(level):
        # `logging` formats the text by the keys of a mapping if that is the only argument.
        logger.log(level, text, details, extra={"aiote": {"event": name, **details}}, stacklevel=3)
