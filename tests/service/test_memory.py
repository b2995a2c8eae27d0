"""Places in lent memory: never two at one place, first come, first served, within the budget, and all given back."""

from __future__ import annotations

import anyio
import numpy
import pytest

import aiote
from aiote.aio import current_loop
from aiote.core.allocator import ALIGNMENT
from aiote.service.endpoint import CallEndpoint, Limits
from aiote.service.memory import (
    FIRST_BYTES,
    MAX_SEGMENTS,
    SEGMENT_BYTES,
    BorrowedMemory,
    Budget,
    LentMemory,
    Staging,
)
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import go_round, linked, opened, until


def test_a_budget_bounds_one_peer_and_all():
    budget = Budget(total=12 * SEGMENT_BYTES, peer=2 * SEGMENT_BYTES + 1000)
    share, other = budget.share_of(b"one"), budget.share_of(b"other")
    assert budget.take(share, 1, 0, 0) == FIRST_BYTES
    assert budget.take(share, 1, 4 * FIRST_BYTES, 3) == 4 * FIRST_BYTES
    assert budget.take(share, SEGMENT_BYTES + 1, 0, 0) == SEGMENT_BYTES + ALIGNMENT
    # Near its limit a peer gets no more than it needs.
    assert budget.take(share, 100, 2 * SEGMENT_BYTES, 2) == 128
    with pytest.raises(BlockingIOError, match="one peer may have"):
        budget.take(share, 1001, 2 * SEGMENT_BYTES, 3)
    with pytest.raises(BlockingIOError, match="one peer may have"):
        budget.take(share, 1, 0, MAX_SEGMENTS)
    budget.take(share, 2 * SEGMENT_BYTES, 0, 0)
    # More than 8 of 12 segments are free, so others may hold 5 each.
    with pytest.raises(BlockingIOError, match="are in use"):
        budget.take(share, 2 * SEGMENT_BYTES, 0, 0)
    budget.charge(other, 2 * SEGMENT_BYTES, 0)
    budget.give(other, 2 * SEGMENT_BYTES)
    budget.give(share, budget.used)
    assert budget.used == share.held == other.held == 0


@pytest.mark.parametrize("peers", [1, 2, 7, 100])
def test_greedy_peers_leave_memory_for_others(peers):
    budget = Budget(total=1 << 30, peer=1 << 30)
    shares = [budget.share_of(bytes([number])) for number in range(peers)]
    for share in shares:
        for _ in range(1 << 15):
            try:
                budget.take(share, 1 << 15, 0, 0)
            except BlockingIOError:
                break
    assert budget.total - budget.used >= budget.total // (peers + 1)
    newcomer = budget.share_of(b"newcomer")
    assert budget.take(newcomer, budget.total // (peers + 2) ** 2, 0, 0)


@pytest.mark.anyio
async def test_places_are_given_in_order_and_a_cancelled_wait_passes_its_turn_on():
    async with linked("sim") as (user, owner):
        budget = Budget(4 * FIRST_BYTES, FIRST_BYTES)
        lent = LentMemory(owner, current_loop(), next(iter(owner.peers)), budget)
        asked: list[int] = []
        returned: list[int] = []
        peer = await user.connect(owner.address)
        borrowed = BorrowedMemory(user, current_loop(), peer, asked.append, returned.append)
        served: list[int] = []
        places = {}

        async def wait(number: int, nbytes: int) -> None:
            places[number] = await borrowed.place(nbytes)
            served.append(number)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, 0, FIRST_BYTES - 100)
            await until(lambda: asked)
            borrowed.granted(*await lent.lend(asked.pop()), "")
            await until(lambda: served == [0])
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(wait, 1, 5000)
                    await until(lambda: asked)
                    for number, nbytes in ((2, 4000), (3, 50)):
                        group.start_soon(wait, number, nbytes)
                        await until(lambda number=number: len(borrowed._queue) == number)
                    with pytest.raises(BlockingIOError):
                        await lent.lend(asked.pop())
                    borrowed.granted(0, 0, b"", "no more")
                    await go_round()
                    # Though there would be a place for the last one.
                    assert served == [0]
                    scope.cancel()
            borrowed.give(places[0][0])
            await until(lambda: len(served) == 3)
            assert served == [0, 2, 3]
        with pytest.raises(KeyError):
            borrowed.give(places[0][0])
        assert borrowed.taken_bytes == 4050
        assert not returned
        await lent.close()
        assert budget.used == 0
        with pytest.raises(aiote.ClosedError):
            await lent.lend(1)


@pytest.mark.anyio
async def test_grants_of_memory_that_was_not_asked_for_are_refused():
    async with linked("sim") as (user, owner), opened("sim") as third:
        lent = LentMemory(owner, current_loop(), next(iter(owner.peers)), Budget(1 << 30, 1 << 30))
        number, nbytes, descriptor = await lent.lend(100)
        peer = await user.connect(owner.address)
        borrowed = BorrowedMemory(user, current_loop(), peer, lambda nbytes: None, lambda number: None)
        with pytest.raises(ValueError, match="without a request"):
            borrowed.granted(number, nbytes, descriptor, "")
        foreign = third.register(numpy.zeros(nbytes + 64, numpy.uint8))
        async with anyio.create_task_group() as group:
            group.start_soon(borrowed.place, nbytes + 1)
            await until(lambda: borrowed._asked_bytes)
            with pytest.raises(ValueError, match="other memory than was requested"):
                borrowed.granted(number, nbytes, descriptor, "")
            with pytest.raises(ValueError, match="other memory than was requested"):
                borrowed.granted(number, nbytes - 1, descriptor, "")
            for elsewhere in (foreign.descriptor, foreign.lease(slice(0, nbytes + 64), user.address).descriptor):
                with pytest.raises(ValueError, match="is not memory of"):
                    borrowed.granted(number, nbytes + 64, elsewhere, "")
            for how, text in WRONG.items():
                with pytest.raises(ValueError, match=text):
                    borrowed.granted(number, nbytes, claimed(how, descriptor, owner.address, third.address), "")
            group.cancel_scope.cancel()
        for piece in ((1, 0, 1), (0, nbytes, 1), (0, 1 << 61, 1 << 61), (0, 0, nbytes + 1)):
            with pytest.raises(ValueError, match="was not lent|of lent memory"):
                lent.view(piece)
        assert len(lent.view((0, nbytes - 5, 5))) == 5
        await lent.close()
        # What had come before the end can still be read.
        assert len(lent.view((0, nbytes - 5, 5))) == 5


@pytest.mark.anyio
async def test_staging_is_free_when_nobody_has_the_array():
    async with linked("sim") as (engine, _):
        budget = Budget(1 << 30, 1 << 30)
        staging = Staging(engine, current_loop(), budget, budget.share_of(b"peer"))
        array, _ = staging.take(300_000)
        address = array.__array_interface__["data"][0]
        array.fill(7)
        view = array[5:].view(numpy.int8)
        del array
        await go_round()
        other, _ = staging.take(300_000)
        assert other.__array_interface__["data"][0] != address
        del view
        await go_round()
        again, _ = staging.take(300_000)
        assert again.__array_interface__["data"][0] == address
        assert not again.any()
        await staging.close()
        assert budget.used == 0
        with pytest.raises(BlockingIOError):
            staging.take(1)


@pytest.mark.anyio
async def test_an_array_stays_registered_for_the_next_call_while_it_is_unchanged():
    async with linked("sim") as (engine, _):
        endpoint = CallEndpoint.of(engine, Limits(kept_bytes=10_000))
        array, large = numpy.zeros(3000, numpy.uint8), numpy.zeros(20_000, numpy.uint8)
        first = endpoint.hold(array)
        endpoint.let_go(first)
        assert endpoint.hold(array) is first
        filled = endpoint.hold(array, filled=True)
        assert (first.region.access, filled.region.access) == ("local", "write")
        # What it was given is not asked about again.
        array.setflags(write=False)
        endpoint.let_go(first)
        assert endpoint.hold(array) is not first
        assert not first.region.closed
        huge = endpoint.hold(large)
        endpoint.let_go(huge)
        await until(lambda: huge.region.closed)
