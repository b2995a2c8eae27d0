"""The members of a registry as the servers of a client: `service.client(engine, Members(registry, role), Service)`."""

from __future__ import annotations

from collections.abc import Sequence

import aiote

from .membership import ROLE_BYTES, Member, Registry, check_text

__all__ = ["Members"]


class Members:
    """The addresses of the members of one role; `aiote.service.client` takes it instead of an address.

    A member's address must be `bytes(engine.address)`; `malformed` counts the members with another one. Members with a
    true attribute `draining` are left out. While the registry is out of touch its members stay, and calls find out
    whether a member is still there. It belongs to one event loop, and needs no closing.
    """

    def __init__(self, registry: Registry, role: str) -> None:
        check_text("role", role, ROLE_BYTES)
        self.malformed = 0
        self._role = role
        self._watch = registry.watch()
        self._found: dict[str, aiote.Address] = {}
        self._addresses: tuple[aiote.Address, ...] = ()

    async def addresses(self) -> Sequence[aiote.Address]:
        """Return the members' present addresses; wait while there are none. The tuple is the same until they change.

        Raises ClosedError if there are none and the registry is closed.
        """
        while True:
            self._follow()
            if self._addresses:
                return self._addresses
            if self._watch.closed:
                raise aiote.ClosedError(f"no members of role {self._role} can be found, because the registry is closed")
            await self._watch.wait()

    def _follow(self) -> None:
        """Take the events since the last call, without waiting, so that no background task is needed."""
        changed = False
        while (event := self._watch.take()) is not None:
            name = event.member.name
            address = None if event.kind == "left" else self._address_of(event.member)
            if address == self._found.get(name):
                continue
            changed = True
            if address is None:
                del self._found[name]
            else:
                self._found[name] = address
        if changed:
            self._addresses = tuple(dict.fromkeys(self._found.values()))

    def _address_of(self, member: Member) -> aiote.Address | None:
        if member.role != self._role or member.attributes.get("draining"):
            return None
        try:
            return aiote.Address.from_bytes(member.address)
        except aiote.UsageError:
            self.malformed += 1
            return None
