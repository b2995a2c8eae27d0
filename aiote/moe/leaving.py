"""A rank that leaves the group: the others check that it has sent what it owes in the rounds that are not over yet.

With on_loss="raise" one count over all ranks does not tell whose write is missing. But a rank that waits for one kind
of writes has posted all its own writes of that kind. So once every other rank waits in this round, or is further, and
none of its writes is in flight, a missing write is one of a rank that has left. With on_loss="mask" each rank has a
count of its own, and `Lane.lost` ends the wait for a rank whose connection has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio

import aiote

from .joining import MoeService

if TYPE_CHECKING:
    from .group import MoeGroup
    from .lane import Lane

__all__ = ["see_off"]

CHECK_S = 0.5
"""Seconds between two checks; a rank that leaves in order has sent everything, and is not noticed within them."""
Client = Callable[[int], MoeService]


async def see_off(group: MoeGroup, lanes: Sequence[Lane], client: Client, rank: int, rounds: list[int]) -> None:
    """Record that a rank takes no part in `rounds` (one for each lane) and later ones.

    Return once no write to it is in flight: then it revokes its lease, which would end writes to it, and to others in
    the same request.
    """
    # The first call of a rank counts, and one task checks it, however often the rank calls.
    known = group.membership.departed.setdefault(rank, rounds) is not rounds
    for lane in lanes:
        lane.check_departed()
    if group.config.on_loss == "raise" and not known:
        group.start_task(_lose_debtor, group, lanes, client, rank)
    for lane in lanes:
        await lane.wait_quiet()


async def _lose_debtor(group: MoeGroup, lanes: Sequence[Lane], client: Client, rank: int) -> None:
    """Lose the rank if a round that it left still lacks writes when every other rank has made its own."""
    membership = group.membership
    epoch, numbers = membership.epoch, [lane.state.number for lane in lanes]
    for lane, number in zip(lanes, numbers, strict=True):
        found = False
        while membership.epoch == epoch and membership.failure is None and lane.in_round(number):
            await anyio.sleep(CHECK_S)
            reached, before = lane.reached, found
            found = lane.waiting and await _others_reached(group, client, lane.number, reached)
            # A write that has ended at its source may be counted a little later, so it takes two checks.
            if found and before and lane.waiting and lane.reached == reached:
                several = sorted(membership.departed)
                who = "it has left" if several == [rank] else f"ranks {several} have left"
                group.lose(rank, f"{who} the group, and not all that is owed in round {number} has come")


async def _others_reached(group: MoeGroup, client: Client, lane: int, reached: tuple[int, int]) -> bool:
    """Return whether all ranks that have not left wait as this one, or are further, and have no write in flight."""
    for rank in group.membership.active:
        if rank not in group.membership.departed:
            try:
                if await client(rank).reached(group.rank, group.epoch, lane) < reached:
                    return False
            except aiote.AioteError:
                return False
    return True
