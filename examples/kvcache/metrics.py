"""What Prometheus is told: GET /metrics of each server, with the token as the scraper's `authorization`.

Counts are those that the servers keep anyway, read when somebody asks; the router keeps histograms besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Of the numbers that `/stats` has: what it is called here, and what it is.
COUNTERS = {
    "tokens": ("tokens", "Tokens computed (prefill) or generated (decode)."),
    "cached_tokens": ("cached_tokens", "Tokens of prompts that were found in kept pages."),
    "done": ("requests_done", "Requests that were served."),
    "failed": ("requests_failed", "Requests that failed."),
    "cancelled": ("requests_cancelled", "Requests that were not wanted any more, or not moved."),
    "left": ("requests_left", "Requests whose client left."),
    "retried": ("requests_retried", "Tries that failed and were repeated elsewhere."),
    "failovers": ("failovers", "Requests that not the first prefill server has delivered."),
    "bytes_written": ("written_bytes", "Bytes of caches that decode servers were given."),
    "bytes_arrived": ("arrived_bytes", "Bytes of caches that arrived."),
    "steps": ("steps", "Steps of the batch: a chunk (prefill) or a token (decode) of each request in it."),
}
GAUGES = {
    "open": ("requests_open", "Requests under way."),
    "requests": ("requests_open", "Requests under way."),
    "queue": ("requests_waiting", "Requests that wait for their first token."),
    "waiting": ("requests_waiting", "Requests that wait for pages or for their turn."),
    "running": ("requests_running", "Requests that are in the batch."),
    "pages": ("pages", "Pages of the cache."),
    "pages_held": ("pages_held", "Pages that requests have."),
    "pages_kept": ("pages_kept", "Pages that are kept for prompts that begin alike."),
    "transfers": ("transfers", "Transfers that are queued or under way."),
    "peers": ("peers", "Engines that are connected."),
}


class Latencies:
    """The router's histograms, in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "buckets": SECONDS}
        self.first_token = Histogram("kvcache_first_token_seconds", "From a request to its first token.", **made)
        self.request = Histogram("kvcache_request_seconds", "From a request to its end.", **made)


class _Numbers(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Yield them; see prometheus_client."""
        return self._families


def of_member(role: str, stats: Mapping[str, Any]) -> list[Metric]:
    """Return the numbers of a server, each with its role, and those of its rails."""
    out: list[Metric] = []
    for table, kind in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
        for name, (called, says) in table.items():
            if name in stats:
                family = kind(f"kvcache_{called}", says, labels=["role"])
                family.add_metric([role], stats[name])
                out.append(family)
    carried = CounterMetricFamily(
        "kvcache_rail_carried_bytes", "Bytes that a rail has carried.", labels=["role", "rail"]
    )
    for rail in stats.get("rails", ()):
        carried.add_metric([role, rail["name"]], rail["bytes_carried"])
    return [*out, carried]


def of_members(counts: Mapping[str, int]) -> Metric:
    """Return how many servers of each role are there."""
    family = GaugeMetricFamily("kvcache_members", "Servers that are there.", labels=["role"])
    for role, count in counts.items():
        family.add_metric([role], count)
    return family


def response(families: Iterable[Metric], latencies: Latencies | None = None) -> Response:
    """Return numbers in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(families))
    text = generate_latest(registry) + (generate_latest(latencies.registry) if latencies is not None else b"")
    return Response(text, media_type=CONTENT_TYPE_LATEST)
