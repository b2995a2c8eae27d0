"""What every kind of rail does with writes that are cut: over one rail, several, and a different number on each side.

A rail set of one rail may also be joined by several endpoint pairs, so that striping is tested where no NIC can be
opened twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from aiote.core.striping import plan
from aiote.rails import PeerLink
from support.rails.rail_pair import KINDS, Kind, Memory, Pair, Rails, Side, filled, opened

pytestmark = pytest.mark.libfabric

IMM = 0x1234567
LARGEST = 1000
SIZES = (0, 1, 999, 1000, 1001, 10_000, 16_000, 16_001, 40_000, 123_457)
TWICE = [kind for kind in KINDS if kind.nic]
modes = pytest.mark.parametrize("threaded", [False, True], ids=["loop", "thread"])
several = pytest.mark.parametrize("kind", TWICE, ids=lambda kind: kind.provider)


def exchange(rails: Rails, a: Side, b: Side, link: PeerLink, sizes: tuple[int, ...] = SIZES) -> None:
    """Write each size with an immediate and with none, read it back, and expect one count for each counted write."""
    handle, source = b.count(IMM), a.register(filled(max(sizes)))
    for size in sizes:
        target, back = b.register(size + 2), a.register(size + 2)
        content = np.concatenate([[0], source.array[:size], [0]])
        seen: list[bool] = []
        counted = a.write(link, source, target.remote, size, at=(0, 1), imm=IMM)
        rails.arrived(b.wait(handle, 1, partial(look, seen, target, content)))
        rails.finish(counted, a.write(link, back, target.remote, size, at=(1, 1), reads=True))
        assert seen == [True]
        assert np.array_equal(back.array, content)
        target.array[:] = 0
        rails.finish(plain := a.write(link, source, target.remote, size, at=(0, 1)))
        assert np.array_equal(target.array, content)
        assert counted.confirmed_bytes == plain.confirmed_bytes == size
    rails.rest()
    assert handle.value == 0
    # A stripe of a write that counts less than one would leave its rest behind.
    handle.close()
    assert not b.core.is_counted(IMM)


def look(seen: list[bool], target: Memory, content: np.ndarray, _wait: object) -> None:
    seen.append(np.array_equal(target.array, content))


def test_a_largest_message_splits_and_counts_exactly(rails: Rails):
    """Up to sixteen messages carry the immediate; what needs more goes first, without."""
    a, b = rails.side(largest=LARGEST), rails.side(largest=LARGEST)
    link, _ = rails.join(a, b)
    exchange(rails, a, b, link)
    stripes = [len(plan(size, 1, LARGEST, 16384, True).stripes) for size in SIZES]
    assert max(stripes) > 100
    assert b.core.statistics()["immediates"] == sum(min(16, count) for count in stripes)


def test_pages_over_the_largest_message_arrive_and_count_one_each(rails: Rails):
    a, b = rails.side(largest=LARGEST), rails.side(largest=LARGEST)
    link, _ = rails.join(a, b)
    handle = b.count(IMM)
    for page in (1000, 2500, 20_000):
        source, target = a.register(filled(10 * page)), b.register(10 * page)
        order = random.Random(page).sample(range(10), 10)
        waiting = b.wait(handle, 10)
        rails.finish(a.write_pages(link, source, order, target.remote, range(10), page, imm=IMM))
        rails.arrived(waiting)
        assert np.array_equal(target.array.reshape(10, page), source.array.reshape(10, page)[order])
    rails.rest()
    assert handle.value == 0


def test_several_endpoint_pairs_share_one_write(rails: Rails):
    a, b = rails.side(smallest=1), rails.side(smallest=1)
    link, _ = rails.join(a, b, pairs=[(0, 0)] * 3)
    exchange(rails, a, b, link)
    assert b.core.statistics()["immediates"] == sum(len(plan(size, 3, 2**63, 1, True).tail) for size in SIZES)


@pytest.fixture
def two(kind: Kind, threaded: bool) -> Iterator[Rails]:
    with opened(kind, threaded, smallest=1) as rails:
        yield rails


@several
@modes
@pytest.mark.parametrize("counts", [(2, 2), (1, 2), (2, 1), (2, 3)], ids=lambda counts: "{} to {}".format(*counts))
def test_two_rails_count_as_one_does(two: Rails, counts):
    """Whatever number of rails each side has, the bytes and the counts are those of a single rail."""
    a, b = two.side(counts[0]), two.side(counts[1])
    assert [len(side.rail_set.rails) for side in (a, b)] == list(counts)
    there, back = two.join(a, b)
    exchange(two, a, b, there)
    exchange(two, b, a, back)
    lanes = max(counts)
    stripes = sum(len(plan(size, lanes, 2**63, 1, True).tail) for size in SIZES)
    assert [side.core.statistics()["immediates"] for side in (a, b)] == [stripes, stripes]
    assert stripes > len(SIZES)


@several
@modes
def test_writes_over_two_rails_and_a_largest_message_are_exact(two: Rails):
    a, b = two.side(2, largest=LARGEST), two.side(1, largest=LARGEST)
    there, back = two.join(a, b)
    exchange(two, a, b, there)
    exchange(two, b, a, back)


@several
@modes
def test_every_stripe_uses_the_keys_of_its_own_rail(two: Rails):
    """Each rail has its own key for the same memory; a stripe with another's would be refused."""
    a, b = two.side(2), two.side(2)
    link, _ = two.join(a, b)
    source, target = a.register(filled(100_000)), b.register(100_000)
    assert len(target.local.keys) == 2
    assert target.local.keys[0] != target.local.keys[1]
    two.finish(*(a.write(link, source, target.remote, 1000, at=(i * 1000, i * 1000)) for i in range(100)))
    assert np.array_equal(source.array, target.array)


@several
@modes
def test_memory_that_some_rail_has_no_key_for_is_refused(two: Rails):
    one, other, a = two.side(1), two.side(2), two.side(2)
    link, _ = two.join(a, other)
    source, target = a.register(filled(64)), one.register(64)
    with pytest.raises(ValueError, match="fewer rails"):
        a.write(link, source, target.remote)
    two.rest()
    assert source.local.in_flight == 0
    assert not target.array.any()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.provider)
def test_results_do_not_depend_on_how_a_write_is_split(kind: Kind):
    """The same random writes, over one endpoint pair and over four with tiny messages: same bytes, same counts."""
    results = []
    for pairs, largest, smallest in ((1, 0, 1 << 16), (4, 777, 1)):
        draw = random.Random(5)
        with opened(kind, smallest=smallest) as rails:
            a, b = rails.side(largest=largest), rails.side(largest=largest)
            pair = Pair(rails, a, b, *rails.join(a, b, pairs=[(0, 0)] * pairs))
            source, target = a.register(filled(100_000)), b.register(100_000)
            starts = sorted(draw.sample(range(100_000), 40))
            for start, end in itertools.pairwise(starts):
                near = draw.randrange(100_000 - (end - start))
                a.write(pair.ab, source, target.remote, end - start, at=(near, start), imm=draw.randrange(5))
            rails.drive(lambda a=a: len(a.ended) == 39)
            rails.rest()
            results.append((target.array.tobytes(), [b.count(imm).value for imm in range(5)]))
    assert results[0] == results[1]
    assert sum(results[0][1]) == 39


def test_each_side_splits_by_its_own_largest_message(rails: Rails):
    """Each side cuts what it posts by its own largest message; the other needs to know nothing of it."""
    a, b = rails.side(largest=100), rails.side()
    pair = Pair(rails, a, b, *rails.join(a, b))
    exchange(rails, a, b, pair.ab, sizes=(5000,))
    exchange(rails, b, a, pair.ba, sizes=(5000,))
    assert b.core.statistics()["immediates"] == 16
    assert a.core.statistics()["immediates"] == 1


def test_a_link_that_is_closed_between_head_and_tail_ends_its_writes(rails: Rails):
    """The head's last completion, taken by the closing itself, once queued a tail that nobody was left to post."""
    a, b = rails.side(largest=LARGEST), rails.side(largest=LARGEST)
    source, target = a.register(filled(40 * LARGEST)), b.register(40 * LARGEST)
    for turns in range(12):
        ab, _ = rails.join(a, b)
        writes = [a.write(ab, source, target.remote, imm=IMM) for _ in range(3)]
        for _ in range(turns):
            b.turn(True)
        a.close_link(ab)
        a.core.reap()
        assert [write.is_over for write in writes] == [True] * 3
    source.local.close()


def test_the_tail_waits_until_the_head_has_arrived(rails: Rails):
    """No order holds among writes: a count that came with the head still under way would say too much."""
    a, b = rails.side(largest=LARGEST), rails.side(largest=LARGEST)
    link, _ = rails.join(a, b)
    source, target = a.register(filled(40 * LARGEST)), b.register(40 * LARGEST)
    rails.finish(a.write(link, source, target.remote, LARGEST))
    before = a.core.statistics()
    write = a.write(link, source, target.remote, imm=IMM)

    def over() -> bool:
        now = a.core.statistics()
        assert now["posted"] - before["posted"] <= 24 or now["completed"] - before["completed"] >= 24
        return write.is_over

    assert not over()
    rails.drive(over)
    assert a.core.statistics()["posted"] - before["posted"] == 40


def test_the_tail_goes_over_every_nic_that_the_head_went_over():
    """A completion does not prove that bytes are in memory; what the same NIC delivers after them does."""
    with opened(next(kind for kind in KINDS if kind.provider == "sim"), smallest=1, largest=LARGEST) as rails:
        a, b = rails.side(3), rails.side(3)
        link, _ = rails.join(a, b)
        handle, source = b.count(IMM), a.register(filled(100_000))
        target = b.register(100_000)
        world = rails.world
        for size, pages in ((20_000, 1), (50_000, 2), (100_000, 1), (17_000, 3)):
            before = len(world.seen())
            waiting = b.wait(handle, pages)
            rails.finish(a.write_pages(link, source, range(pages), target.remote, range(pages), size // pages, imm=IMM))
            rails.arrived(waiting)
            seen = world.seen()[before:]
            counted = {number for _, what, _, _, number, _, _ in seen if what == "deliver"}
            heads = {rail for _, what, _, rail, number, _, _ in seen if what == "place" and number not in counted}
            tails = [rail for _, what, _, rail, _, _, _ in seen if what == "deliver"]
            assert heads <= set(tails), (size, pages)
            if size // pages > 16 * LARGEST:
                assert heads
            if pages > 1 and heads:
                # Of each page, for each is counted by itself.
                assert all(tails.count(rail) >= pages for rail in heads)
            rails.rest()


@pytest.mark.parametrize(
    "kind", [kind for kind in TWICE if kind.provider in ("socket", "sim")], ids=lambda k: k.provider
)
@pytest.mark.parametrize("imm", [-1, IMM])
def test_small_pages_go_over_all_rails(kind: Kind, imm: int):
    """Counted ones as well as others: nothing binds them to the rail that took the first."""
    page, count = 16_384, 512
    with opened(kind) as rails:
        a, b = rails.side(2), rails.side(2)
        link, _ = rails.join(a, b)
        source, target = a.register(filled(page * count)), b.register(page * count)
        before = link.ended()
        numbers = range(count)
        rails.finish(a.write_pages(link, source, numbers, target.remote, numbers, page, imm=imm))
        over = [now - was for now, was in zip(link.ended(), before, strict=True)]
        assert np.array_equal(target.array, source.array)
        assert min(over) > sum(over) / 5, over
