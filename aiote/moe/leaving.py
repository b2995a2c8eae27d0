"""A rank that leaves the group: the others check that it has sent what it owes in the rounds that are not over yet.

With on_loss="raise" one count over all ranks does not tell whose write is missing. But a rank that waits for one kind
of writes has posted all its own writes of that kind. So once every other rank has reached the same wait or a later one,
and has no write in flight, a missing write is one of a rank that has left. With on_loss="mask" each rank has a count of
its own, and `Lane.loss_of` ends the wait for a rank whose connection has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio

import aiote

from .joining import MoeService
from .round_parts import RoundHost

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["handle_departure"]

CHECK_S = 0.5
"""Seconds before each check. Writes that are on their way when a rank leaves in order arrive before the first one."""
Client = Callable[[int], MoeService]


async def handle_departure(
    group: RoundHost, lanes: Sequence[Lane], client: Client, rank: int, rounds: list[int]
) -> None:
    """Record that a rank takes no part in `rounds` (one for each lane) and later ones.

    Return once no write to it is in flight. Then the rank revokes its lease, which would fail a write to it, and the
    writes to other ranks in the same request.
    """
    # The first call of a rank counts, and one task checks it, however often the rank calls.
    known = group.membership.departed.setdefault(rank, rounds) is not rounds
    for lane in lanes:
        lane.check_departed()
    if group.config.on_loss == "raise" and not known:
        group.start_task(_lose_if_incomplete, group, lanes, client, rank)
    for lane in lanes:
        await lane.wait_quiet()


async def _lose_if_incomplete(group: RoundHost, lanes: Sequence[Lane], client: Client, rank: int) -> None:
    """Lose the rank if a round that it left still lacks writes when those of every other rank have completed."""
    membership = group.membership
    epoch, numbers = membership.epoch, [lane.state.number for lane in lanes]
    for lane, number in zip(lanes, numbers, strict=True):
        found = False
        while membership.epoch == epoch and membership.failure is None and lane.in_round(number):
            await anyio.sleep(CHECK_S)
            reached, before = lane.reached, found
            found = lane.waiting and await _others_reached(group, client, lane.number, reached)
            # The target may count a write a little after the source has completed it, so check twice.
            if found and before and lane.waiting and lane.reached == reached:
                several = sorted(membership.departed)
                who = "it has left" if several == [rank] else f"ranks {several} have left"
                group.lose(rank, f"{who} the group, and writes of round {number} are missing")


async def _others_reached(group: RoundHost, client: Client, lane: int, reached: tuple[int, int]) -> bool:
    """Return whether all ranks that have not left have reached this wait or a later one, with no write in flight."""
    for rank in group.membership.active:
        if rank not in group.membership.departed:
            try:
                if await client(rank).reached(group.rank, group.membership.epoch, lane) < reached:
                    return False
            except aiote.AioteError:
                return False
    return True
