"""What every kind of rail does with bytes: writes, reads, immediates and pages between rail sets of one process."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from aiote.rails import RemoteMemory
from support.rails.rail_pair import Memory, Pair, Rails, Side, filled

pytestmark = pytest.mark.libfabric

SIZES = (0, 1, 7, 64, 4096, 65_537, 1_000_003)
IMM = 0xABCDEF


def only(target: Memory, start: int, expected: np.ndarray) -> bool:
    """Tell whether the target holds these bytes from `start` on and zeros everywhere else."""
    end = start + len(expected)
    inside = np.array_equal(target.array[start:end], expected)
    return inside and not target.array[:start].any() and not target.array[end:].any()


@pytest.mark.parametrize("imm", [-1, IMM], ids=["plain", "counted"])
def test_a_write_arrives_exactly_and_nowhere_else(pair: Pair, imm):
    source, handle = pair.a.register(filled(max(SIZES) + 99)), pair.b.count(IMM)
    for number, size in enumerate(SIZES, 1):
        target = pair.b.register(size + 64)
        done = pair.a.write(pair.ab, source, target.remote, size, at=(number, 33), imm=imm)
        pair.rails.finish(done)
        assert (done.total_bytes, done.confirmed_bytes) == (size, size)
        pair.rails.drive(lambda number=number: handle.value == (number if imm >= 0 else 0))
        assert only(target, 33, source.array[number : number + size])


def test_a_count_comes_after_its_data(pair: Pair):
    """Whoever is told of a count finds the bytes in place, at that very moment."""
    source, handle = pair.a.register(filled(max(SIZES))), pair.b.count(IMM)
    target, seen = pair.b.register(max(SIZES)), []
    for size in SIZES * 4:
        target.array[:] = 0
        waiting = pair.b.wait(handle, 1, lambda _, size=size: seen.append(only(target, 0, source.array[:size])))
        pair.rails.finish(pair.a.write(pair.ab, source, target.remote, size, imm=IMM))
        pair.rails.arrived(waiting)
    assert seen == [True] * len(SIZES) * 4


def test_a_write_is_over_when_its_data_is_at_the_target(pair: Pair):
    """Not when a socket's buffer took it: the sender runs alone first, and would then be told too early."""
    source, target, seen = pair.a.register(filled(max(SIZES))), pair.b.register(max(SIZES)), []
    for size in SIZES * 3:
        target.array[:] = 0
        done = pair.a.write(pair.ab, source, target.remote, size)
        done.on_over = lambda _, size=size: seen.append(only(target, 0, source.array[:size]))
        for _ in range(50):
            pair.a.turn(True)
        pair.rails.finish(done)
    assert seen == [True] * len(SIZES) * 3


def test_an_immediate_alone_counts(pair: Pair):
    handle = pair.b.count(IMM)
    pair.rails.finish(*(pair.a.write(pair.ab, imm=IMM) for _ in range(100)))
    pair.rails.arrived(pair.b.wait(handle, 100))
    pair.rails.rest()
    assert handle.value == 0
    assert not pair.a.core.is_counted(IMM)


def test_immediates_are_told_apart(pair: Pair):
    """All 28 bits arrive, in any order, each counted for itself; the sender's own count of them stays what it is."""
    numbers = [0, 1, 0xFFFFFFF, 0x8000000, *random.Random(1).sample(range(1 << 28), 200)]
    handles = {imm: pair.b.count(imm) for imm in numbers}
    for imm in numbers:
        for _ in range(imm % 3):
            pair.a.write(pair.ab, imm=imm)
    pair.rails.rest()
    assert {imm: handle.value for imm, handle in handles.items()} == {imm: imm % 3 for imm in numbers}
    assert pair.a.core.statistics()["immediates"] == 0


def test_counts_are_kept_that_arrive_before_anybody_asks(pair: Pair):
    pair.rails.finish(*(pair.a.write(pair.ab, imm=IMM) for _ in range(5)))
    pair.rails.rest()
    handle = pair.b.count(IMM)
    assert handle.value == 5
    pair.rails.arrived(pair.b.wait(handle, 2), pair.b.wait(handle, 3))
    assert handle.value == 0


def test_a_write_of_nothing_counts_and_writes_nothing(pair: Pair):
    source, target, handle = pair.a.register(filled(64)), pair.b.register(64), pair.b.count(IMM)
    plain = pair.a.write(pair.ab, source, target.remote, 0, at=(64, 64))
    counted = [pair.a.write(pair.ab, source, target.remote, 0, at=(3, 9), imm=IMM) for _ in range(7)]
    pair.rails.finish(plain, *counted)
    pair.rails.rest()
    assert handle.value == 7
    assert not target.array.any()


def test_a_read_fetches_exactly(pair: Pair):
    source = pair.b.register(filled(max(SIZES) + 99))
    for number, size in enumerate(SIZES, 1):
        target = pair.a.register(size + 64)
        pair.rails.finish(pair.a.write(pair.ab, target, source.remote, size, at=(33, number), reads=True))
        assert only(target, 33, source.array[number : number + size])


def test_a_read_is_over_when_its_data_is_here(pair: Pair):
    source, target, seen = pair.b.register(filled(max(SIZES))), pair.a.register(max(SIZES)), []
    for size in SIZES * 3:
        target.array[:] = 0
        done = pair.a.write(pair.ab, target, source.remote, size, reads=True)
        done.on_over = lambda _, size=size: seen.append(only(target, 0, source.array[:size]))
        pair.rails.finish(done)
    assert seen == [True] * len(SIZES) * 3


def moved(source: Memory, target: Memory, pages: tuple[list[int], list[int]], page: int, geometry: tuple[int, ...]):
    """Return what the target should hold after paged writes; geometry is (stride, offset) here and there."""
    expected = target.array.copy()
    near, near_at, far, far_at = geometry
    for here, there in zip(*pages, strict=True):
        start = near_at + here * near
        expected[far_at + there * far :][:page] = source.array[start : start + page]
    return expected


def test_pages_go_where_the_lists_say(pair: Pair):
    """Permutations, with strides and offsets that differ on both sides, and guard bytes between the pages."""
    handle, count = pair.b.count(IMM), 300
    for page, gap in itertools.product((1, 100, 4096), (0, 28)):
        draw, geometry = random.Random(page + gap), (page + 2 * gap, 5, page + gap, 11)
        source = pair.a.register(filled(5 + count * (page + 2 * gap)))
        target = pair.b.register(11 + count * (page + gap))
        here, there = draw.sample(range(count), 200), draw.sample(range(count), 200)
        expected = moved(source, target, (here, there), page, geometry)
        strides, at = geometry[::2], geometry[1::2]
        done = pair.a.write_pages(pair.ab, source, here, target.remote, there, page, strides=strides, at=at, imm=IMM)
        pair.rails.finish(done)
        assert done.confirmed_bytes == done.total_bytes == 200 * page
        pair.rails.arrived(pair.b.wait(handle, 200))
        assert np.array_equal(target.array, expected)
    pair.rails.rest()
    assert handle.value == 0


def test_pages_may_overlap_at_the_source(pair: Pair):
    """One page goes to many places, and pages of a stride below their length share bytes."""
    source, target = pair.a.register(filled(4096)), pair.b.register(64 * 512)
    sources = [number % 7 for number in range(64)]
    expected = moved(source, target, (sources, list(range(64))), 512, (100, 0, 512, 0))
    pair.rails.finish(pair.a.write_pages(pair.ab, source, sources, target.remote, range(64), 512, strides=(100, 512)))
    assert np.array_equal(target.array, expected)


def test_the_list_of_pages_is_copied(pair: Pair):
    source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
    numbers = np.arange(256, dtype=np.int64)
    done = pair.a.write_pages(pair.ab, source, numbers, target.remote, numbers, 4096)
    numbers[:] = 0
    pair.rails.finish(done)
    assert np.array_equal(target.array, source.array)


def test_no_pages_are_over_at_once_and_count_nothing(pair: Pair):
    source, target, handle = pair.a.register(filled(64)), pair.b.register(64), pair.b.count(IMM)
    done = pair.a.write_pages(pair.ab, source, [], target.remote, [], 16, imm=IMM)
    pair.rails.finish(done)
    empty = pair.a.write_pages(pair.ab, source, [0, 1], target.remote, [2, 3], 0, imm=IMM)
    pair.rails.finish(empty)
    pair.rails.rest()
    assert (handle.value, done.total_bytes, empty.total_bytes) == (2, 0, 0)
    assert not target.array.any()


def test_more_operations_than_a_queue_holds_all_end_and_arrive(pair: Pair):
    """Thousands at once: each ends once, each arrives, and none is lost to a full queue."""
    count = 3000
    source, target, handle = pair.a.register(filled(count * 8)), pair.b.register(count * 8), pair.b.count(IMM)
    done = [
        pair.a.write(pair.ab, source, target.remote, 8, at=(8 * i, 8 * (count - 1 - i)), imm=IMM) for i in range(count)
    ]
    assert pair.a.core.statistics()["queued"] > 0 or pair.rails.threaded
    pair.rails.finish(*done)
    pair.rails.arrived(pair.b.wait(handle, count))
    assert len(pair.a.ended) == count == len(set(pair.a.ended))
    assert np.array_equal(target.array.reshape(count, 8), source.array.reshape(count, 8)[::-1])
    assert pair.a.core.statistics()["outstanding"] == 0 == pair.a.core.statistics()["queued"]


class Traffic:
    """Random operations from one side to another, each with a place of its own, and what has to come of them."""

    def __init__(self, rails: Rails, here: Side, there: Side, link, back, seed: int) -> None:
        self.rails, self.here, self.there, self.link, self.back = rails, here, there, link, back
        self.draw, self.counts, self.sent, self.got = random.Random(seed), 0, [], []
        self.source, self.target = here.register(filled(1 << 20, seed)), there.register(1 << 20)
        self.fetched, self.origin = here.register(1 << 20), there.register(filled(1 << 20, seed + 1))
        self.handle = there.count(seed)
        self.expected, self.fetch, self.imm, self.next = self.target.array.copy(), self.fetched.array.copy(), seed, 0

    def start(self) -> None:
        kind, size = self.draw.choice("wcprm"), self.draw.choice((0, 1, 8, 500, 4096, 30_000))
        at = self.next, self.next
        if kind == "m":
            self.sent.append(self.draw.randbytes(self.draw.randrange(200)))
            self.here.send(self.link, self.sent[-1])
        elif kind == "r":
            self.here.write(self.link, self.fetched, self.origin.remote, size, at=at, reads=True)
            self.fetch[at[0] : at[0] + size] = self.origin.array[at[0] : at[0] + size]
        elif kind == "p":
            order = self.draw.sample(range(10), 10)
            page, imm = size // 10, self.imm
            self.here.write_pages(
                self.link, self.source, order, self.target.remote, range(10), page, strides=(page, page), at=at, imm=imm
            )
            for there, here in enumerate(order):
                start = at[0] + here * page
                self.expected[at[0] + there * page :][:page] = self.source.array[start : start + page]
            self.counts += 10
        else:
            self.here.write(
                self.link, self.source, self.target.remote, size, at=at, imm=self.imm if kind == "c" else -1
            )
            self.expected[at[0] : at[0] + size] = self.source.array[at[0] : at[0] + size]
            self.counts += kind == "c"
        self.next += size

    def collect(self) -> None:
        while (payload := self.there.take(self.back)) is not None:
            self.got.append(payload)

    def check(self) -> None:
        assert self.handle.value == self.counts
        assert np.array_equal(self.target.array, self.expected)
        assert np.array_equal(self.fetched.array, self.fetch)
        assert sorted(self.got) == sorted(self.sent)


def run(rails: Rails, flows: list[Traffic], count: int) -> None:
    """Run random traffic of all flows at once, started in bursts."""
    draw = random.Random(count)
    for number in range(count):
        for flow in flows:
            flow.start()
            flow.collect()
        if draw.random() < 0.2 or number == count - 1:
            rails.drive(lambda: True)
    total = sum(len(flow.sent) for flow in flows)

    def over() -> bool:
        for flow in flows:
            flow.collect()
        started = {flow.here.rail_set: flow.here for flow in flows}.values()
        ended = sum(len(side.ended) for side in started)
        return ended == count * len(flows) and sum(len(flow.got) for flow in flows) == total

    rails.drive(over)
    rails.rest()
    assert all(operation.errno == 0 for flow in flows for operation in flow.here.ended)
    for flow in flows:
        flow.check()


def test_traffic_in_both_directions_at_once_is_exact(pair: Pair):
    flows = [
        Traffic(pair.rails, pair.a, pair.b, pair.ab, pair.ba, 21),
        Traffic(pair.rails, pair.b, pair.a, pair.ba, pair.ab, 22),
    ]
    run(pair.rails, flows, 60)


def test_traffic_in_a_full_mesh_of_three_is_exact(rails: Rails):
    sides = [rails.side() for _ in range(3)]
    flows = []
    for number, (i, j) in enumerate(itertools.combinations(range(3), 2)):
        there, back = rails.join(sides[i], sides[j])
        flows.append(Traffic(rails, sides[i], sides[j], there, back, 10 * number + 1))
        flows.append(Traffic(rails, sides[j], sides[i], back, there, 10 * number + 2))
    run(rails, flows, 40)


def test_the_first_write_may_be_the_first_thing_that_ever_moves(rails: Rails):
    """Without a probe, from both sides at once: where providers connect lazily the two attempts cross."""
    pair = Pair.of(rails, probe=False)
    both = [(pair.a, pair.ab, pair.b), (pair.b, pair.ba, pair.a)]
    targets = []
    for here, link, there in both:
        source, target = here.register(filled(1000)), there.register(1000)
        here.write(link, source, target.remote)
        targets.append((source, target))
    rails.drive(lambda: len(pair.a.ended) == 1 == len(pair.b.ended))
    assert [side.ended[0].errno for side in (pair.a, pair.b)] == [0, 0]
    assert all(np.array_equal(source.array, target.array) for source, target in targets)


def test_registrations_of_the_same_memory_have_their_own_keys(pair: Pair):
    array = pair.b.own(filled(4096))
    first, second = pair.b.register(array), pair.b.register(array)
    assert first.local.keys != second.local.keys
    first_keys = first.remote
    pair.b.memories.remove(first)
    first.local.close()
    source = pair.a.register(filled(4096, 2))
    pair.rails.finish(pair.a.write(pair.ab, source, second.remote))
    assert np.array_equal(array, source.array)
    if pair.rails.kind.guards:  # the closed registration's key opens nothing, while the other one still does
        late = pair.a.write(pair.ab, pair.a.register(filled(4096, 3)), first_keys)
        pair.rails.drive(lambda: late.is_over)
        assert late.errno > 0
        assert np.array_equal(array, source.array)


def test_read_only_memory_is_no_target(pair: Pair):
    """It is refused here, before anything is posted; and there, where rails look, to a peer that pretends."""
    content = bytes(range(256))
    target, source = pair.b.register(content), pair.a.register(filled(256))
    assert not target.remote.writable
    with pytest.raises(ValueError, match="read-only"):
        pair.a.write(pair.ab, source, target.remote)
    with pytest.raises(ValueError, match="read-only"):
        pair.a.write_pages(pair.ab, source, [0], target.remote, [0], 16)
    with pytest.raises(ValueError, match="read-only"):
        pair.b.write(pair.ba, target, source.remote, reads=True)
    pair.rails.finish(pair.a.write(pair.ab, fetched := pair.a.register(256), target.remote, reads=True))
    assert fetched.array.tobytes() == content
    if pair.rails.kind.guards:
        done = pair.a.write(pair.ab, source, RemoteMemory(256, True, target.local.keys))
        pair.rails.drive(lambda: done.is_over)
        assert done.errno > 0
    assert bytes(target.array) == content == bytes(range(256))


BAD = (
    {"length": 65},
    {"length": 1, "at": (65, 0)},
    {"length": 33, "at": (0, 32)},
    {"length": 0, "at": (0, 65)},
    {"length": 2**64 - 1, "at": (1, 1)},
)
BAD_PAGES = (
    ([0, 1], [0], "2 source pages, but 1 target pages"),
    ([0, 4], [0, 1], "source page 1 "),
    ([0, 1], [0, 4], "target page 1 "),
    ([-1], [0], "source page 0 "),
    ([0], [2**62], "target page 0 "),
)


def test_what_leaves_its_memory_is_refused_before_it_is_posted(pair: Pair):
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    before = pair.a.core.statistics()["posted"]
    for arguments, reads in itertools.product(BAD, (False, True)):
        with pytest.raises(ValueError, match="leaves a region of 64 bytes"):
            pair.a.write(pair.ab, source, target.remote, reads=reads, **arguments)
    for here, there, message in BAD_PAGES:
        with pytest.raises(ValueError, match=message):
            pair.a.write_pages(pair.ab, source, here, target.remote, there, 16)
    for at in ((49, 0), (0, 49), (65, 0)):
        with pytest.raises(ValueError, match="leaves a region of 64 bytes"):
            pair.a.write_pages(pair.ab, source, [0], target.remote, [0], 16, at=at)
    pair.rails.rest()
    assert pair.a.core.statistics()["posted"] == before
    assert source.local.in_flight == 0
    assert not target.array.any()


def test_bytes_need_memory_on_both_sides(pair: Pair):
    source, target = pair.a.register(filled(4096)), pair.b.register(4096)
    for reads, length in itertools.product((False, True), (1, 4096)):
        with pytest.raises(ValueError, match="memory"):
            pair.a.write(pair.ab, None, target.remote, length, reads=reads)
        with pytest.raises(ValueError, match="memory"):
            pair.a.write(pair.ab, source, None, length, reads=reads)
    pair.rails.rest()
    assert not target.array.any()
