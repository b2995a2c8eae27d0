"""Who holds which name, and until when: the table of the embedded registry's server.

Pure: time is an argument, in seconds of whatever clock the caller has. A *session* is one client; it says again and
again which members it has, all of them, and how long that holds. A member is withdrawn when its session says no more of
it, when the session's lease runs out, or when a greater incarnation takes the name.

Calls overtake each other, so a session numbers what it says, and what comes behind a greater number is ignored: it
would register a ghost. The number is kept until the lease runs out, also of a session that has no members any more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .membership import Member, Roster

__all__ = ["LeaseTable"]

LOCAL_LEASE_S = 10.0
"""What is told of a member that has no lease, because it is in the server's own process."""


@dataclass(slots=True)
class _Session:
    number: int
    lease_s: float
    deadline: float
    names: set[str] = field(default_factory=set)


class LeaseTable:
    """The members of all sessions, of which there are `limit` at most; what they amount to is kept in `roster`."""

    def __init__(self, roster: Roster, limit: int) -> None:
        self._roster = roster
        self._limit = limit
        self._sessions: dict[Hashable, _Session] = {}
        self._holders: dict[str, Hashable] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def keep(self, key: Hashable, number: int, lease_s: float, members: Sequence[Member], now: float) -> dict[str, str]:
        """Have these members of a session, and no others, for so long; return who was refused, and why."""
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= self._limit and not self._forget_an_empty_one():
                return {member.name: self._full() for member in members}
            session = self._sessions[key] = _Session(number, lease_s, now + lease_s)
        elif number < session.number:
            return {}
        session.number, session.lease_s, session.deadline = number, lease_s, now + lease_s
        for name in session.names - {member.name for member in members}:
            self._drop(name)
        refusals = {member.name: self._enter(key, session, member) for member in members}
        return {name: reason for name, reason in refusals.items() if reason}

    def _enter(self, key: Hashable, session: _Session, member: Member) -> str:
        """Register a member, or keep it; return why not."""
        name = member.name
        if name not in self._holders:
            if len(self._holders) >= self._limit:
                return self._full()
        elif (holder := self._holders[name]) != key:
            incarnation = self._roster.known[name].incarnation
            if member.incarnation <= incarnation:
                return f"incarnation {incarnation} of another engine holds the name, not {member.incarnation}"
            self._sessions[holder].names.remove(name)
        self._holders[name] = key
        session.names.add(name)
        self._roster.put(member)
        return ""

    def _full(self) -> str:
        return f"the registry has its {self._limit} members"

    def _forget_an_empty_one(self) -> bool:
        """Forget the session without members that was begun first, whose number matters least."""
        for key, session in self._sessions.items():
            if not session.names:
                del self._sessions[key]
                return True
        return False

    def holds(self, name: str, key: Hashable) -> bool:
        """Whether a session has that member."""
        return name in self._holders and self._holders[name] == key

    def lease_s(self, name: str) -> float:
        """Return the length of a member's lease."""
        session = self._sessions.get(self._holders.get(name))
        return LOCAL_LEASE_S if session is None or session.lease_s == math.inf else session.lease_s

    def forget(self, key: Hashable) -> None:
        """Withdraw a session with all that it has, and whose number is not needed."""
        session = self._sessions.pop(key, None)
        for name in tuple(session.names) if session is not None else ():
            self._holders.pop(name)
            self._roster.remove(name)

    def expire(self, now: float) -> None:
        """Withdraw the sessions whose leases have run out."""
        for key in [key for key, session in self._sessions.items() if session.deadline <= now]:
            self.forget(key)

    def postpone(self, seconds: float) -> None:
        """Lengthen every lease, because nobody was listening for so long."""
        for session in self._sessions.values():
            session.deadline += seconds

    def next_deadline(self) -> float:
        """Return when the first lease runs out; infinite where there is none."""
        return min((session.deadline for session in self._sessions.values()), default=math.inf)

    def _drop(self, name: str) -> None:
        self._sessions[self._holders.pop(name)].names.remove(name)
        self._roster.remove(name)
