"""A member's registration in its own process: the changes to report, and those that the registry has confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import anyio

import aiote

from ..aio import Condition
from .membership import Attribute, Member, RegistryError

__all__ = ["HeldRegistration", "claim", "give_up"]


class HeldRegistration:
    """A registration with a remote registry. Its changes are numbered; each change to report calls `changed`."""

    def __init__(self, member: Member, changed: Callable[[], object]) -> None:
        self.member = member
        self.lost = ""
        self.number = 1
        self.acknowledged = 0
        self.leaving = False
        self.left = anyio.Event()
        self._changed = changed
        self._answered = Condition()

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes; return when the registry has them. Raises as `Registration.update`."""
        self.require_held()
        member = replace(self.member, attributes=attributes)
        if member != self.member:
            self.member = member
            self.number += 1
            self._changed()
        await self.resolved()

    async def resolved(self) -> None:
        """Wait until the registry has all changes so far. Raises RegistryError if the registration is lost."""
        number = self.number
        await self._answered.until(lambda: self.acknowledged >= number or self.lost)
        self.require_held()

    def require_held(self) -> None:
        """Raise RegistryError if the registration is lost."""
        if self.lost:
            raise RegistryError(f"member {self.member.name}: {self.lost}")

    def acknowledge(self, number: int) -> None:
        """Record that the registry has the change with this number."""
        self.acknowledged = max(self.acknowledged, min(number, self.number))
        self._answered.wake_all()

    def lose(self, reason: str) -> None:
        """Record why the registration is lost: another engine has the name, or this one is closed. The first stays."""
        self.lost = self.lost or reason
        self._answered.wake_all()


AnyRegistration = TypeVar("AnyRegistration", bound=HeldRegistration)


async def claim(registrations: dict[str, AnyRegistration], registration: AnyRegistration) -> None:
    """Enter a registration under its name, once an earlier registration of that name has finished leaving.

    It waits because the registry must not mistake the earlier one's leave for the new one's, or its lease for
    another's. Raises UsageError if the name has a registration that is not leaving. No other task runs between the last
    check and the entry.
    """
    name = registration.member.name
    while (present := registrations.get(name)) is not None:
        if not present.leaving:
            raise aiote.UsageError(
                f"join: member {name} is registered here already; use another name, or update its attributes"
            )
        await present.left.wait()
    registrations[name] = registration


def give_up(registrations: dict[str, AnyRegistration], registration: AnyRegistration) -> None:
    """Remove a registration that has left, and wake those that wait for its name."""
    del registrations[registration.member.name]
    registration.left.set()
