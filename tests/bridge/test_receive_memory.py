"""Receive memory: what nobody has is lent again, mapped and registered; what somebody has never is."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from aiote import bridge as bridges
from aiote.bridge import receive_memory
from aiote.bridge.receive_memory import ReceiveBlock, ReceiveMemory
from support.process.interrupts import Interrupts
from support.service.bridges import aside, bridge_to, memory_elsewhere, value

MIB = 1 << 20
LIMIT = 8 * MIB


@pytest.fixture
def bridge() -> Iterator[bridges.Bridge]:
    with bridge_to() as made:
        yield made


@pytest.fixture
def memory(bridge) -> ReceiveMemory:
    return ReceiveMemory(bridge, LIMIT)


def registered(bridge: bridges.Bridge) -> int:
    return bridge.engine.statistics().regions


def settle(bridge: bridges.Bridge) -> None:
    """Let the loop take back what was dropped, and end what is too much."""
    gc.collect()
    aside(bridge.call, value(1, turns=20))


def registered_block(bridge: bridges.Bridge, memory: ReceiveMemory, nbytes: int) -> tuple[np.ndarray, ReceiveBlock]:
    lent, block = memory.borrow(nbytes)
    region = aside(bridge.call, block.region(bridge, nbytes))
    assert region.nbytes == nbytes
    return lent, block


def test_what_comes_back_is_lent_again_mapped_and_registered(bridge, memory):
    before = registered(bridge)
    lent, first = registered_block(bridge, memory, 3 * MIB)
    region, address = first.registered, lent.ctypes.data
    del lent
    for nbytes in (3 * MIB, 2 * MIB):
        lent, block = registered_block(bridge, memory, nbytes)
        assert (block, block.registered, lent.ctypes.data) == (first, region, address)
        assert registered(bridge) == before + 1
        del lent


def test_a_block_is_not_lent_while_a_view_of_a_view_is_held(memory):
    lent, first = memory.borrow(MIB)
    lent[:] = 7
    # As a tensor: what keeps the array is below all views.
    held = memoryview(lent)[MIB // 2 :]
    del lent
    other, second = memory.borrow(MIB)
    other[:] = 9
    assert second is not first
    assert bytes(held[:3]) == b"\7\7\7"
    held.release()
    del held
    third, block = memory.borrow(MIB)
    assert block is first
    assert third[-1] == 7


def test_much_smaller_requests_get_blocks_of_their_own(memory):
    lent, large = memory.borrow(6 * MIB)
    del lent
    lent, small = memory.borrow(MIB)
    assert small is not large
    assert small.nbytes == MIB
    del lent
    assert memory.borrow(MIB)[1] is small


def test_what_nobody_has_is_bounded_and_what_came_first_ends_first(bridge, memory):
    before = registered(bridge)
    held = [registered_block(bridge, memory, 2 * MIB) for _ in range(6)]
    assert registered(bridge) == before + 6
    blocks = [block for _, block in held]
    while held:
        held.pop(0)
        settle(bridge)
        assert memory.kept_bytes <= LIMIT
    assert list(memory._free) == blocks[2:]
    assert registered(bridge) == before + 4


def test_a_block_above_the_limit_is_ended_and_takes_no_other_with_it(bridge, memory):
    before = registered(bridge)
    held = [registered_block(bridge, memory, nbytes) for nbytes in (2 * MIB, 3 * LIMIT)]
    small = held[0][1]
    del held
    settle(bridge)
    assert list(memory._free) == [small]
    assert registered(bridge) == before + 1


def test_nothing_is_kept_with_a_limit_of_zero(bridge):
    memory, before = ReceiveMemory(bridge, 0), registered(bridge)
    held = registered_block(bridge, memory, MIB)
    assert held[1].nbytes == MIB
    del held
    settle(bridge)
    assert (memory.kept_bytes, registered(bridge)) == (0, before)


def test_what_nobody_wants_for_a_while_is_ended(bridge, memory, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(receive_memory, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before = registered(bridge)
    held = [registered_block(bridge, memory, MIB) for _ in range(3)]
    while held:
        held.pop()
        settle(bridge)
        now[0] += 1
    for left in (3, 2, 1, 0):
        assert (len(memory._free), registered(bridge)) == (left, before + left)
        assert (memory._timer is None) == (left == 0)
        # What the timer calls, at the time that it is set to.
        now[0] = 103.0 - left + receive_memory.IDLE_S
        bridge._thread.loop.call_soon_threadsafe(memory._trim)
        settle(bridge)


def test_nothing_wakes_the_loop_once_all_is_ended(bridge, memory):
    lent, _ = memory.borrow(MIB)
    assert memory._timer is None
    del lent
    settle(bridge)
    assert memory._timer is not None
    memory._limit = 0
    lent, _ = memory.borrow(MIB)
    del lent
    settle(bridge)
    assert memory._timer is None


def test_an_interruption_at_any_step_lends_no_block_twice(memory):
    def tried(at: int) -> bool:
        steps, before = Interrupts(at), list(memory._free)
        try:
            with steps.armed():
                lent, _ = memory.borrow(MIB)
                lent[:] = 1
        except KeyboardInterrupt:
            pass
        del before
        gc.collect()
        found = [memory.borrow(MIB) for _ in range(3)]
        assert len({block for _, block in found}) == 3, f"at step {at}"
        return steps.happened

    steps = 1
    while aside(tried, steps):
        steps += 1
    assert steps > 10


def test_threads_that_borrow_and_drop_never_share_bytes(memory):
    wrong: list[int] = []

    def user(number: int) -> None:
        chance, held = random.Random(number), []
        for turn in range(150):
            nbytes = chance.choice((64 << 10, 100_000, MIB))
            lent, _ = memory.borrow(nbytes)
            mark = (number * 60 + turn) % 251
            lent[::4096] = mark
            held.append((lent, mark))
            del lent
            chance.shuffle(held)
            while len(held) > chance.randrange(5):
                array, expected = held.pop()
                wrong.extend(int(one) for one in array[::4096] if one != expected)
                del array

    threads = [threading.Thread(target=user, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bytes_arrive_in_a_block_that_was_used_before(bridge, memory):
    nbytes = 3 * MIB
    with memory_elsewhere("local", nbytes) as (descriptor, theirs, _):
        for mark in (1, 2, 3):
            theirs[:] = mark
            lent, block = memory.borrow(nbytes)

            async def fetch(block: ReceiveBlock = block) -> None:
                await bridge.engine.read(bridge.engine.attach(descriptor), await block.region(bridge, nbytes))

            aside(bridge.call, fetch())
            assert lent.min() == lent.max() == mark
            del lent
    assert block.loans == 3


def test_arrays_outlive_the_bridge():
    with bridge_to() as bridge:
        memory = ReceiveMemory(bridge, LIMIT)
        lent, block = registered_block(bridge, memory, MIB)
        lent[:] = 5
        kept, _ = memory.borrow(MIB)
        del kept
    del block
    gc.collect()
    assert lent.min() == 5
