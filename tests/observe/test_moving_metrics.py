"""Each metric moves when its event happens: a scenario causes it, and a scraper sees the number grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import aiote
from aiote import service
from aiote.observe import CallTimes
from aiote.observe.latency import Latencies
from aiote.observe.prometheus import CALLS, METRICS, CallCollector, EngineCollector
from aiote.testing import Fabric, NicModel
from aiote.transfers import inbox
from support.engines.opening import across, fabric, linked, opened, pair, until

MIB = 1 << 20
SCENARIOS: dict[str, tuple[set[str], Callable[[], Awaitable[None]]]] = {}


def moves(*names: str) -> Callable[[Any], Any]:
    """Have a scenario for these metrics; without the prefix that all have."""
    return lambda scenario: SCENARIOS.setdefault(scenario.__name__, ({f"aiote_{name}" for name in names}, scenario))[1]


class Scraper:
    """What Prometheus reads of a collector: the sum of each sample over its labels."""

    def __init__(self, *collectors: Any) -> None:
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        self.before = self.now()

    def now(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(generate_latest(self._registry).decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    async def sees(self, scenario: str, grown: int = 1) -> None:
        """Wait until every metric of a scenario has grown (or, with -1, has fallen)."""
        names = SCENARIOS[scenario][0]

        def moved() -> bool:
            now = self.now()
            return all((now.get(name, 0) - self.before.get(name, 0)) * grown > 0 for name in names)

        with anyio.move_on_after(20):
            await until(moved)
            return
        raise AssertionError({name: (self.before.get(name), self.now().get(name)) for name in names})


@asynccontextmanager
async def world(provider: str = "local", **settings: Any) -> AsyncIterator[tuple[Any, Any, Any, Any]]:
    async with linked(provider, **settings) as (left, right):
        yield left, right, left.register(bytearray(MIB)), across(left, right, bytearray(MIB))


@moves(
    *("rail_carried_bytes_total", "rail_operations_total", "work_requests_posted_total"),
    *("work_requests_completed_total", "loop_rounds_total"),
    *(f"{name}_seconds_{part}" for name in ("rail_request", "await") for part in ("bucket", "count", "sum")),
)
async def write() -> None:
    async with world() as (left, _, source, target):
        scraper = Scraper(EngineCollector(left, "it", Latencies(left, every=1, verbs=True)))
        await left.write(source, target)
        await scraper.sees("write")


@moves(*(f"submit_seconds_{part}" for part in ("bucket", "count", "sum")), "submit_failures_total")
async def submit() -> None:
    async with world() as (left, _, source, target):
        scraper = Scraper(EngineCollector(left, "it", Latencies(left, every=1, verbs=True)))
        await left.submit_write(source, target)
        with pytest.raises(aiote.UsageError):
            left.submit_write(source, target[:1])
        await scraper.sees("submit")


@moves("await_failures_total")
async def failed_await() -> None:
    async with world() as (left, _, source, target):
        scraper = Scraper(EngineCollector(left, "it", Latencies(left, every=1, verbs=True)))
        with pytest.raises(aiote.UsageError):
            await left.write(source, target[:1])
        await scraper.sees("failed_await")


@moves("rail_served_bytes_total", "immediates_total", "counters")
async def counted_write() -> None:
    async with world() as (left, right, source, target):
        scraper = Scraper(EngineCollector(right))
        await left.write_imm(source, target, 7)
        await scraper.sees("counted_write")


@moves("immediates_uninvited_total")
async def uninvited_write() -> None:
    async with world() as (left, right, source, target):
        scraper = Scraper(EngineCollector(right))
        with right.reserve_immediates(1, sources=[]) as block:
            await left.write_imm(source, target, block.first)
            await scraper.sees("uninvited_write")


@moves("rail_depth", "work_requests_outstanding", "transfers_queued")
async def many_writes() -> None:
    async with world("sim") as (left, _, source, target):
        scraper = Scraper(EngineCollector(left))
        writes = [left.submit_write(source, target) for _ in range(2000)]
        await scraper.sees("many_writes")
        for each in writes:
            await each


@moves("rail_retries_total")
async def full_rail() -> None:
    network = Fabric(seed=1, model=NicModel(name="busy", refusals=0.5))
    async with network.open_engine() as left, network.open_engine() as right:
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        scraper = Scraper(EngineCollector(left))
        for _ in range(20):
            await left.write(source, target)
        await scraper.sees("full_rail")
    network.close()


@moves("counter_waits")
async def waiting() -> None:
    async with world() as (_, right, *_), anyio.create_task_group() as group:
        scraper = Scraper(EngineCollector(right))
        group.start_soon(right.counter(3).wait, 1)
        await scraper.sees("waiting")
        group.cancel_scope.cancel()


@moves(*(f"wait_seconds_{part}" for part in ("bucket", "count", "sum")))
async def waits_that_sleep() -> None:
    async with world() as (left, right, source, target):
        scraper = Scraper(EngineCollector(right, "it", Latencies(right, every=1)))
        with right.counter(3) as arrivals:
            async with anyio.create_task_group() as group:
                group.start_soon(arrivals.wait, 1)
                await until(lambda: right.statistics().waits)
                await left.write_imm(source, target, 3)
        await scraper.sees("waits_that_sleep")


@moves("inbox_messages")
async def message() -> None:
    async with world() as (left, right, *_):
        scraper = Scraper(EngineCollector(right))
        await left.send(right.address, b"x")
        await scraper.sees("message")


@moves("messages_dropped_total")
async def lost_peers() -> None:
    async with opened("local") as right:
        scraper = Scraper(EngineCollector(right))
        for number in range(2):
            async with opened("local") as left:
                await left.send(right.address, b"x")
                await until(lambda number=number: right.statistics().inbox == number + 1)
            await until(lambda: not right.peers)
        await scraper.sees("lost_peers")


@moves("peer_wakeups_total", "loop_sleeps_total")
async def sleeping_peers() -> None:
    async with world(spin_us=0) as (left, right, source, target):
        scraper = Scraper(EngineCollector(left))
        with right.counter(3) as arrivals:
            for _ in range(20):
                async with anyio.create_task_group() as group:
                    before = right.statistics().sleeps
                    group.start_soon(arrivals.wait, 1)
                    await until(lambda before=before: right.statistics().sleeps > before)
                    await left.write_imm(source, target, 3)
        await scraper.sees("sleeping_peers")


@moves("peers", "events_total")
async def connection() -> None:
    async with pair("local") as (left, right):
        scraper = Scraper(EngineCollector(left))
        await left.connect(right.address)
        await scraper.sees("connection")


@moves("regions", "registered_bytes", "registrations_total")
async def registration() -> None:
    async with world() as (left, *_):
        scraper = Scraper(EngineCollector(left))
        left.register(bytearray(8))
        await scraper.sees("registration")


@moves("leases")
async def lease() -> None:
    async with world() as (left, right, source, _):
        scraper = Scraper(EngineCollector(left))
        async with source.lease(slice(0, 64), right.address):
            await scraper.sees("lease")
        assert scraper.now()["aiote_leases"] == 0


@moves("heartbeats_sent_total", "heartbeats_heard_total")
async def heartbeats() -> None:
    async with world("socket", heartbeat_interval=0.05, heartbeat_timeout=30) as (left, *_):
        await Scraper(EngineCollector(left)).sees("heartbeats")


@moves("rail_failovers_total")
async def failover() -> None:
    async with linked("sim", ["sim0", "sim1"]) as (left, right):
        scraper = Scraper(EngineCollector(left))
        source, target = left.register(bytearray(MIB)), across(left, right, bytearray(MIB))
        fabric().kill_rail(left, 0)
        await left.write(source, target)
        await scraper.sees("failover")


@moves("rail_up")
async def rail_down() -> None:
    async with linked("sim", ["sim0", "sim1"]) as (left, _):
        scraper = Scraper(EngineCollector(left))
        fabric().kill_rail(left, 0)
        await scraper.sees("rail_down", -1)


class Slow(service.Service):
    """What is called."""

    @service.method
    async def wait(self, how: str) -> None:
        """Return, fail, or wait for ever."""
        if how == "fail":
            raise ValueError("as asked")
        if how == "wait":
            await anyio.sleep_forever()


@moves(*(name.removeprefix("aiote_") for name in CALLS))
async def calls() -> None:
    times = CallTimes()
    scraper = Scraper(CallCollector(times, "slow"))
    async with pair("local") as (left, right), service.serve(right, Slow(), interceptors=[times.intercept]):
        client = service.client(left, right.address, Slow)
        await client.wait("return")
        with pytest.raises(service.RemoteError):
            await client.wait("fail")
        async with anyio.create_task_group() as group:
            group.start_soon(client.wait, "wait")
            await scraper.sees("calls")
            group.cancel_scope.cancel()
        await until(lambda: not any(times.running.values()))


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_scraper_sees_the_metric_move(scenario, monkeypatch):
    monkeypatch.setattr(inbox, "MAX_DEPARTED", 1)
    await SCENARIOS[scenario][1]()


def test_every_metric_has_a_scenario():
    assert set().union(*(names for names, _ in SCENARIOS.values())) == {*METRICS, *CALLS}
