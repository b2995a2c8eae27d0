"""The time that the KV-cache service adds to the first token, and the time until a cancelled request's pages are free.

*The first token.* A prefiller that computes a prompt in one process has the token after L layers of T. With the decoder
in another process, the token is there when the last layer's pages and the tail have arrived. Two parts cannot overlap
with the computation: the request's way to the prefiller, and the last layer, which moves after the computation:

    bound = round trip of a prompt of one page + t + (L - 1) * max(0, t - T),  t = bytes of a layer / bandwidth

The round trips are made as rarely as the prompts, because meanwhile the caches of a processor lose the code and data of
a round trip. The service moves the same pages to measure the bandwidth. The last term is the lag of a wire that is
slower than the computation. All four are measured in turn, round after round.

*Pages back.* The time from cancelling the task that is in `async with consumer.receive(...)` to the end of that block:
with a prefiller that answers, and with one that was killed or stopped in the middle of a transfer.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvservice import ServiceRun, Workload, do

from aiote.bench.order_statistics import Spread
from aiote.bench.records import GIB
from aiote.bench.sides import BenchError, Pair

__all__ = ["FirstToken", "PagesBack", "RoundTimes", "first_token", "lost_pages", "pages_back"]

PROMPTS = 4
TRIPS = 12
LAYER_US = 5000
TRIES = 20
DEAD = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Microseconds to the first token in one process and in two, of a round trip, and GiB/s of the service."""

    alone_us: float
    together_us: float
    trip_us: float
    gib_s: float

    @property
    def added_us(self) -> float:
        """The time that the transfer adds."""
        return self.together_us - self.alone_us

    def bound_us(self, workload: Workload, layer_us: int) -> float:
        """Return the part of the added time that the computation cannot hide."""
        layer = workload.layer_bytes / (self.gib_s * GIB) * 1e6
        return self.trip_us + layer + (workload.layers - 1) * max(0.0, layer - layer_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """All rounds of one shape. `computing`: "asleep" as a GPU's host is, or "in a thread" that takes the processor."""

    provider: str
    contestant: str
    size: int
    pages: int
    layers: int
    layer_us: int
    computing: str
    alone_us: Spread
    added_us: Spread
    trip_us: Spread
    gib_s: Spread
    bound_us: Spread
    ratio: Spread

    @classmethod
    def of(
        cls,
        provider: str,
        contestant: str,
        workload: Workload,
        layer_us: int,
        in_thread: bool,
        rounds: Sequence[RoundTimes],
    ) -> FirstToken:
        """Summarise; raises ValueError for no rounds."""
        bounds = [one.bound_us(workload, layer_us) for one in rounds]
        added = [one.added_us for one in rounds]
        return cls(
            provider=provider,
            contestant=contestant,
            size=workload.size,
            pages=workload.pages,
            layers=workload.layers,
            layer_us=layer_us,
            computing="in a thread" if in_thread else "asleep",
            alone_us=Spread.of([one.alone_us for one in rounds]),
            added_us=Spread.of(added),
            trip_us=Spread.of([one.trip_us for one in rounds]),
            gib_s=Spread.of([one.gib_s for one in rounds]),
            bound_us=Spread.of(bounds),
            ratio=Spread.of([one / bound for one, bound in zip(added, bounds, strict=True)]),
        )


def first_token(
    pair: Pair, provider: str, workload: Workload, *, in_thread: bool, runs: int, layer_us: int = LAYER_US
) -> FirstToken:
    """Measure the added time with a pair that can compute. The workload's window applies to the bandwidth."""
    single, small = dataclasses.replace(workload, window=1), Workload(workload.size, 1, 1, workload.layers)
    rounds = []
    how = {"layer_us": layer_us, "in_thread": int(in_thread)}
    count = max(2 * workload.window, (64 << 20) // workload.request_bytes // workload.window * workload.window)
    for number in range(runs + 1):
        served = ServiceRun.of(workload, count, *do(pair, workload.line("service", count)))
        trip = do(pair, small.line("ttft", TRIPS, pause_us=workload.layers * layer_us))[0]["p50_us"]
        alone = do(pair, single.line("alone", PROMPTS, **how))[1]["p50_us"]
        together = do(pair, single.line("ttft", PROMPTS, **how))[0]["p50_us"]
        if number:  # the first one is cold
            rounds.append(RoundTimes(alone, together, trip, served.gib_s))
    return FirstToken.of(provider, pair.name, workload, layer_us, in_thread, rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesBack:
    """Milliseconds from a cancellation until the pages are free, over `count` cancellations in mid-transfer."""

    provider: str
    contestant: str
    size: int
    pages: int
    prefiller: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def pages_back(pair: Pair, provider: str, workload: Workload, count: int) -> PagesBack:
    """Cancel requests of a prefiller that answers."""
    told = do(pair, workload.line("cancel", count))[0]
    return PagesBack(
        provider=provider,
        contestant=pair.name,
        size=workload.size,
        pages=workload.pages,
        prefiller="answers",
        count=count,
        p50_ms=told["p50_us"] / 1000,
        p99_ms=told["p99_us"] / 1000,
        max_ms=told["max_us"] / 1000,
    )


def _lose_one(start: Callable[[], AbstractContextManager[Pair]], workload: Workload, number: int) -> float:
    """Lose a prefiller in new processes, and retry until it dies before its request is over. Return milliseconds."""
    for _ in range(TRIES):
        with start() as pair:
            took = _lose(pair, workload, number)
        if took >= 0:
            return took
    raise BenchError(f"{TRIES} requests ended before their prefillers had died; measure with larger requests")


def _lose(pair: Pair, workload: Workload, number: int) -> float:
    """Cancel one request after sending its prefiller a signal; return milliseconds, less than 0 if it was over."""
    line = workload.line("lost", 1, signal=number)
    for side in (pair.target, pair.initiator):
        side.send(line)
        side.receive()
    for side in (pair.target, pair.initiator):
        side.send("go")
    return float(pair.initiator.receive()["max_us"]) / 1000


def lost_pages(
    start: Callable[[], AbstractContextManager[Pair]], provider: str, contestant: str, workload: Workload, count: int
) -> list[PagesBack]:
    """Cancel requests whose prefiller was killed, and stopped, each with processes of its own."""
    found = []
    for word, number in DEAD.items():
        times = []
        for _ in range(count):
            times.append(_lose_one(start, workload, number))
        spread = Spread.of(times)
        found.append(
            PagesBack(
                provider=provider,
                contestant=contestant,
                size=workload.size,
                pages=workload.pages,
                prefiller=word,
                count=count,
                p50_ms=spread.median,
                p99_ms=spread.most,
                max_ms=spread.most,
            )
        )
    return found
