"""The calls between ranks before the first round of an epoch, when a round goes wrong, and when a rank leaves.

Each rank asks every other rank to meet in an epoch. The other answers with a lease of its inbox once it is in that
epoch or a later one; the later epoch wins. A rank may write as soon as it has everyone's inbox, without waiting until
all are ready, because a rank opens its counters before it lends its inbox.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta

import aiote

from .. import service
from .config import MAX_LANES
from .wire import ANSWER, ROUTE, SLOTS

__all__ = [
    "AGAIN_S",
    "COMES_LATER",
    "ELSEWHERE",
    "NOWHERE",
    "Meeting",
    "MoeService",
    "RankHost",
    "service_of",
    "within_reach",
]

Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
RoundNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
LaneNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
Reached: TypeAlias = tuple[Annotated[int, Meta(ge=-1, lt=1 << 62)], Annotated[int, Meta(ge=0, le=ANSWER)]]
Reason: TypeAlias = Annotated[str, Meta(max_length=1024)]
MOST_AHEAD = 1 << 16
"""How many epochs another rank may be ahead of a rank that is already in the group."""
MOST_FIRST = 1 << 61
"""The last epoch in which a rank may join; as many epochs are left for resets."""
AGAIN_S = 0.01, 0.5
"""The first and the longest pause, in seconds, before a rank asks again a rank that does not serve the group yet."""
COMES_LATER = service.BusyError, service.DrainingError, service.CallLostError
"""The errors from a rank that is busy, or that is about to leave an earlier group of the same number."""


class Meeting(msgspec.Struct, frozen=True):
    """A rank's answer to a caller: the epoch that the rank is in, the descriptors of the parts of its inbox that the
    caller may write to (`memory.LaneMap.parts`), the first of the immediates that the caller writes with, and the
    descriptor of the shared memory that the inbox lies in, which is empty for a caller of another host.
    """

    epoch: Epoch
    inbox: Annotated[list[Annotated[bytes, Meta(max_length=4096)]], Meta(max_length=3 * MAX_LANES)]
    imm: Annotated[int, Meta(ge=0, lt=1 << 28)]
    shared: Annotated[bytes, Meta(max_length=4096)] = b""

    def first_immediate(self, lanes: int) -> int:
        """Return the first immediate. Raises UsageError if the immediates of that many lanes would exceed 28 bits."""
        if self.imm + lanes * SLOTS > 1 << 28:
            raise aiote.UsageError(f"immediates from {self.imm:#x} on, {SLOTS} for each of {lanes} lanes, pass 28 bits")
        return self.imm


ELSEWHERE = Meeting(0, [], 0)
"""The answer of a rank that is still in an earlier group of the same number; the caller asks it again."""

NOWHERE = -1, ROUTE
"""The answer of a rank, to one that asks how far it is, if it is not in that epoch."""


class RankHost(Protocol):
    """The interface of a rank to the calls of its peers."""

    async def admit_rank(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        """Return this rank's inbox for the calling rank, once this rank is in that epoch or a later one."""

    def record_break(self, rank: int, epoch: int, reason: str, caller: aiote.Peer) -> None:
        """Record that another rank broke an epoch, if the caller is that rank."""

    async def record_departure(self, rank: int, epoch: int, rounds: list[int], caller: aiote.Peer) -> None:
        """Record that the caller, if it is that rank, takes no part in `rounds` (one for each lane) and later ones."""

    async def reached(self, rank: int, epoch: int, lane: int, caller: aiote.Peer) -> tuple[int, int]:
        """Return the round and the kind of a lane's last wait, once no earlier write of it is in flight; or NOWHERE."""


class MoeService(service.Service):
    """The service that each rank of a group offers to the other ranks."""

    def __init__(self, host: RankHost) -> None:
        self._host = host

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        """Return this rank's inbox, once it is in that epoch or a later one. Raises UsageError if configs differ."""
        return await self._host.admit_rank(rank, epoch, digest, service.current_call().peer)

    @service.method(idempotent=True)
    async def broke(self, rank: Rank, epoch: Epoch, reason: Reason) -> None:
        """Receive the news that a rank broke an epoch."""
        self._host.record_break(rank, epoch, reason, service.current_call().peer)

    @service.method(idempotent=True)
    async def left(self, rank: Rank, epoch: Epoch, rounds: Annotated[list[RoundNumber], Meta(max_length=1024)]) -> None:
        """Receive the news that a rank takes part in no more rounds; return once no write to it is in flight."""
        await self._host.record_departure(rank, epoch, rounds, service.current_call().peer)

    @service.method(idempotent=True)
    async def reached(self, rank: Rank, epoch: Epoch, lane: LaneNumber) -> Reached:
        """Return the round and the kind of a lane's last wait, once no earlier write of it is in flight; or NOWHERE."""
        return await self._host.reached(rank, epoch, lane, service.current_call().peer)


def service_of(group: int) -> type[MoeService]:
    """Return the service of a group. Its name has the group's number, so that an engine may be in several groups."""
    return type("MoeService", (MoeService,), {"name": f"MoeService.{group}"})


def within_reach(met: Meeting, epoch: int, *, first: bool) -> Meeting:
    """Return a rank's answer. Raises UsageError for an epoch that the rank cannot have reached."""
    if met.epoch > (MOST_FIRST if first else epoch + MOST_AHEAD):
        raise aiote.UsageError(f"it claims to be in epoch {met.epoch}, too far ahead of this rank's {epoch}")
    return met
