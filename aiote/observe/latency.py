"""Measure how long an engine's verbs, work requests and waits take, as histograms; one in `every` is timed.

The buckets of a histogram are powers of two from one microsecond on, so that a sample costs a shift and an increment.
The time of a verb is the time that the caller sees: from the call until the await returns, including the wait for room.
Awaits that raise are counted separately because a cancelled await tells little about the NIC.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

from ..errors import UsageError
from .wrapping import SUBMITS, VERBS, Verb, wrap_verbs

__all__ = ["BOUNDS", "WAITS", "Histogram", "Latencies", "WaitTimes"]

BUCKETS = 25
BOUNDS: tuple[float, ...] = tuple(math.ldexp(1e-6, n) for n in range(BUCKETS))
"""The upper bounds of the buckets in seconds: 1 us, 2 us, 4 us, ... 16.8 s; the last bucket has none."""
WAITS = ("counter", "row", "value")
"""What tasks wait for: a counter's count, the counts of a row of counters, a change of a watched value."""


class Histogram:
    """Samples by bucket, their number, their sum in nanoseconds, and the number of failures."""

    __slots__ = ("buckets", "count", "failures", "sum_ns")

    def __init__(self) -> None:
        self.buckets = [0] * (BUCKETS + 1)
        self.count = self.sum_ns = self.failures = 0

    def add(self, ns: int) -> None:
        """Count a sample of `ns` nanoseconds."""
        # The first bucket whose bound of 2**n us is not below ns.
        self.buckets[min((max(ns - 1, 0) // 1000).bit_length(), BUCKETS)] += 1
        self.count += 1
        self.sum_ns += ns

    def quantile(self, share: float) -> float:
        """Return the upper bound in seconds of the bucket with the sample at `share` (0 to 1), or 0 without samples."""
        wanted, seen = share * self.count, 0
        for bound, number in zip((*BOUNDS, math.inf), self.buckets, strict=True):
            seen += number
            if seen and seen >= wanted:
                return bound
        return 0.0


class WaitTimes:
    """The histograms of the waits that slept and then got what they waited for; one in `every` is timed.

    A wait that finds its counts in place does not sleep, and the caller's code between two waits is not in the times.
    `Engine.time_waits` starts the timing. The engine calls `begin` before a wait sleeps and `end` after it.
    """

    __slots__ = ("_left", "by_kind", "every")

    def __init__(self, every: int = 16) -> None:
        self.every, self._left = every, 1
        self.by_kind: Mapping[str, Histogram] = MappingProxyType({kind: Histogram() for kind in WAITS})

    def begin(self) -> int:
        """Return the time in nanoseconds if this wait is one to be timed, else 0."""
        self._left -= 1
        if self._left:
            return 0
        self._left = self.every
        return perf_counter_ns()

    def end(self, kind: str, began: int) -> None:
        """Add the time since `began` to the histogram of one of `WAITS`."""
        self.by_kind[kind].add(perf_counter_ns() - began)


class Latencies:
    """Times one work request in `every` on each rail (`engine.statistics().times`), and one wait in `every` that sleeps
    (`by_wait`), until `close`.

    With `verbs` it also times one await in `every` of each verb, and one call in `every` of each `submit_` form, which
    returns when the transfer is posted or queued. That costs every await and call a tenth of a microsecond. Prepared
    requests appear only in the times of the rails. Use one object per engine at a time: the newest sets `every` for the
    rails and times the waits, and closing any stops both. Raises UsageError for an `every` below 1, ClosedError.
    """

    def __init__(self, engine: Any, every: int = 16, *, verbs: bool = False) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}: expected 1 (each await) or more")
        engine.time_rails(every)
        self._waits = WaitTimes(every)
        engine.time_waits(self._waits)
        self.every, self._engine = every, weakref.ref(engine)
        self._by_verb = {name: Histogram() for name in VERBS} if verbs else {}
        self._by_submit = {name: Histogram() for name in SUBMITS} if verbs else {}
        self._stops: tuple[Callable[[], None], ...] = (
            wrap_verbs(engine, self._wrap, tuple(self._by_verb)),
            wrap_verbs(engine, self._wrap_submit, tuple(self._by_submit)),
        )

    @property
    def by_verb(self) -> Mapping[str, Histogram]:
        """The histogram of each verb; empty without `verbs`."""
        return MappingProxyType(self._by_verb)

    @property
    def by_submit(self) -> Mapping[str, Histogram]:
        """The histogram of each `submit_` form, by its name; empty without `verbs`."""
        return MappingProxyType(self._by_submit)

    @property
    def by_wait(self) -> Mapping[str, Histogram]:
        """The histogram of each of `WAITS`: of the waits that slept and then got what they waited for."""
        return self._waits.by_kind

    def close(self) -> None:
        """Stop the timing; the histograms stay. Idempotent."""
        for stop in self._stops:
            stop()
        engine = self._engine()
        if engine is not None and not engine.closed:
            engine.time_rails(0)
            engine.time_waits(None)

    def _wrap(self, name: str, verb: Verb) -> Verb:
        histogram, every, left = self._by_verb[name], self.every, 1

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return verb(*args, **kwargs)
            left = every
            return timed(*args, **kwargs)

        async def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter_ns()
            try:
                result = await verb(*args, **kwargs)
            except BaseException:
                histogram.failures += 1
                raise
            histogram.add(perf_counter_ns() - began)
            return result

        return call

    def _wrap_submit(self, name: str, verb: Verb) -> Verb:
        histogram, every, left = self._by_submit[name], self.every, 1

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return verb(*args, **kwargs)
            left = every
            began = perf_counter_ns()
            try:
                transfer = verb(*args, **kwargs)
            except BaseException:
                histogram.failures += 1
                raise
            histogram.add(perf_counter_ns() - began)
            return transfer

        return call
