"""Memory that some rails reach and others do not: transfers take those that reach it at both ends."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest

from support.gpu.standin_cuda import gpu_copy
from support.rails.rail_pair import STAGED, Rails, Side, filled, opened

SIZE = 1 << 20
IMM = 0x31


@pytest.fixture(params=STAGED, ids=lambda kind: kind.provider)
def rails(request: pytest.FixtureRequest) -> Iterator[Rails]:
    with opened(request.param) as rails:
        yield rails


def deafened(side: Side, *numbers: int) -> Side:
    """Have some rails of a side reach memory of the host alone from here on."""
    for number in numbers:
        side.rail_set.rails[number].device.stages = False
    return side


@pytest.mark.parametrize(("near", "far"), [((0,), ()), ((1,), ()), ((), (0,)), ((0,), (0,)), ((1,), (1,))])
def test_bytes_go_over_the_rails_that_reach_both_ends(rails, near, far):
    left, right = deafened(rails.side(2), *near), deafened(rails.side(2), *far)
    link, _ = rails.join(left, right)
    source, target = left.register(gpu_copy(filled(SIZE)).seen), right.register(SIZE)
    unreached = [number for number, (key, _) in enumerate(source.local.keys) if key == (1 << 64) - 1]
    assert tuple(unreached) == near
    counter = right.count(IMM)
    for _ in range(4):
        left.write(link, source, target.remote, imm=IMM)
    rails.drive(lambda: len(left.ended) == 4 and counter.value == 4)
    assert [operation.errno for operation in left.ended] == [0] * 4
    assert np.array_equal(target.array, source.array)


def test_without_a_rail_that_reaches_both_ends_a_transfer_fails_at_once(rails):
    left, right = deafened(rails.side(2), 0), deafened(rails.side(2), 1)
    link, _ = rails.join(left, right, pairs=[(0, 0), (1, 1)])
    source, target = left.register(gpu_copy(filled(SIZE)).seen), right.register(SIZE)
    own, far = left.register(bytearray(SIZE)), right.register(bytearray(SIZE))
    left.write(link, source, target.remote)
    rails.drive(lambda: left.ended)
    assert left.ended[0].errno == errno.EHOSTUNREACH
    left.write(link, own, far.remote)
    rails.drive(lambda: len(left.ended) == 2)
    assert left.ended[1].errno == 0
