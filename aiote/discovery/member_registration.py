"""A member's registration, as its own program sees it: what is to be told, and what the registry has confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import anyio

import aiote

from ..service.background import Bell
from .membership import Attribute, Member, RegistryError

__all__ = ["HeldRegistration", "claim", "give_up"]


class HeldRegistration:
    """A registration with a registry that is elsewhere. Its changes are numbered; `changed` is called when there is one
    to be told.
    """

    def __init__(self, member: Member, changed: Callable[[], object]) -> None:
        self.member = member
        self.lost = ""
        self.number = 1
        self.taken = 0
        self.leaving = False
        self.gone = anyio.Event()
        self._changed = changed
        self._bell = Bell()

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes; return when the registry has them. See `Registration.update`."""
        self.require_held()
        member = replace(self.member, attributes=attributes)
        if member != self.member:
            self.member = member
            self.number += 1
            self._changed()
        await self.resolved()

    async def resolved(self) -> None:
        """Wait until the registry has what there is to be told. Raises RegistryError when the registration is lost."""
        number = self.number
        while self.taken < number and not self.lost:
            await self._bell.wait()
        self.require_held()

    def require_held(self) -> None:
        """Raise RegistryError when the registration is lost."""
        if self.lost:
            raise RegistryError(f"member {self.member.name}: {self.lost}")

    def take(self, number: int) -> None:
        """Take note that the registry has what bears this number."""
        self.taken = max(self.taken, min(number, self.number))
        self._bell.ring()

    def lose(self, reason: str) -> None:
        """Take note that another has the name, or that nobody keeps it any more."""
        self.lost = self.lost or reason
        self._bell.ring()


AnyRegistration = TypeVar("AnyRegistration", bound=HeldRegistration)


async def claim(registrations: dict[str, AnyRegistration], registration: AnyRegistration) -> None:
    """Enter a registration under its name, once one of that name that is leaving has left.

    Its leave must not be taken for the new one's, nor its lease for another's. Raises UsageError where the name has a
    registration that is not leaving. When it returns the registration is entered, without a moment in between.
    """
    name = registration.member.name
    while (present := registrations.get(name)) is not None:
        if not present.leaving:
            raise aiote.UsageError(f"join: member {name} is registered here already")
        await present.gone.wait()
    registrations[name] = registration


def give_up(registrations: dict[str, AnyRegistration], registration: AnyRegistration) -> None:
    """Take a registration out that has left."""
    del registrations[registration.member.name]
    registration.gone.set()
