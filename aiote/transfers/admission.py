"""The admission queue of one peer: transfers that wait to start, and tasks that wait to submit one.

At most `limit` transfers toward a peer are unfinished. Others wait in the queue, first come, first served. To keep that
order, a link is `ready`, which lets transfers start without asking the queue, only while the queue is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..aio import wake

if TYPE_CHECKING:
    from ..aio import EventLoop, Waiter
    from ..rails import PeerLink
    from .transfer import Transfer

__all__ = ["AdmissionQueue"]


class Turn:
    """The turn of a task that is about to submit a transfer; `held` while that task runs and may use the turn."""

    __slots__ = ("held", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.held = False


class AdmissionQueue:
    """The queue toward one peer. `link` is None before there is a connection and after it is lost."""

    def __init__(self, loop: EventLoop, limit: int, start: Callable[[Transfer, PeerLink], None]) -> None:
        self.link: PeerLink | None = None
        self._loop = loop
        self._limit = limit
        self._start = start
        self._waiting: dict[Transfer | Turn, None] = {}
        self._granted: set[Turn] = set()
        self._moving = False

    @property
    def has_room(self) -> bool:
        """Whether one more transfer would be within the limit."""
        started = self.link.unfinished if self.link is not None else 0
        return started + len(self._waiting) + len(self._granted) < self._limit

    def open(self, link: PeerLink) -> None:
        """Start the waiting transfers over this link from now on."""
        self.link = link
        link.limit = self._limit
        link.on_room = self.move
        self.move()

    def add(self, transfer: Transfer) -> None:
        """Start a transfer now, or when its turn has come."""
        self._waiting[transfer] = None
        self.move()

    def remove(self, transfer: Transfer) -> None:
        """Record that a transfer has ended without the native core, in the queue or refused by the core."""
        self._waiting.pop(transfer, None)
        self.move()

    def move(self) -> None:
        """Start the first in the queue, for as long as there is room."""
        link = self.link
        if link is None or self._moving:
            # A transfer that starts may end at once and call this again; the call that is already running continues.
            return
        self._moving = True
        try:
            while self._waiting and self.link is link and link.unfinished + len(self._granted) < self._limit:
                first = next(iter(self._waiting))
                del self._waiting[first]
                if isinstance(first, Turn):
                    self._granted.add(first)
                    wake(first.waiter)
                else:
                    self._start(first, link)
        finally:
            self._moving = False
            link.ready = self.link is link and not self._waiting and not self._granted

    async def wait(self) -> None:
        """Wait in turn for room, or for the end of the queue. The caller has the room until its next await."""
        self.hand_over(await self.reserve())

    async def reserve(self) -> Turn:
        """Wait in turn for room, or for the end of the queue. The room is kept until `hand_over` or `give_up`."""
        turn = Turn(self._loop.waiter())
        self._waiting[turn] = None
        if self.link is not None:
            self.link.ready = False
        self.move()
        try:
            await turn.waiter
        except BaseException:
            self._waiting.pop(turn, None)
            self.give_up(turn)
            raise
        return turn

    def hand_over(self, turn: Turn) -> None:
        """Let the running task use a turn, until its next await."""
        turn.held = True
        self._loop.call_soon(lambda: self.give_up(turn))

    def give_up(self, turn: Turn) -> None:
        """Pass on the room of a turn that was not used. Idempotent."""
        self._granted.discard(turn)
        self.move()

    @property
    def has_turn(self) -> bool:
        """Whether the running task has waited for room and may take it."""
        return any(turn.held for turn in self._granted)

    def use_turn(self) -> bool:
        """Take the room that the running task has waited for; return False if it has not."""
        held = next((turn for turn in self._granted if turn.held), None)
        if held is None:
            return False
        self._granted.discard(held)
        return True

    def dissolve(self) -> Iterator[Transfer]:
        """Start nothing more: yield the waiting transfers and wake the waiting tasks, which look for another way."""
        if self.link is not None:
            self.link.ready = False
        self.link = None
        waiting, self._waiting = self._waiting, {}
        for one in waiting:
            if isinstance(one, Turn):
                wake(one.waiter)
            else:
                yield one
