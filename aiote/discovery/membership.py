"""Members, the events when they come and go, and the interface of every registry.

A member is one engine that takes part, under a name. Its *incarnation* distinguishes the runs of one name: a greater
incarnation takes the name over, and watchers are told that the old member has left and the new one has joined.

`Roster` holds the members that one program knows. It knows neither the source of that knowledge nor a clock. A watcher
gets the differences between the state last reported to it and the present state. Therefore a slow watcher misses
members that came and went in the meantime, and costs one entry for each name, never a backlog.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Protocol

import anyio
import anyio.lowlevel

import aiote

from ..aio import Condition

__all__ = ["Attribute", "Member", "MemberEvent", "MemberRegistration", "Registry", "RegistryError", "Roster", "Watch"]

Attribute = str | int | float | bool
EventKind = Literal["joined", "changed", "left"]

NAME_BYTES = 128
ROLE_BYTES = 32
ADDRESS_BYTES = 512
ATTRIBUTES = 16
KEY_BYTES = 32
VALUE_BYTES = 128
LEASE_S = (0.1, 600.0)
DEFAULT_LEASE_S = 10.0
RETRY_LEAST_S = 0.1
RETRY_MOST_S = 5.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INTEGERS = (-(1 << 63), (1 << 63) - 1)


class RegistryError(aiote.AioteError):
    """The registry refused a member, or another engine took its name; the message says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """One engine that takes part; raises UsageError if a field is malformed.

    `name`: 1 to 128 bytes of UTF-8. `role`: its purpose, 1 to 32 bytes. `address`: `bytes(engine.address)`, or any
    bytes that the members agree on, up to 512. `incarnation`: 64 bits, greater in every run of the same name.
    `attributes`: up to 16 texts, finite numbers and truth values, which may change (load, model, tensor-parallel size).
    A registry that is out of touch sets `stale`: the member is as last reported. Comparisons ignore `stale`.
    """

    name: str
    role: str
    address: bytes
    incarnation: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict, hash=False)
    stale: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for what, text, limit in (("name", self.name, NAME_BYTES), ("role", self.role, ROLE_BYTES)):
            check_text(f"Member.{what}", text, limit)
            if not text:
                raise aiote.UsageError(f"Member.{what}: expected at least one character")
        if not isinstance(self.address, bytes) or len(self.address) > ADDRESS_BYTES:
            raise aiote.UsageError(f"Member.address: expected at most {ADDRESS_BYTES} bytes")
        if not _is_integer(self.incarnation) or not 0 <= self.incarnation < 1 << 64:
            raise aiote.UsageError(f"Member.incarnation={self.incarnation!r}: expected an integer of 64 bits")
        object.__setattr__(self, "attributes", checked_attributes(self.attributes))


def checked_attributes(attributes: Mapping[str, Attribute]) -> Mapping[str, Attribute]:
    """Return an immutable copy, in the order of the keys. Raises UsageError for malformed attributes."""
    if not isinstance(attributes, Mapping) or len(attributes) > ATTRIBUTES:
        raise aiote.UsageError(f"attributes: expected a mapping of at most {ATTRIBUTES} entries")
    for key, value in attributes.items():
        check_text("an attribute's name", key, KEY_BYTES)
        if isinstance(value, str):
            check_text(f"attributes[{key!r}]", value, VALUE_BYTES)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise aiote.UsageError(f"attributes[{key!r}]: expected a finite number")
        elif not isinstance(value, int) or not _INTEGERS[0] <= value <= _INTEGERS[1]:
            raise aiote.UsageError(f"attributes[{key!r}]: expected a text, a truth value or a number of 64 bits")
    return MappingProxyType(dict(sorted(attributes.items())))


def check_text(what: str, text: object, limit: int) -> None:
    """Raise UsageError unless `text` is text without control characters, of at most `limit` bytes of UTF-8."""
    if not isinstance(text, str) or _CONTROL.search(text):
        raise aiote.UsageError(f"{what}: expected text without control characters")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise aiote.UsageError(f"{what}: {error}") from error
    if size > limit:
        raise aiote.UsageError(f"{what}: expected at most {limit} bytes, got {size}")


def check_lease(lease_s: float) -> float:
    """Return a lease's length in seconds. Raises UsageError if it is out of bounds."""
    if isinstance(lease_s, int | float) and LEASE_S[0] <= lease_s <= LEASE_S[1]:
        return float(lease_s)
    raise aiote.UsageError(f"lease_s={lease_s!r}: expected {LEASE_S[0]} to {LEASE_S[1]} seconds")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """An event of a member; with "left", `member` is as it was last reported."""

    kind: EventKind
    member: Member


class Watch(AsyncIterator[MemberEvent]):
    """The events of a roster, beginning with the members that are there; it ends with the registry.

    A watch is for one reader. The reader may drop it at any time, which frees everything. Cancelling a wait loses no
    event.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._reported: dict[str, Member] = {}
        self._pending: dict[str, None] = dict.fromkeys(roster.known)
        self._changed = Condition()
        self._closed = False

    def note(self, name: str) -> None:
        """Record that the member of a name may have changed."""
        if not self._closed and (name in self._reported or name in self._roster.known):
            self._pending[name] = None
        else:
            self._pending.pop(name, None)
        self._changed.wake_all()

    def wake(self) -> None:
        """Wake the reader, so that it checks again."""
        self._changed.wake_all()

    def close(self) -> None:
        """End this watch: it frees its events, and reports none any more."""
        self._closed = True
        self._pending.clear()
        self._reported.clear()
        self.wake()

    @property
    def pending(self) -> bool:
        """Whether there may be an event to report."""
        return bool(self._pending)

    @property
    def closed(self) -> bool:
        """Whether the watch or the roster is closed, so that no events follow the pending ones."""
        return self._closed or self._roster.closed

    def take(self) -> MemberEvent | None:
        """Return the next event, or None."""
        while self._pending:
            name = next(iter(self._pending))
            reported, known = self._reported.get(name), self._roster.known.get(name)
            if reported is not None and (known is None or known.incarnation != reported.incarnation):
                del self._reported[name]
                if known is None:
                    del self._pending[name]
                return MemberEvent("left", reported)
            del self._pending[name]
            if known is not None and known != reported:
                self._reported[name] = known
                return MemberEvent("joined" if reported is None else "changed", known)
        return None

    async def wait(self) -> None:
        """Sleep until there may be an event, or the watch or the roster is closed."""
        if not self._pending and not self.closed:
            await self._changed.wait()

    async def __anext__(self) -> MemberEvent:
        await anyio.lowlevel.checkpoint()
        while (event := self.take()) is None:
            if self.closed:
                raise StopAsyncIteration
            await self.wait()
        return event


class Roster:
    """The members known in this program, by their names, and the watches on them."""

    def __init__(self) -> None:
        self.known: dict[str, Member] = {}
        self.closed = False
        # A loop that is left drops its watch without a call to us, so hold watches weakly. Numbers keep their order.
        self._watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
        self._next = 0

    def put(self, member: Member) -> None:
        """Add a member, or replace it by its present state."""
        if self.known.get(member.name) != member:
            self.known[member.name] = member
            self._note(member.name)

    def remove(self, name: str) -> None:
        """Remove a member."""
        if self.known.pop(name, None) is not None:
            self._note(name)

    def watch(self) -> Watch:
        """Return a new watch, which begins with the members known now."""
        watch = Watch(self)
        self._next += 1
        self._watches[self._next] = watch
        return watch

    @property
    def watchers(self) -> int:
        """How many watches there are."""
        return len(self._watches)

    def members(self, *, stale: bool = False) -> tuple[Member, ...]:
        """Return the known members; with `stale`, all are marked as stale."""
        if not stale:
            return tuple(self.known.values())
        return tuple(replace(member, stale=True) for member in self.known.values())

    def close(self) -> None:
        """End every watch, once it has reported its pending events."""
        self.closed = True
        for watch in tuple(self._watches.values()):
            watch.wake()

    def _note(self, name: str) -> None:
        for watch in tuple(self._watches.values()):
            watch.note(name)


class MemberRegistration(Protocol):
    """A member's registration, which exists while its `async with` lasts and its lease is renewed."""

    @property
    def member(self) -> Member:
        """The member with its latest attributes, which the registry may not have yet."""
        ...

    @property
    def lost(self) -> str:
        """Why the registration is lost, such as a takeover of its name, or an empty text. It stays lost."""
        ...

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes; return when the registry has them.

        While the registry cannot be reached this waits, until the caller's deadline ends it. The attributes are
        reported nevertheless as soon as possible, and the last ones win. Raises RegistryError if the registration is
        lost, UsageError for malformed attributes.
        """
        ...


class Registry(Protocol):
    """The list of members. When a program loses touch with it, the members known there stay, marked as stale."""

    @property
    def in_touch(self) -> bool:
        """Whether the members known here are up to date, as far as this program can tell."""
        ...

    async def ready(self) -> None:
        """Wait until the members are known for the first time. Raises ClosedError, RegistryError if that is refused."""
        ...

    def members(self) -> tuple[Member, ...]:
        """Return the members known here."""
        ...

    def watch(self) -> Watch:
        """Return an iterator over events, beginning with the present members.

        For a slow reader only the latest state of each member is kept.
        """
        ...

    def join(self, member: Member) -> AbstractAsyncContextManager[MemberRegistration]:
        """Register a member for the length of an `async with`, which begins when the registry has it.

        Meanwhile its lease is renewed. The member leaves at the end, also after a cancellation. While the registry
        cannot be reached this waits, until the caller's deadline ends it. Raises RegistryError if the member is
        refused, ClosedError if the registry is closed.
        """
        ...
