"""Counts since an engine was opened."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["EngineStatistics"]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What the native core counted.

    `posted`, `completed`, `refused`: work requests (a refused one is tried again); `immediates` that arrived;
    `outstanding` work requests and `queued` transfers now; `peer_wakeups` sent; `sleeps` and `rounds` of
    the progress loop; live `counters`; messages in the `inbox`, and those of
    lost peers that were `dropped` there for want of room; bytes that each of `Engine.rails` has `carried` for
    this engine's own writes, reads and messages, what failed not included.
    """

    posted: int
    completed: int
    refused: int
    immediates: int
    outstanding: int
    queued: int
    peer_wakeups: int
    sleeps: int
    rounds: int
    counters: int
    inbox: int
    dropped: int
    carried: tuple[int, ...]

    @classmethod
    def of(cls, counts: dict[str, Any], rails: int) -> EngineStatistics:
        """Take them from the core's own dictionary, of an engine with so many rails."""
        counts = {**counts, "carried": counts["carried"][:rails]}
        return cls(**{item.name: counts[item.name] for item in fields(cls)})
