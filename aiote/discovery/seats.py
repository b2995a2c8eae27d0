"""A member's seat, as the program sees it that takes it: what is to be told, and what the registry has taken of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import anyio

import aiote

from ..service.background import Bell
from .membership import Attribute, Member, RegistryError

__all__ = ["HeldSeat", "claim", "give_up"]


class HeldSeat:
    """A seat whose registry is elsewhere. Each change has a number, of `numbers`, which grow; `changed` is called when
    there is one to be told.

    `told` is the number that was last sent: for whoever sends.
    """

    def __init__(self, member: Member, numbers: Iterator[int], changed: Callable[[], object]) -> None:
        self.member = member
        self.lost = ""
        self.first = self.number = next(numbers)
        self.told = 0
        self._numbers = numbers
        self.taken = 0
        self.leaving = False
        self.gone = anyio.Event()
        self._changed = changed
        self._bell = Bell()

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes; return when the registry has them. See `Seat.update`."""
        self.require_held()
        member = replace(self.member, attributes=attributes)
        if member != self.member:
            self.member = member
            self.number = next(self._numbers)
            self._changed()
        await self.resolved()

    async def resolved(self) -> None:
        """Wait until the registry has what there is to be told. Raises RegistryError when the seat is lost."""
        number = self.number
        while self.taken < number and not self.lost:
            await self._bell.wait()
        self.require_held()

    def require_held(self) -> None:
        """Raise RegistryError when the seat is lost."""
        if self.lost:
            raise RegistryError(f"member {self.member.name}: {self.lost}")

    def take(self, number: int) -> None:
        """Take note that the registry has what bears this number."""
        self.taken = max(self.taken, min(number, self.number))
        self._bell.ring()

    def lose(self, reason: str) -> None:
        """Take note that the seat is another's, or that nobody keeps it any more."""
        self.lost = self.lost or reason
        self._bell.ring()


AnySeat = TypeVar("AnySeat", bound=HeldSeat)


async def claim(seats: dict[str, AnySeat], seat: AnySeat) -> None:
    """Enter a seat under its name, once one of that name that is leaving has left.

    Its leave must not be taken for the new one's, nor its lease for another's. Raises UsageError where the name has a
    seat that is not leaving. When it returns the seat is entered, without a moment in between.
    """
    name = seat.member.name
    while (present := seats.get(name)) is not None:
        if not present.leaving:
            raise aiote.UsageError(f"join: member {name} has a seat here already")
        await present.gone.wait()
    seats[name] = seat


def give_up(seats: dict[str, AnySeat], seat: AnySeat) -> None:
    """Take a seat out that has left."""
    del seats[seat.member.name]
    seat.gone.set()
