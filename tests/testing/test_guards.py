"""What a simulated NIC refuses: keys that are none, another NIC's or gone, and ranges that leave their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiote.rails import RemoteMemory, acquire
from support.rails.rail_pair import KINDS, Memory, Pair, Rails, filled, opened

pytestmark = pytest.mark.libfabric
(SIM,) = [kind for kind in KINDS if kind.provider == "sim"]
SIZE = 4096


@pytest.fixture
def rails() -> Iterator[Rails]:
    with opened(SIM, smallest=1) as rails:
        yield rails


def refused(pair: Pair, source: Memory, remote: RemoteMemory, **arguments: object) -> bool:
    done = pair.a.write(pair.ab, source, remote, **arguments)  # type: ignore[arg-type]
    pair.rails.drive(lambda: done.is_over)
    return done.errno > 0


def test_a_range_beyond_the_memory_is_refused_whole(rails: Rails):
    """A peer that pretends to have more: the whole write is refused, and not a byte of it written."""
    pair = Pair.of(rails)
    source, target, beside = pair.a.register(filled(SIZE)), pair.b.register(SIZE), pair.b.register(SIZE)
    ((key, base),) = target.local.keys
    longer = RemoteMemory(1 << 30, True, [(key, base)])
    for offset, length in ((SIZE, 1), (SIZE - 1, 2), (1, SIZE), (1 << 29, 1), (SIZE + 1, 1)):
        assert refused(pair, source, longer, length=length, at=(0, offset)), (offset, length)
        assert refused(pair, source, longer, length=length, at=(0, offset), reads=True), (offset, length)
    before = RemoteMemory(1 << 30, True, [(key, base - 1)])
    assert refused(pair, source, before, length=1)
    assert not target.array.any()
    assert not beside.array.any()
    assert (source.array == filled(SIZE)).all()
    assert not refused(pair, source, longer, length=1, at=(0, SIZE - 1))


def test_the_key_of_another_nic_is_refused(rails: Rails):
    a, b = rails.side(2), rails.side(2)
    pair = Pair(rails, a, b, *rails.join(a, b))
    source, target = a.register(filled(SIZE)), b.register(SIZE)
    assert not refused(pair, source, target.remote)
    target.array[:] = 0
    (key, base), (other, start) = target.local.keys
    assert (base, start) == (target.local.address, 0)
    assert refused(pair, source, RemoteMemory(SIZE, True, [(other, start), (key, base)]))
    assert not target.array.any()


def test_a_key_that_is_gone_or_was_never_given_is_refused(rails: Rails):
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    remote = target.remote
    pair.b.memories.remove(target)
    target.local.close()
    assert refused(pair, source, remote)
    assert refused(pair, source, RemoteMemory(SIZE, True, [(0, 0)]))
    private = pair.b.rail_set.register(acquire(target.array), 0)
    assert refused(pair, source, RemoteMemory(SIZE, True, private.keys))
    private.close()
    assert not target.array.any()
