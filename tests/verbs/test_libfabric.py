"""libfabric's own way over RDMA devices, `verbs;ofi_rxm`: what is asked of every kind, on the guest's NICs.

Of the guards it keeps none: its cache of registrations gives the same memory one key, with the rights it had first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import aiote
from support.rails.rail_pair import Kind, Pair, filled, opened

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.libfabric,
    pytest.mark.leaks_allowed("the verbs provider keeps threads and descriptors of its own for the process"),
    pytest.mark.blocking_allowed("its connections are made within a post"),
]
PROVIDER = "verbs;ofi_rxm"
SIZES = (0, 1, 64, 4096, 65_537, 1_000_003)
IMM = 11


@pytest.fixture
def pair() -> Iterator[Pair]:
    with opened(Kind(PROVIDER, nic="10.77.0.1")) as rails:
        yield Pair.of(rails)


def test_writes_of_all_sizes_arrive_exactly(pair):
    source, handle = pair.a.register(filled(max(SIZES))), pair.b.count(IMM)
    for number, size in enumerate(SIZES, 1):
        target = pair.b.register(size + 64)
        pair.rails.finish(pair.a.write(pair.ab, source, target.remote, size, at=(0, 33), imm=IMM))
        pair.rails.drive(lambda number=number: handle.value == number)
        assert np.array_equal(target.array[33 : 33 + size], source.array[:size])
        assert not target.array[:33].any()
        assert not target.array[33 + size :].any()


def test_reads_of_all_sizes_arrive_exactly(pair):
    source = pair.b.register(filled(max(SIZES)))
    for size in SIZES:
        target = pair.a.register(size + 8)
        pair.rails.finish(pair.a.write(pair.ab, target, source.remote, size, reads=True))
        assert np.array_equal(target.array[:size], source.array[:size])


def test_pages_arrive_where_they_belong_and_count(pair):
    source, target = pair.a.register(filled(200 * 4096)), pair.b.register(200 * 4096)
    order = list(np.random.default_rng(3).permutation(200))
    handle = pair.b.count(IMM)
    pair.rails.finish(pair.a.write_pages(pair.ab, source, range(200), target.remote, order, 4096, imm=IMM))
    pair.rails.arrived(pair.b.wait(handle, 200))
    assert np.array_equal(target.array.reshape(200, 4096)[order], source.array.reshape(200, 4096))


async def test_engines_across_the_switch_write_and_send_to_each_other():
    async with (
        aiote.open_engine(PROVIDER, ["10.77.0.1"]) as left,
        aiote.open_engine(PROVIDER, ["10.77.0.2"]) as right,
    ):
        memory = bytearray(300_000)
        target = left.attach(right.register(memory).descriptor)
        for _ in range(5):
            await left.write_imm(left.register(b"z" * 300_000), target, IMM)
            await left.send(right.address, b"text")
            assert (await right.recv()).data == b"text"
        await right.counter(IMM).wait(5)
        assert memory == b"z" * 300_000
        assert {rail.provider for rail in left.rails} == {PROVIDER}
        with pytest.raises(aiote.UsageError, match="some do not exist here"):
            await aiote.open_engine(PROVIDER, ["10.99.0.1"])
