"""Who holds which name, and until when: the table of the embedded registry's server.

Pure: time is an argument, in seconds of whatever clock the caller has. A *session* is one client; it says again and
again which members it has, all of them, and how long that holds. A member is withdrawn when its session says no more of
it, when the session's lease runs out, or when another session takes the name.

A name is its *owner's*, the engine that has registered it, as long as that is connected: nobody else takes it, whatever
incarnation it says. Once it is gone another engine takes the name, whose incarnation may be smaller: it is a time, and
the clock of its host may be behind. An engine that had the name earlier needs a greater incarnation than it had then.

An owner has so many members and sessions, however its sessions share them. Where all is full the owner with the most
members loses its last.

Calls overtake each other, so a session numbers what it says, and what comes behind a greater number is ignored: it
would register a ghost. The number is kept until the lease runs out, also of a session that has no members any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from .membership import Member, Roster

__all__ = ["LeaseTable"]

LOCAL_LEASE_S = 10.0
"""What is told of a member that has no lease, because it is in the server's own process."""
SESSIONS_EACH = 64
FORMER = 8
"""So many engines that had a name are told from a new one."""
POSTPONED = 3
"""So often a lease is lengthened until it is renewed: whoever keeps the server busy keeps no dead member."""


@dataclass(slots=True)
class _Session:
    number: int
    lease_s: float
    deadline: float
    owner: Hashable
    names: dict[str, None] = field(default_factory=dict)
    postponed: int = 0


class LeaseTable:
    """The members of all sessions, of which there are `limit` at most; what they amount to is kept in `roster`.

    `each`: members of one owner. `connected` tells whether an owner is.
    """

    def __init__(
        self,
        roster: Roster,
        limit: int,
        each: int = 1 << 62,
        connected: Callable[[Hashable], bool] = lambda _: True,
    ) -> None:
        self._roster = roster
        self._limit, self._each, self._connected = limit, each, connected
        self._owned = Counter[Hashable]()
        self._sessions: dict[Hashable, _Session] = {}
        self._holders: dict[str, Hashable] = {}
        self._former: dict[str, dict[Hashable, int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def keep(
        self,
        key: Hashable,
        number: int,
        lease_s: float,
        members: Sequence[Member],
        now: float,
        owner: Hashable = None,
    ) -> dict[str, str]:
        """Have these members of a session, and no others, for so long; return who was refused, and why.

        `owner` is whose session it is, by default its own.
        """
        session = self._sessions.get(key)
        if session is None:
            owner = key if owner is None else owner
            if not self._has_room_for_a_session(owner):
                return {member.name: self._full() for member in members}
            session = self._sessions[key] = _Session(number, lease_s, now + lease_s, owner)
        elif number < session.number:
            return {}
        session.number, session.lease_s, session.deadline, session.postponed = number, lease_s, now + lease_s, 0
        for name in session.names.keys() - {member.name for member in members}:
            self._drop(name)
        refusals = {member.name: self._enter(key, session, member) for member in members}
        return {name: reason for name, reason in refusals.items() if reason}

    def _enter(self, key: Hashable, session: _Session, member: Member) -> str:
        """Register a member, or keep it; return why not."""
        name = member.name
        holder = self._holders.get(name)
        if holder != key and (refusal := self._refusal(session.owner, member)):
            return refusal
        if holder != key:
            if holder is not None:
                self._hand_over(name, self._sessions[holder].owner)
                self._release(name)
            self._owned[session.owner] += 1
        self._holders[name] = key
        session.names[name] = None
        self._roster.put(member)
        return ""

    def _refusal(self, owner: Hashable, member: Member) -> str:
        """Return why a name that another session has, or none, does not become this owner's."""
        holder = self._sessions.get(self._holders.get(member.name))
        if self._owned[owner] >= self._each and (holder is None or holder.owner != owner):
            return f"this engine has its {self._each} members"
        if holder is not None:
            if holder.owner != owner and self._connected(holder.owner):
                return "another engine, which is connected, holds the name"
            if member.incarnation <= (had := self._had(owner, holder.owner, member.name)):
                return f"incarnation {had} of another engine holds the name, or has lost it, not {member.incarnation}"
            return ""
        if len(self._holders) >= self._limit and not self._refuse_greediest(owner):
            return self._full()
        return ""

    def _had(self, owner: Hashable, holder: Hashable, name: str) -> int:
        """Return with which incarnation an owner has a name, or had it; -1 where it never did."""
        if owner == holder:
            return self._roster.known[name].incarnation
        return self._former.get(name, {}).get(owner, -1)

    def _hand_over(self, name: str, owner: Hashable) -> None:
        """Remember who had a name, and with which incarnation."""
        former = self._former.setdefault(name, {})
        former.pop(owner, None)
        former[owner] = self._roster.known[name].incarnation
        if len(former) > FORMER:
            del former[next(iter(former))]

    def _refuse_greediest(self, owner: Hashable) -> bool:
        """Withdraw the last member of the owner with the most; return False where that is this one."""
        leased = [session for session in self._sessions.values() if session.names and session.lease_s < math.inf]
        largest = max(leased, key=lambda session: (self._owned[session.owner], len(session.names)), default=None)
        if largest is None or self._owned[largest.owner] <= self._owned[owner] + 1:
            return False
        self._drop(next(reversed(largest.names)))
        return True

    def _has_room_for_a_session(self, owner: Hashable) -> bool:
        own = sum(session.owner == owner for session in self._sessions.values())
        if own >= SESSIONS_EACH:
            return self._forget_an_empty_one(owner)
        return len(self._sessions) < self._limit or self._forget_an_empty_one()

    def _full(self) -> str:
        return f"the registry has its {self._limit} members"

    def _forget_an_empty_one(self, owner: Hashable = None) -> bool:
        """Forget the session without members that was begun first, of this owner if any; its number matters least."""
        for key, session in self._sessions.items():
            if not session.names and owner in (None, session.owner):
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
        if key in self._sessions:
            for name in tuple(self._sessions[key].names):
                self._drop(name)
            del self._sessions[key]

    def expire(self, now: float) -> None:
        """Withdraw the sessions whose leases have run out."""
        for key in [key for key, session in self._sessions.items() if session.deadline <= now]:
            self.forget(key)

    def postpone(self, seconds: float) -> None:
        """Lengthen every lease, because nobody was listening for so long; each so often until it is renewed."""
        for session in self._sessions.values():
            if session.postponed < POSTPONED:
                session.postponed += 1
                session.deadline += seconds

    def next_deadline(self) -> float:
        """Return when the first lease runs out; infinite where there is none."""
        return min((session.deadline for session in self._sessions.values()), default=math.inf)

    def _drop(self, name: str) -> None:
        self._former.pop(name, None)
        self._release(name)
        self._roster.remove(name)

    def _release(self, name: str) -> None:
        """Have nobody hold a name."""
        session = self._sessions[self._holders.pop(name)]
        del session.names[name]
        self._owned[session.owner] -= 1
        if not self._owned[session.owner]:
            del self._owned[session.owner]
