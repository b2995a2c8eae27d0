"""Choose which of several servers takes the next call, and keep the client connected to them."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio

import aiote

from ..aio import Backoff, Condition
from .endpoint import CallEndpoint
from .errors import CallError, DrainingError, NotServedError
from .link import Link

__all__ = ["Chooser", "MemberSource"]

AGAIN_S = 5.0
"""How long the client leaves a member alone that takes no calls. After a failure to reach the member, the pause begins
here too and doubles with each further failure, up to MOST_AGAIN_S; it is shortened at random, as `Backoff` does.
"""
MOST_AGAIN_S = 320.0
CONNECTING = 16
"""How many connections the client opens at the same time, and only one of them to the same host and port. So thousands
of addresses that do not answer neither use up this engine's descriptors nor delay members at other addresses.
"""
CONNECTED = 512
"""A client connects to at most this many members; the calls of many clients together still reach all members."""
LOOK_S = 0.25
"""How often a call that waits for a connection asks for the current members."""
COMPARED = 8
"""The client compares this many members and takes the one with the fewest calls, so the cost of choosing does not
depend on the number of members.
"""


class MemberSource(Protocol):
    """Several servers of one service."""

    async def addresses(self) -> Sequence[aiote.Address]:
        """Return the addresses of the current members; wait while there are none.

        The client awaits this for each call. It examines the addresses again only when a different object is returned.
        """


class Chooser:
    """Chooses among members. `reach` returns the link to an address after its handshake, or raises CallError."""

    def __init__(
        self, members: MemberSource, endpoint: CallEndpoint, reach: Callable[[aiote.Address, str], Awaitable[Link]]
    ) -> None:
        self._members, self._endpoint, self._reach = members, endpoint, reach
        self._seen: Sequence[aiote.Address] | None = None
        self._links: dict[aiote.Address, Link] = {}
        self._choices: list[Link] = []
        self._connecting: set[aiote.Address] = set()
        self._retry_at: dict[aiote.Address, float] = {}
        self._pauses: dict[aiote.Address, Backoff] = {}
        self._waiting: list[aiote.Address] = []
        self._look_at = math.inf
        self._failure: Exception | None = None
        self._changed = Condition(endpoint.loop)
        # Begin at an index of this engine's own, so that not all clients begin with the same member.
        self._next_start = int.from_bytes(endpoint.engine.address.identity[:2], "big")

    async def choose(self, method: str, avoid: Sequence[aiote.Address]) -> Link:
        """Return the link to the member with the fewest calls of this client.

        Return a member in `avoid` only if there is no other. Tasks of their own connect the members, so a member that
        does not answer delays only the calls that have no other member to go to. Raises the last error of connecting,
        or NotServedError if there are no members.
        """
        while True:
            addresses = await self._members.addresses()
            if addresses is not self._seen or (self._retry_at and self._look_at <= anyio.current_time()):
                self._update_members(addresses, method)
            link = self._least_loaded()
            if link is not None and not link.lost and link.peer.address not in avoid:
                return link
            self._update_members(addresses, method)
            wanted = [link for link in self._choices if link.peer.address not in avoid]
            if not (wanted or self._connecting):
                wanted = list(self._links.values())
            if wanted:
                return min(wanted, key=_calls)
            if not self._connecting:
                raise self._failure or NotServedError(
                    method, "no server is known; has one joined the registry in this role, and is it not draining?"
                )
            with anyio.move_on_after(LOOK_S):
                await self._changed.wait()

    def pause_member(self, link: Link, error: CallError) -> None:
        """Leave a member alone for AGAIN_S if the error says that it takes no calls."""
        if isinstance(error, DrainingError | NotServedError):
            for address, known in self._links.items():
                if known is link:
                    self._leave_alone(address, AGAIN_S)

    def _leave_alone(self, address: aiote.Address, pause: float) -> None:
        self._retry_at[address] = anyio.current_time() + pause
        self._seen = None

    def _least_loaded(self) -> Link | None:
        """Return the link with the fewest calls among COMPARED links; take equal ones in turn."""
        links = self._choices
        if not links:
            return None
        self._next_start = start = (self._next_start + 1) % len(links)
        some = links[start : start + COMPARED]
        some += links[: min(COMPARED - len(some), start)]
        return min(some, key=_calls)

    def _update_members(self, addresses: Sequence[aiote.Address], method: str) -> None:
        """Update the members from their current addresses, and connect to the new ones."""
        self._seen, wanted, now = addresses, set(addresses), anyio.current_time()
        self._retry_at = {address: at for address, at in self._retry_at.items() if at > now and address in wanted}
        self._look_at = min(self._retry_at.values(), default=math.inf)
        self._links = {one: link for one, link in self._links.items() if one in wanted and not link.lost}
        self._choices = [link for address, link in self._links.items() if address not in self._retry_at]
        self._pauses = {address: pause for address, pause in self._pauses.items() if address in wanted}
        self._waiting = list(wanted - self._links.keys() - self._connecting - self._retry_at.keys())
        # In random order, so that an engine cannot time its registration to become the next choice of every client.
        random.shuffle(self._waiting)
        self._connect_some(method)

    def _connect_some(self, method: str) -> None:
        """Connect to waiting members, up to CONNECTING at a time."""
        places = {(address.host, address.port) for address in self._connecting}
        left = []
        for number, address in enumerate(self._waiting):
            if len(self._connecting) >= CONNECTING or len(self._links) + len(self._connecting) >= CONNECTED:
                left += self._waiting[number:]
                break
            if (address.host, address.port) in places:
                left.append(address)
                continue
            places.add((address.host, address.port))
            self._connecting.add(address)
            self._endpoint.loop.spawn(self._connect, address, method, name="aiote service: connect a member")
        self._waiting = left

    async def _connect(self, address: aiote.Address, method: str) -> None:
        try:
            self._links[address] = await self._reach(address, method)
            self._seen = None
            self._pauses.pop(address, None)
        except (CallError, aiote.ClosedError, aiote.UsageError) as error:
            self._failure = error
            backoff = self._pauses.setdefault(address, Backoff(AGAIN_S, MOST_AGAIN_S))
            self._leave_alone(address, backoff.next())
        finally:
            self._connecting.discard(address)
            self._changed.wake_all()
        if not self._endpoint.engine.closed:
            self._connect_some(method)


def _calls(link: Link) -> int:
    return len(link.calls)
