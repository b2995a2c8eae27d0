"""A barrier among the members of a group, made of immediates alone.

Each member writes an immediate to every other member and waits for one from each. A member that has finished a round
may begin the next while another member still waits for the last immediate of this round, and an immediate does not say
whose it is. So rounds use the two values `imm` and `imm ^ 1` in turn. Two values are enough: a member that has finished
a round has heard every other member begin it, so all members have finished the round before, and the value of that
earlier round is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.striping import check_immediate
from ..errors import PeerError, UsageError
from .scatter import PeerGroup, ScatterTarget, group_room, submit_scatter

if TYPE_CHECKING:
    from .counter import Counter, Counters
    from .owner import Destination

__all__ = ["barrier"]

BROKEN = -1


async def barrier(counters: Counters, group: PeerGroup, imm: int) -> None:
    """Wait until every member has called its barrier as often as this engine has; see `Engine.barrier`."""
    counters.runtime.require_open()
    if not isinstance(group, PeerGroup) or group.runtime is not counters.runtime:
        raise UsageError("barrier: expected a PeerGroup of this engine; make one with await engine.peer_group([...])")
    value = check_immediate(imm)
    round_number = group.rounds.get(value, 0)
    if round_number == BROKEN:
        raise UsageError(
            f"barrier: an earlier barrier on immediate {value:#x} has not ended, or ended with an "
            "error, so members may "
            "be in different rounds; let every member make its group again with peer_group, and use another immediate"
        )
    if not len(group):
        return
    imm_of_round = value ^ (round_number & 1)
    # An interruption of this round leaves the other members in it. A member that finishes the round removes the mark.
    group.rounds[value] = BROKEN
    targets = [ScatterTarget(None, peer) for peer in group]
    counter = counters.open(imm_of_round)
    try:
        await group_room(group)
        await submit_scatter(group.runtime, group, targets, imm_of_round)
        await _wait_for_all(counter, group.connections)
    finally:
        counter.release()
    group.rounds[value] = round_number + 1


async def _wait_for_all(counter: Counter, peers: tuple[Destination, ...]) -> None:
    """Wait for an immediate from each peer. Raises PeerError when a peer is lost before all have arrived."""

    def lost() -> PeerError | None:
        return next((peer.error("barrier") for peer in peers if peer.lost), None)

    for peer in peers:
        peer.loss_waiters.add(counter)
    try:
        await counter.wait_unless(len(peers), lost)
    finally:
        for peer in peers:
            peer.loss_waiters.discard(counter)
