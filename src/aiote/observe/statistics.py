"""Counts since an engine was opened."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["EngineStatistics"]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What the native core counted.

    `posted`, `completed`, `refused`: work requests (a refused one is tried again); `immediates` that arrived;
    `outstanding` work requests and `queued` transfers now; `rings` of peers' doorbells; `sleeps` and `rounds` of
    the progress loop; live `counters`; messages in the `inbox`.
    """

    posted: int
    completed: int
    refused: int
    immediates: int
    outstanding: int
    queued: int
    rings: int
    sleeps: int
    rounds: int
    counters: int
    inbox: int

    @classmethod
    def of(cls, counts: dict[str, int]) -> EngineStatistics:
        """Take them from the core's own dictionary."""
        return cls(**{item.name: counts[item.name] for item in fields(cls)})
