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
    this engine's own writes, reads and messages, what failed not included; bytes that peers have read and written
    here over each rail (`served`), None where the NIC does that and tells nobody: `local` and `socket` know.
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
    served: tuple[int | None, ...]

    @classmethod
    def of(cls, counts: dict[str, Any], served: tuple[int | None, ...]) -> EngineStatistics:
        """Take them from the core's own dictionary, and what each rail has served."""
        counts = {**counts, "carried": counts["carried"][: len(served)], "served": served}
        return cls(**{item.name: counts[item.name] for item in fields(cls)})
