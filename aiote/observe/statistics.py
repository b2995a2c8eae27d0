"""Define the counts that `Engine.statistics` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

__all__ = ["EngineStatistics", "RailTimes"]


class RailTimes(NamedTuple):
    """The times of a rail's work requests, from the post until the engine saw the end: the number in each bucket (the
    bounds are `aiote.observe.latency.BOUNDS`) and the sum in nanoseconds.
    """

    buckets: tuple[int, ...]
    sum_ns: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since an engine was opened, and its present state.

    `posted`, `completed`: work requests; `refused`: posts that a rail did not take at once, and that were tried again;
    `immediates` that arrived; `uninvited`: those of them whose sender was not allowed to count there; `outstanding`
    work requests and `queued` transfers now; `peer_wakeups` sent; `sleeps` and `rounds` of the progress loop; live
    `counters`, and `waits` on them now; messages in the `inbox`, and messages of lost peers that were `dropped` because
    their limit was reached.

    For each of `Engine.rails`: bytes that the rail has `carried` for this engine's own writes, reads and messages,
    failures excluded; work requests that ended there, successful or not (`operations`); work requests that it holds now
    (`depth`); bytes that peers have read and written here over it (`served`), which only `local` and `socket` know:
    None for other rails, where the NIC does the work without reporting it; posts that it did not take at once
    (`retries`); how often it `failed` toward a peer, so that other rails took over or it was connected again; `times`
    of work requests, if they are being timed (`Latencies`).

    Connected `peers`; open `regions`, their `registered_bytes`, and the number of regions ever registered
    (`registrations`); `leases` that the engine granted and that have not ended; `heartbeats_sent` and
    `heartbeats_heard`; how often the engine emitted each event (`events`), by name.
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
    leases: int
    heartbeats_sent: int
    heartbeats_heard: int
    events: Mapping[str, int]

    @classmethod
    def of(cls, counts: dict[str, Any], served: tuple[int | None, ...], **more: Any) -> EngineStatistics:
        """Make the counts from the native core's dictionary, the bytes that each rail served, and `more` by name."""
        rails = len(served)
        by_rail = {"carried": counts["carried"], "operations": counts["ended"], "depth": counts["depth"]}
        by_rail |= {"retries": counts["refused_by"], "times": tuple(RailTimes(*each) for each in counts["times"])}
        counts = {**counts, **{name: each[:rails] for name, each in by_rail.items()}, "served": served, **more}
        return cls(**{item.name: counts[item.name] for item in fields(cls)})
