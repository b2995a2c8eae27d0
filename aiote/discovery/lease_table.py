"""Who holds which name, and until when: the table of the embedded registry's server.

Pure: time is an argument, in seconds of whatever clock the caller has. A registration belongs to the session that
announced it. It is taken from it by a greater incarnation, by its end of lease, or by its own leave.

Messages overtake each other, so the numbers of a session's announcements and leaves say which of them is the later one.
Of those that left last the number is kept: an announcement that comes behind its own leave would register a ghost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .membership import Member, Roster
from .wire import Announce, Leave

__all__ = ["LeaseTable"]

LOCAL_LEASE_MS = 10_000
"""What is told of a member that has no lease, because it is in the server's own process."""


@dataclass(slots=True)
class _Held:
    session: int
    number: int
    lease_ms: int
    incarnation: int
    deadline: float


class LeaseTable:
    """The registrations, of which there are `limit` at most; what they amount to is kept in `roster`."""

    def __init__(self, roster: Roster, limit: int) -> None:
        self._roster = roster
        self._limit = limit
        self._held: dict[str, _Held] = {}
        self._left: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def announce(self, message: Announce, now: float) -> str | None:
        """Register a member, or renew its lease; return why not, an empty text, or None for one that came too late."""
        member, held = message.member, self._held.get(message.member.name)
        if any(message.number <= self._left.get((message.session, name), -1) for name in (member.name, "")):
            return None
        if held is not None and member.incarnation <= held.incarnation:
            if held.session != message.session:
                return f"incarnation {held.incarnation} of another engine holds the name, not {member.incarnation}"
            if member.incarnation < held.incarnation or message.number < held.number:
                return None
        if held is None and len(self._held) >= self._limit:
            return f"the registry has its {self._limit} members"
        deadline = now + message.lease_ms / 1000
        self._held[member.name] = _Held(message.session, message.number, message.lease_ms, member.incarnation, deadline)
        self._roster.put(member)
        return ""

    def keep(self, member: Member, session: int, number: int, now: float) -> str | None:
        """Register a member without a lease, as `announce`."""
        refusal = self.announce(Announce(session, number, LOCAL_LEASE_MS, member), now)
        if refusal == "":
            self._held[member.name].deadline = math.inf
        return refusal

    def holds(self, name: str, session: int) -> bool:
        """Whether a session has that registration."""
        held = self._held.get(name)
        return held is not None and held.session == session

    def lease_ms(self, name: str) -> int:
        """Return the length of a registration's lease."""
        held = self._held.get(name)
        return LOCAL_LEASE_MS if held is None else held.lease_ms

    def leave(self, message: Leave) -> None:
        """Withdraw a session's registration, or, without a name, all of them."""
        names = [message.name] if message.name else list(self._held)
        for name in names:
            held = self._held.get(name)
            if held is not None and held.session == message.session and held.number <= message.number:
                self._drop(name)
        left = self._left.pop((message.session, message.name), -1)
        self._left[message.session, message.name] = max(left, message.number)
        if len(self._left) > self._limit:
            del self._left[next(iter(self._left))]

    def expire(self, now: float) -> None:
        """Withdraw the registrations whose leases have run out."""
        for name in [name for name, held in self._held.items() if held.deadline <= now]:
            self._drop(name)

    def postpone(self, seconds: float) -> None:
        """Lengthen every lease, because nobody was listening for so long."""
        for held in self._held.values():
            held.deadline += seconds

    def next_deadline(self) -> float:
        """Return when the first lease runs out; infinite where there is none."""
        return min((held.deadline for held in self._held.values()), default=math.inf)

    def _drop(self, name: str) -> None:
        del self._held[name]
        self._roster.remove(name)
