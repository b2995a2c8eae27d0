"""Export an engine's counts to Prometheus with prometheus-client (the extra `prometheus`).

    REGISTRY.register(EngineCollector(engine, latencies=Latencies(engine)))

The collector reads the counts when Prometheus asks, so it adds no cost to transfers. Reading holds the engine's lock
for microseconds; any thread may do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .calls import CallTimes
from .latency import BOUNDS, Histogram, Latencies
from .statistics import RailTimes

__all__ = ["CALLS", "METRICS", "POOL", "CallCollector", "EngineCollector", "PoolCollector"]


class _Described(NamedTuple):
    name: str
    kind: str
    text: str
    label: str
    values: Callable[[Any, Any], Sequence[tuple[str, float]]]


def _plain(field: str) -> Callable[[Any, Any], Sequence[tuple[str, float]]]:
    return lambda engine, counts: [("", getattr(counts, field))]


def _by_rail(field: str) -> Callable[[Any, Any], Sequence[tuple[str, float]]]:
    def values(engine: Any, counts: Any) -> Sequence[tuple[str, float]]:
        each = zip(engine.rails, getattr(counts, field), strict=True)
        return [(rail.name, value) for rail, value in each if value is not None]

    return values


def _events(engine: Any, counts: Any) -> Sequence[tuple[str, float]]:
    return list(counts.events.items())


def _up(engine: Any, counts: Any) -> Sequence[tuple[str, float]]:
    return [(rail.name, float(rail.state == "up")) for rail in engine.rails]


DESCRIBED = (
    _Described("aiote_rail_carried_bytes", "counter", "Bytes of own transfers.", "rail", _by_rail("carried")),
    _Described("aiote_rail_served_bytes", "counter", "Bytes of peers' transfers.", "rail", _by_rail("served")),
    _Described("aiote_rail_operations", "counter", "Own work requests that ended.", "rail", _by_rail("operations")),
    _Described(
        "aiote_rail_retries", "counter", "Posts that the rail did not take at once.", "rail", _by_rail("retries")
    ),
    _Described("aiote_rail_failovers", "counter", "Failures of the rail toward a peer.", "rail", _by_rail("failed")),
    _Described("aiote_rail_depth", "gauge", "Work requests that the rail holds.", "rail", _by_rail("depth")),
    _Described("aiote_rail_up", "gauge", "Whether the rail is up.", "rail", _up),
    _Described("aiote_work_requests_posted", "counter", "Work requests posted.", "", _plain("posted")),
    _Described("aiote_work_requests_completed", "counter", "Work requests ended.", "", _plain("completed")),
    _Described("aiote_work_requests_outstanding", "gauge", "Work requests under way.", "", _plain("outstanding")),
    _Described("aiote_transfers_queued", "gauge", "Transfers with something to post.", "", _plain("queued")),
    _Described("aiote_immediates", "counter", "Immediates that arrived.", "", _plain("immediates")),
    _Described("aiote_immediates_uninvited", "counter", "Immediates of others than sources.", "", _plain("uninvited")),
    _Described("aiote_counters", "gauge", "Counters in use.", "", _plain("counters")),
    _Described("aiote_counter_waits", "gauge", "Awaits of counters.", "", _plain("waits")),
    _Described("aiote_inbox_messages", "gauge", "Messages that nobody took yet.", "", _plain("inbox")),
    _Described("aiote_messages_dropped", "counter", "Messages of lost peers, dropped.", "", _plain("dropped")),
    _Described("aiote_peer_wakeups", "counter", "Wake-ups sent to peers.", "", _plain("peer_wakeups")),
    _Described("aiote_loop_rounds", "counter", "Rounds of the progress loop.", "", _plain("rounds")),
    _Described("aiote_loop_sleeps", "counter", "Sleeps of the progress loop.", "", _plain("sleeps")),
    _Described("aiote_peers", "gauge", "Connected peers.", "", _plain("peers")),
    _Described("aiote_regions", "gauge", "Open regions.", "", _plain("regions")),
    _Described("aiote_registered_bytes", "gauge", "Bytes of open regions.", "", _plain("registered_bytes")),
    _Described("aiote_registrations", "counter", "Regions registered.", "", _plain("registrations")),
    _Described("aiote_leases", "gauge", "Leases that were granted and have not ended.", "", _plain("leases")),
    _Described("aiote_heartbeats_sent", "counter", "Heartbeats sent.", "", _plain("heartbeats_sent")),
    _Described("aiote_heartbeats_heard", "counter", "Heartbeats heard.", "", _plain("heartbeats_heard")),
    _Described("aiote_events", "counter", "Events: peers lost, rails failed, ...", "event", _events),
)
RAIL_LATENCY = "aiote_rail_request_seconds"
LATENCY = "aiote_await_seconds"
LATENCY_FAILURES = "aiote_await_failures"
WAIT = "aiote_wait_seconds"
SUBMIT = "aiote_submit_seconds"
SUBMIT_FAILURES = "aiote_submit_failures"
CALL, CALL_FAILURES, CALLS_RUNNING = "aiote_call_seconds", "aiote_call_failures", "aiote_calls_running"
PARTS = ("bucket", "count", "sum")
METRICS = (
    *(each.name + ("_total" if each.kind == "counter" else "") for each in DESCRIBED),
    *(f"{histogram}_{part}" for histogram in (RAIL_LATENCY, WAIT, LATENCY, SUBMIT) for part in PARTS),
    f"{LATENCY_FAILURES}_total",
    f"{SUBMIT_FAILURES}_total",
)
"""The names of all samples of an engine."""
CALLS = (*(f"{CALL}_{part}" for part in PARTS), f"{CALL_FAILURES}_total", CALLS_RUNNING)
"""The names of all samples of calls."""
POOL: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
    ("aiote_kvcache_pages", "Pages of the pool.", lambda pool: pool.pages),
    ("aiote_kvcache_pages_held", "Pages that requests hold.", lambda pool: pool.pages - pool.free),
    ("aiote_kvcache_requests_held", "Requests that hold pages.", lambda pool: pool.held),
    ("aiote_kvcache_requests_waiting", "Requests that wait for pages.", lambda pool: pool.waiting),
)
"""The gauges of a page pool: name, text, and a function that reads the number."""


def _cumulated(buckets: Sequence[int]) -> list[tuple[str, float]]:
    """Return each bound with the number of samples that are not above it."""
    return list(zip((*map(repr, BOUNDS), "+Inf"), map(float, accumulate(buckets)), strict=True))


class EngineCollector(Collector):
    """A collector of an engine's counts; each sample has the label `engine`. It yields no samples once the engine is
    closed.

    `name`: the value of that label, by default the engine's address. `latencies`: histograms of rails, waits, awaits.
    """

    def __init__(self, engine: Any, name: str = "", latencies: Latencies | None = None) -> None:
        self._engine, self._latencies = engine, latencies
        self._name = name or str(engine.address)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; see prometheus_client."""
        if self._engine.closed:
            return
        counts = self._engine.statistics()
        for described in DESCRIBED:
            labels = ["engine", described.label] if described.label else ["engine"]
            kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
            family = kind(described.name, described.text, labels=labels)
            for label, value in described.values(self._engine, counts):
                family.add_metric([self._name, label] if described.label else [self._name], value)
            yield family
        if self._latencies is not None:
            yield self._rail_latency(counts.times)
            yield self._waits(self._latencies)
            yield from self._latency(self._latencies)
            yield from self._submits(self._latencies)

    def describe(self) -> Iterator[Metric]:
        """Yield no metrics, so that registering the collector does not collect; Prometheus does that when it asks."""
        return iter(())

    def _rail_latency(self, times: Sequence[RailTimes]) -> Metric:
        text = "Work requests from post to completion, a part of them timed."
        family = HistogramMetricFamily(RAIL_LATENCY, text, labels=["engine", "rail"])
        for rail, taken in zip(self._engine.rails, times, strict=True):
            family.add_metric([self._name, rail.name], _cumulated(taken.buckets), taken.sum_ns * 1e-9)
        return family

    def _waits(self, latencies: Latencies) -> Metric:
        text = f"Waits of counters and values that slept, one in {latencies.every} timed."
        times = HistogramMetricFamily(WAIT, text, labels=["engine", "kind"])
        for kind, histogram in latencies.by_wait.items():
            # Copy the buckets once: the engine may add samples meanwhile, and the count is the sum of the buckets.
            held, sum_ns = list(histogram.buckets), histogram.sum_ns
            times.add_metric([self._name, kind], _cumulated(held), sum_ns * 1e-9)
        return times

    def _latency(self, latencies: Latencies) -> Iterator[Metric]:
        text = f"Awaits of verbs that went well, one in {latencies.every} timed."
        times = HistogramMetricFamily(LATENCY, text, labels=["engine", "verb"])
        failures = CounterMetricFamily(LATENCY_FAILURES, "Timed awaits that raised.", labels=["engine", "verb"])
        _add(times, failures, self._name, latencies.by_verb)
        yield times
        yield failures

    def _submits(self, latencies: Latencies) -> Iterator[Metric]:
        text = f"Calls of submit forms that did not raise, one in {latencies.every} timed."
        times = HistogramMetricFamily(SUBMIT, text, labels=["engine", "verb"])
        failures = CounterMetricFamily(SUBMIT_FAILURES, "Timed calls that raised.", labels=["engine", "verb"])
        _add(times, failures, self._name, {name.removeprefix("submit_"): h for name, h in latencies.by_submit.items()})
        yield times
        yield failures


def _add(times: HistogramMetricFamily, failures: CounterMetricFamily, name: str, each: Mapping[str, Histogram]) -> None:
    for label, histogram in tuple(each.items()):
        # Copy the buckets once: the engine may add samples meanwhile, and the count is the sum of the buckets.
        held, sum_ns = list(histogram.buckets), histogram.sum_ns
        times.add_metric([name, label], _cumulated(held), sum_ns * 1e-9)
        failures.add_metric([name, label], histogram.failures)


class CallCollector(Collector):
    """A collector of a service's calls, which `CallTimes.intercept` measures; each sample has the labels `service`,
    which is `name`, and `method`.
    """

    def __init__(self, times: CallTimes, name: str) -> None:
        self._times, self._name = times, name

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; see prometheus_client."""
        labels = ["service", "method"]
        times = HistogramMetricFamily(CALL, "Calls that went well.", labels=labels)
        failures = CounterMetricFamily(CALL_FAILURES, "Calls that raised or were cancelled.", labels=labels)
        running = GaugeMetricFamily(CALLS_RUNNING, "Calls under way.", labels=labels)
        _add(times, failures, self._name, self._times.by_method)
        for method, number in tuple(self._times.running.items()):
            running.add_metric([self._name, method], number)
        yield times
        yield failures
        yield running

    def describe(self) -> Iterator[Metric]:
        """Yield no metrics, so that registering the collector does not collect; Prometheus does that when it asks."""
        return iter(())


class PoolCollector(Collector):
    """A collector of the pages that requests hold in an `aiote.kvcache.PagePool`; each sample has the label `pool`."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool, self._name = pool, name

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; see prometheus_client."""
        for name, text, value in POOL:
            family = GaugeMetricFamily(name, text, labels=["pool"])
            family.add_metric([self._name], value(self._pool))
            yield family

    def describe(self) -> Iterator[Metric]:
        """Yield no metrics, so that registering the collector does not collect; Prometheus does that when it asks."""
        return iter(())
