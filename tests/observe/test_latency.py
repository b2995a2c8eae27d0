"""Histograms of awaits: buckets that hold what they say, and verbs that are left alone."""

from __future__ import annotations

import math
from fractions import Fraction

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.observe.latency import BOUNDS, Histogram, Latencies
from aiote.observe.wrapping import VERBS, wrap_verbs
from aiote_native.engine.progress import bucket
from support.engines.opening import across, linked


@given(st.lists(st.integers(0, 1 << 45), min_size=1))
def test_a_sample_is_in_the_first_bucket_that_is_long_enough(samples):
    histogram, bounds = Histogram(), [Fraction(2**n, 10**6) for n in range(len(BOUNDS))]
    for ns in samples:
        histogram.add(ns)
    wanted = [0] * (len(BOUNDS) + 1)
    for ns in samples:
        wanted[next((i for i, bound in enumerate(bounds) if Fraction(ns, 10**9) <= bound), len(bounds))] += 1
    assert histogram.buckets == wanted
    assert (histogram.count, histogram.sum_ns) == (len(samples), sum(samples))
    assert tuple(map(float, bounds)) == BOUNDS


@given(st.integers(0, (1 << 64) - 1))
def test_the_native_buckets_are_the_same(ns):
    histogram = Histogram()
    histogram.add(ns)
    assert histogram.buckets.index(1) == bucket(ns)


@given(st.lists(st.integers(0, 1 << 45), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_bound_of_its_sample_s_bucket(samples, share):
    histogram = Histogram()
    for ns in samples:
        histogram.add(ns)
    at = sorted(samples)[math.ceil(share * len(samples)) - 1]
    assert histogram.quantile(share) == next((b for b in BOUNDS if at * 1e-9 <= b * (1 + 1e-12)), math.inf)
    assert Histogram().quantile(share) == 0


async def test_one_await_in_so_many_is_timed_and_failures_are_counted_apart():
    async with linked("sim") as (left, right):
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        latencies = Latencies(left, every=4, verbs=True)
        for _ in range(9):
            await left.write(source, target)
        await left.send(right.address, b"x")
        assert {name: one.count for name, one in latencies.by_verb.items() if one.count} == {"write": 3, "send": 1}
        with pytest.raises(aiote.UsageError):
            await left.read(target, left.register(bytearray(1)))
        with anyio.move_on_after(0):
            await left.scatter(await left.peer_group([right.address]), [])
        assert latencies.by_verb["read"].failures == 1
        latencies.close()
        latencies.close()
        await left.write(source, target)
        assert latencies.by_verb["write"].count == 3


@pytest.mark.parametrize("provider", ["sim", "local", "socket", "tcp"])
@pytest.mark.parametrize("progress", ["adaptive", "thread"])
async def test_work_requests_of_each_kind_of_rail_are_timed(provider, progress):
    async with linked(provider, progress=progress) as (left, right):
        assert left.statistics().times == ()
        source, target = left.register(bytearray(1 << 16)), across(left, right, bytearray(1 << 16))
        left.time_rails(1)
        for _ in range(50):
            await left.write(source, target)
            await left.send(right.address, b"x")
            await right.recv()
        await left.read(target, source)
        counts = left.statistics()
        times = counts.times
        assert len(times) == len(left.rails)
        assert 100 <= sum(map(sum, (one.buckets for one in times))) <= counts.completed
        assert all(one.sum_ns > 0 for one in times if any(one.buckets))
        left.time_rails(0)
        for _ in range(50):
            await left.write(source, target)
        assert left.statistics().times == times
        left.time_rails(3)
        for _ in range(30):
            await left.write(source, target)
        again = sum(sum(one.buckets) for one in left.statistics().times) - sum(sum(one.buckets) for one in times)
        assert 10 <= again <= 30
        assert left.statistics().retries == (0,) * len(left.rails) or left.statistics().refused


async def test_without_verbs_only_rails_are_timed():
    async with linked("local") as (left, right):
        latencies = Latencies(left, every=1)
        await left.write(left.register(bytearray(8)), across(left, right, bytearray(8)))
        assert not latencies.by_verb
        assert not set(VERBS) & set(vars(left))
        before = left.statistics().times
        assert any(map(sum, (one.buckets for one in before)))
        latencies.close()
        await left.send(right.address, b"x")
        assert left.statistics().times == before


async def test_a_peer_that_comes_later_is_timed_and_what_is_under_way_goes_on():
    async with linked("local") as (left, right):
        source, target = left.register(bytearray(1 << 22)), across(left, right, bytearray(1 << 22))
        writes = [left.submit_write(source, target) for _ in range(8)]
        left.time_rails(1)
        for write in writes:
            await write
        left.time_rails(0)
        async with aiote.open_engine("local") as third:
            left.time_rails(1)
            before = left.statistics().times
            await left.connect(third.address)
            await left.write(source[:1], across(left, third, bytearray(1)))
            now = left.statistics().times
            assert sum(map(sum, (one.buckets for one in now))) > sum(map(sum, (one.buckets for one in before)))


@pytest.mark.parametrize("every", [-1, 1 << 32, 1.5, "2"])
async def test_an_engine_refuses_a_share_that_is_none(every):
    async with linked("sim") as (left, _):
        with pytest.raises(aiote.UsageError, match="every"):
            left.time_rails(every)
    with pytest.raises(aiote.ClosedError):
        left.time_rails(1)


async def test_an_engine_without_wrappers_has_its_own_verbs():
    async with linked("sim") as (left, _):
        assert not set(VERBS) & set(vars(left))
        order: list[str] = []
        stops = []
        for word in "ab":

            def wrap(name, verb, word=word):
                def call(*args):
                    order.append(word)
                    return verb(*args)

                return call

            stops.append(wrap_verbs(left, wrap))
        await left.send(next(iter(left.peers)), b"x")
        assert order == ["b", "a"]
        stops[0]()
        await left.send(next(iter(left.peers)), b"x")
        assert order == ["b", "a", "b"]
        stops[1]()
        stops[1]()
        assert not set(VERBS) & set(vars(left))


@pytest.mark.parametrize("every", [0, -1, 1.5, "2"])
async def test_a_share_that_is_none_is_refused(every):
    async with linked("sim") as (left, _):
        with pytest.raises(aiote.UsageError, match="expected 1"):
            Latencies(left, every=every)
        assert not set(VERBS) & set(vars(left))
