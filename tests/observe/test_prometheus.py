"""What Prometheus is told: names by its conventions, and numbers that are the engine's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aiote.kvcache import PagePool
from aiote.observe.latency import Latencies
from aiote.observe.prometheus import CALLS, DESCRIBED, METRICS, POOL, EngineCollector, PoolCollector
from support.engines.opening import across, linked

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "_static" / "grafana.json"
ALL = (*METRICS, *CALLS, *(name for name, *_ in POOL))


NIXL = {f"agent_{name}" for name in ("tx_bytes", "rx_bytes", "tx_requests_num", "rx_requests_num", "errors_total")}
NIXL |= {f"agent_{name}" for name in ("memory_registered", "memory_deregistered", "xfer_time", "xfer_post_time")}
"""What NIXL's exporter for Prometheus has of transfers, by its README."""


def told(registry: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return each sample by its name and labels, as a scraper reads them."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "engine"))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


async def test_the_numbers_are_the_engine_s():
    async with linked("sim", ["sim0", "sim1"]) as (left, right):
        registry, latencies = CollectorRegistry(), Latencies(left, every=1, verbs=True)
        registry.register(EngineCollector(left, latencies=latencies))
        source, target = left.register(bytearray(1 << 20)), across(left, right, bytearray(1 << 20))
        await left.write(source, target)
        samples, counts = told(registry), left.statistics()
        by_rail = samples["aiote_rail_carried_bytes_total"]
        assert by_rail == {(("rail", rail.name),): n for rail, n in zip(left.rails, counts.carried, strict=True)}
        assert sum(by_rail.values()) == 1 << 20
        assert sum(samples["aiote_rail_operations_total"].values()) == sum(counts.operations) == counts.completed
        assert samples["aiote_peers"] == {(): 1}
        assert samples["aiote_registered_bytes"] == {(): 1 << 20}
        assert samples["aiote_events_total"][(("event", "peer.connected"),)] == 1
        assert (
            sum(samples["aiote_rail_request_seconds_count"].values()) == sum(sum(t.buckets) for t in counts.times) > 0
        )
        assert samples["aiote_rail_request_seconds_sum"][(("rail", "sim0"),)] == counts.times[0].sum_ns * 1e-9
        assert set(samples["aiote_rail_retries_total"].values()) == set(counts.retries)
        assert samples["aiote_registrations_total"] == {(): 1}
        assert samples["aiote_await_seconds_count"][(("verb", "write"),)] == 1
        assert samples["aiote_await_seconds_bucket"][(("le", "+Inf"), ("verb", "write"))] == 1
        assert "aiote_rail_served_bytes_total" not in samples or samples["aiote_rail_served_bytes_total"]
        await left.aclose()
        assert told(registry) == {}


async def test_every_metric_that_is_named_is_told_and_no_other():
    async with linked("local") as (left, _):
        registry = CollectorRegistry()
        registry.register(EngineCollector(left, "it", Latencies(left, verbs=True)))
        assert set(told(registry)) == set(METRICS)
        assert b'engine="it"' in generate_latest(registry)


async def test_pages_that_requests_hold_are_told():
    pool, registry = PagePool(10, 4, 4), CollectorRegistry()
    registry.register(PoolCollector(pool, "decode"))
    async with pool.lend(3), pool.lend(4):
        samples = {name: each[(("pool", "decode"),)] for name, each in told(registry).items()}
    assert samples == dict(zip((name for name, *_ in POOL), (10, 7, 2, 0), strict=True))
    assert told(registry)["aiote_kvcache_pages_held"] == {(("pool", "decode"),): 0}


@pytest.mark.parametrize("name", ALL)
def test_names_follow_the_conventions(name):
    assert re.fullmatch(r"aiote_[a-z]+(_[a-z]+)*", name)
    words = set(name.removesuffix("_total").split("_"))
    assert not words & {"ms", "us", "kib", "mib", "gib", "percent", "count", "sum", "bucket"} or "seconds" in words


def test_counters_end_in_total_and_gauges_do_not():
    for described in DESCRIBED:
        assert not described.name.endswith("_total")
        assert described.text.endswith(".")
        assert (described.name + "_total" in METRICS) is (described.kind == "counter")


def test_the_page_has_every_metric():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    tables, _, beside_nixl = page.partition("## NIXL's telemetry")
    named = {re.sub(r"(_seconds)_(bucket|count|sum)$", r"\1", name) for name in ALL}
    assert set(re.findall(r"`(aiote_[a-z_]+)`", tables)) == named
    assert set(re.findall(r"`(aiote_[a-z_]+)`", beside_nixl)) <= named
    assert set(re.findall(r"`(agent_[a-z_]+)`", beside_nixl)) == NIXL


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(asked) >= 8
    for expression in asked:
        names = set(re.findall(r"aiote_[a-z_]+", expression))
        assert names
        assert names <= set(ALL), expression
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
