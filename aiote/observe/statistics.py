"""Counts since an engine was opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

__all__ = ["EngineStatistics", "RailTimes"]


class RailTimes(NamedTuple):
    """How long work requests took on a rail, from the post until the end was seen: how many in each bucket (the bounds
    are `aiote.observe.latency.BOUNDS`), and their sum in nanoseconds.
    """

    buckets: tuple[int, ...]
    sum_ns: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since an engine was opened, and what there is now.

    `posted`, `completed`: work requests; `refused`: posts that were not taken at once, and tried again;
    `immediates` that arrived, `uninvited` ones of them, of engines that were not to count there;
    `outstanding` work requests and `queued` transfers now; `peer_wakeups` sent; `sleeps` and `rounds` of
    the progress loop; live `counters`, and `waits` on them now; messages in the `inbox`, and those of
    lost peers that were `dropped` there for want of room.

    For each of `Engine.rails`: bytes that it has `carried` for this engine's own writes, reads and messages, what
    failed not included; work requests that ended there, well or not (`operations`); work requests that it holds now
    (`depth`); bytes that peers have read and written here over it (`served`), None where the NIC does that and tells
    nobody: `local` and `socket` know; posts that it did not take at once (`retries`); how often it `failed` toward a
    peer, so that others carried on or it was brought up again; `times` of work requests, where somebody has them taken
    (`Latencies`).

    Connected `peers`; open `regions`, their `registered_bytes`, and how many were registered ever (`registrations`);
    heartbeats that were sent and heard; how often
    each event was emitted (`events`), by its name.
    """

    posted: int
    completed: int
    refused: int
    immediates: int
    uninvited: int
    outstanding: int
    queued: int
    peer_wakeups: int
    sleeps: int
    rounds: int
    counters: int
    waits: int
    inbox: int
    dropped: int
    carried: tuple[int, ...]
    operations: tuple[int, ...]
    depth: tuple[int, ...]
    served: tuple[int | None, ...]
    retries: tuple[int, ...]
    failed: tuple[int, ...]
    times: tuple[RailTimes, ...]
    peers: int
    regions: int
    registered_bytes: int
    registrations: int
    heartbeats_sent: int
    heartbeats_heard: int
    events: Mapping[str, int]

    @classmethod
    def of(cls, counts: dict[str, Any], served: tuple[int | None, ...], **more: Any) -> EngineStatistics:
        """Take them from the core's own dictionary, what each rail has served, and from elsewhere."""
        rails = len(served)
        by_rail = {"carried": counts["carried"], "operations": counts["ended"], "depth": counts["depth"]}
        by_rail |= {"retries": counts["refused_by"], "times": tuple(RailTimes(*each) for each in counts["times"])}
        counts = {**counts, **{name: each[:rails] for name, each in by_rail.items()}, "served": served, **more}
        return cls(**{item.name: counts[item.name] for item in fields(cls)})
