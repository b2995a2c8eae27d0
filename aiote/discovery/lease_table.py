"""The lease table of the embedded registry's server: which session holds which name, and until when.

Pure: time is an argument, in seconds of the caller's clock. A *session* is one client. It repeatedly reports all its
members, and how long its report holds. The table withdraws a member when its session's report omits it, when the
session's lease expires, or when another session takes the name.

The *owner* of a name is the engine that has registered it. While the owner is connected, no other engine can take the
name, whatever incarnation it reports. Once the owner is gone another engine may take the name, even with a smaller
incarnation, because an incarnation is a time, and the clock of its host may be behind. An engine that had the name
earlier needs a greater incarnation than it had then.

The number of sessions of each owner is limited, and so is the number of its members, over all its sessions. When the
table is full of members, the owner with the most members loses its last member. When it is full of sessions, a session
without members is forgotten; if every session has members, the owner with the most sessions loses its last session.

Calls can overtake each other, so a session numbers its reports. A report with a smaller number than an earlier one is
ignored, because it would register a member that is gone. The table keeps the number until the lease expires, even for a
session that has no members any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from .membership import Member, Roster

__all__ = ["LeaseTable"]

LOCAL_LEASE_S = 10.0
"""The lease, in seconds, that clients are told for a member in the server's own process, which has none."""
SESSIONS_EACH = 64
FORMER = 8
"""How many earlier owners of a name are remembered, with their incarnations."""
POSTPONED = 3
"""How often a lease may be extended before it is renewed: a client that keeps the server busy keeps no dead member."""


@dataclass(slots=True)
class _Session:
    number: int
    lease_s: float
    deadline: float
    owner: Hashable
    names: dict[str, None] = field(default_factory=dict)
    postponed: int = 0


class LeaseTable:
    """The members of all sessions, at most `limit` members and `limit` sessions; `roster` has the resulting list.

    `each`: the most members of one owner. `connected` returns whether an owner is connected.
    """

    def __init__(
        self,
        roster: Roster,
        limit: int,
        owner_limit: int = 1 << 62,
        connected: Callable[[Hashable], bool] = lambda _: True,
    ) -> None:
        self._roster = roster
        self._limit, self._owner_limit, self._connected = limit, owner_limit, connected
        self._owned = Counter[Hashable]()
        self._sessions_of = Counter[Hashable]()
        self._sessions: dict[Hashable, _Session] = {}
        self._holders: dict[str, Hashable] = {}
        self._former_owners: dict[str, dict[Hashable, int]] = {}

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
        """Record that a session has these members, and no others, for `lease_s`; return the refused ones, and why.

        `owner` is the engine that the session belongs to, by default the session itself. Reports with an outdated
        `number` are ignored.
        """
        report = self.report(key, number, lease_s, {member.name for member in members}, members, now, owner=owner)
        return {name: reason for name, reason in report if reason}

    def report(
        self,
        key: Hashable,
        number: int,
        lease_s: float,
        names: Set[str],
        members: Iterable[Member],
        now: float,
        *,
        owner: Hashable = None,
    ) -> Iterator[tuple[str, str]]:
        """Record a report as `keep` does, one name after another; yield each, and why it is refused, or an empty text.

        The caller may pause after each. If a later report of the session comes then, or the session ends, this stops.
        """
        session = self._sessions.get(key)
        if session is None:
            owner = key if owner is None else owner
            if not self._has_room_for_a_session(owner):
                yield from [(name, f"the registry has its {self._limit} clients") for name in names]
                return
            self._sessions_of[owner] += 1
            session = self._sessions[key] = _Session(number, lease_s, now + lease_s, owner)
        elif number < session.number:
            return
        session.number, session.lease_s, session.deadline, session.postponed = number, lease_s, now + lease_s, 0
        for name in session.names.keys() - names:
            if self._holders.get(name) == key:
                self._drop(name)
                yield name, ""
            if not self._is_latest(key, session, number):
                return
        for member in members:
            yield member.name, self._enter(key, session, member)
            if not self._is_latest(key, session, number):
                return

    def _is_latest(self, key: Hashable, session: _Session, number: int) -> bool:
        """Return whether a session has neither ended nor made a report after the one of this number."""
        return self._sessions.get(key) is session and session.number == number

    def _enter(self, key: Hashable, session: _Session, member: Member) -> str:
        """Register a member, or update it; return why it is refused, or an empty text."""
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
        """Return why this owner cannot take a name that another session, or no session, holds; empty if it can."""
        holder = self._sessions.get(self._holders.get(member.name))
        if self._owned[owner] >= self._owner_limit and (holder is None or holder.owner != owner):
            return f"this engine has {self._owner_limit} members already, which is the limit"
        if holder is not None:
            if holder.owner != owner and self._connected(holder.owner):
                return "another connected engine holds the name; use another name"
            if member.incarnation <= (had := self._had(owner, holder.owner, member.name)):
                return f"another engine holds the name, or this one lost it, with incarnation {had}; "
                f"{member.incarnation} must be greater"
            return ""
        if len(self._holders) >= self._limit and not self._refuse_greediest(owner):
            return self._full()
        return ""

    def _had(self, owner: Hashable, holder: Hashable, name: str) -> int:
        """Return the incarnation with which an owner has a name, or had it; -1 if it never had."""
        if owner == holder:
            return self._roster.known[name].incarnation
        return self._former_owners.get(name, {}).get(owner, -1)

    def _hand_over(self, name: str, owner: Hashable) -> None:
        """Remember which owner had a name, and with which incarnation."""
        former = self._former_owners.setdefault(name, {})
        former.pop(owner, None)
        former[owner] = self._roster.known[name].incarnation
        if len(former) > FORMER:
            del former[next(iter(former))]

    def _refuse_greediest(self, owner: Hashable) -> bool:
        """Withdraw the last member of the owner with the most members, to make room for this owner.

        Return False without a withdrawal if that owner would then have fewer members than this one.
        """
        leased = [session for session in self._sessions.values() if session.names and session.lease_s < math.inf]
        largest = max(leased, key=lambda session: (self._owned[session.owner], len(session.names)), default=None)
        if largest is None or self._owned[largest.owner] <= self._owned[owner] + 1:
            return False
        self._drop(next(reversed(largest.names)))
        return True

    def _has_room_for_a_session(self, owner: Hashable) -> bool:
        if self._sessions_of[owner] >= SESSIONS_EACH:
            return self._forget_an_empty_one(owner)
        return len(self._sessions) < self._limit or self._forget_an_empty_one() or self._end_greediest(owner)

    def _full(self) -> str:
        return f"the registry has {self._limit} members already, which is the limit"

    def _forget_an_empty_one(self, owner: Hashable = None) -> bool:
        """Forget a session without members, because its number matters least; return whether there was one.

        It is the oldest one of the owner with the most sessions. With `owner`, only its sessions count.
        """
        empty = [key for key, session in self._sessions.items() if not session.names and owner in (None, session.owner)]
        if empty:
            self.forget(max(empty, key=lambda key: self._sessions_of[self._sessions[key].owner]))
        return bool(empty)

    def _end_greediest(self, owner: Hashable) -> bool:
        """End the last session of the owner with the most sessions, to make room for this owner.

        Return False, and end none, if that owner would then have fewer sessions than this one.
        """
        leased = [key for key, session in self._sessions.items() if session.lease_s < math.inf]
        most = max(leased[::-1], key=lambda key: self._sessions_of[self._sessions[key].owner], default=None)
        if most is None or self._sessions_of[self._sessions[most].owner] <= self._sessions_of[owner] + 1:
            return False
        self.forget(most)
        return True

    def holds(self, name: str, key: Hashable) -> bool:
        """Return whether a session holds a name."""
        return name in self._holders and self._holders[name] == key

    def lease_s(self, name: str) -> float:
        """Return the length of a member's lease in seconds."""
        session = self._sessions.get(self._holders.get(name))
        return LOCAL_LEASE_S if session is None or session.lease_s == math.inf else session.lease_s

    def forget(self, key: Hashable) -> None:
        """Remove a session, whose number is no longer needed, and withdraw all its members."""
        if key in self._sessions:
            for name in tuple(self._sessions[key].names):
                self._drop(name)
            owner = self._sessions.pop(key).owner
            self._sessions_of[owner] -= 1
            if not self._sessions_of[owner]:
                del self._sessions_of[owner]

    def expire(self, now: float) -> None:
        """Remove the sessions whose leases have expired, and withdraw their members."""
        for _ in self.expiring(now):
            pass

    def expiring(self, now: float) -> Iterator[None]:
        """Do as `expire`, and yield after each member: the caller may pause then, and a session may be renewed."""
        for key in [key for key, session in self._sessions.items() if session.deadline <= now]:
            while (session := self._sessions.get(key)) is not None and session.deadline <= now:
                if not session.names:
                    self.forget(key)
                    break
                self._drop(next(iter(session.names)))
                yield

    def postpone(self, seconds: float) -> None:
        """Extend every lease by the time that the server did not listen; at most POSTPONED times until a renewal."""
        for session in self._sessions.values():
            if session.postponed < POSTPONED:
                session.postponed += 1
                session.deadline += seconds

    def next_deadline(self) -> float:
        """Return when the first lease expires; infinite if there is none."""
        return min((session.deadline for session in self._sessions.values()), default=math.inf)

    def _drop(self, name: str) -> None:
        self._former_owners.pop(name, None)
        self._release(name)
        self._roster.remove(name)

    def _release(self, name: str) -> None:
        """Remove a name from the session that holds it."""
        session = self._sessions[self._holders.pop(name)]
        del session.names[name]
        self._owned[session.owner] -= 1
        if not self._owned[session.owner]:
            del self._owned[session.owner]
