"""What an engine says to `logging`: each event, by the logger of its subject.

aiote configures nothing: it has a NullHandler on the logger `aiote`, as libraries do, so without a handler of the
program's own nothing is printed, warnings included. A record carries the event's details as the attribute `aiote`.
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
        "rail.back": ("aiote.rails", logging.INFO, "rail %(rail)s carries again toward %(peer)s"),
        "rail.full": ("aiote.rails", logging.WARNING, "rail %(rail)s does not carry %(peer)s: %(reason)s"),
        "rail.down": ("aiote.rails", logging.WARNING, "rail %(rail)s is down: %(reason)s"),
        "rail.up": ("aiote.rails", logging.INFO, "rail %(rail)s is up"),
        "memory.staged": (
            "aiote.memory",
            logging.WARNING,
            "memory of %(device)s is staged through the host for rail %(rail)s: %(reason)s",
        ),
    }
)
"""Each event: its logger, its level, and the text made of its details."""

logging.getLogger("aiote").addHandler(logging.NullHandler())


def log(name: str, details: Mapping[str, object]) -> None:
    """Give an event to its logger, where somebody wants that level. A handler that fails does not reach the engine."""
    logger_name, level, text = EVENTS[name]
    logger = logging.getLogger(logger_name)
    if logger.isEnabledFor(level):
        # One mapping as the only argument: logging formats by its keys.
        logger.log(level, text, details, extra={"aiote": {"event": name, **details}}, stacklevel=3)
