"""Counting immediates: how stripes add up to writes, and which waiter is told when.

**Units.** A write split in k stripes adds 1/k for each of them. To add exactly, the count is kept in units of

    UNITS = lcm(1, ..., 16) = 720720

so a stripe of a write of k stripes adds UNITS // k, an integer for every k that the wire can express, and its k stripes
add up to UNITS. Addition commutes: the sum depends neither on the order of arrival, nor on the mixing of writes that
were split differently, nor on the rails that carried them. `value` counts whole writes, units // UNITS. With several
writes in flight, their parts may add up to a whole before any single write is complete, so `wait(n)` means "all of
them" where n writes are in flight on that value.

**Waiters** stand in one queue for each immediate, and only its head is examined: when units >= n * UNITS it is
satisfied, n * UNITS are consumed, and the next is examined. A waiter further back waits even if it needs less, so that
no waiter starves. No waiter needs to be there before the arrivals: counts that arrive early are kept.

**Tickets.** A ticket is one wait:

| from      | on                                      | to        | units of its immediate                      |
|-----------|-----------------------------------------|-----------|---------------------------------------------|
|           | `wait`                                  | PENDING   | unchanged                                   |
| PENDING   | it is the head, and there are enough    | SATISFIED | n * UNITS consumed                          |
| PENDING   | `cancel`                                | CANCELLED | unchanged; the queue is examined again      |
| SATISFIED | `deliver`: its waiter was told          | DELIVERED | unchanged                                   |
| SATISFIED | `cancel`: its waiter left before that   | CANCELLED | n * UNITS given back; the queue is examined |

The last two states are final. SATISFIED covers the turn of the event loop between the count and its delivery: without
this state, a task that is cancelled in that turn would take its counts with it.

**Entries.** An immediate has an entry only while its units are not zero, it has a holder, or a ticket of it is open
(PENDING or SATISFIED); an absent entry means zero. So 2**28 immediates cost nothing, and the table grows only with the
immediates in use.

This module knows neither tasks nor rails nor time. It is the reference for the native twin.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final

from aiote.core.striping import MAX_COUNTED, check_immediate, decode_immediate
from aiote.errors import UsageError

__all__ = ["MAX_WAIT", "UNITS", "ImmCounters", "Ticket", "TicketState"]

UNITS: Final = math.lcm(*range(1, MAX_COUNTED + 1))
MAX_WAIT: Final = 1 << 40  # writes; times UNITS it is below 2**60, so that native units stay within 64 bits


class TicketState(enum.Enum):
    """The state of a wait: see the table above."""

    PENDING = enum.auto()
    SATISFIED = enum.auto()
    DELIVERED = enum.auto()
    CANCELLED = enum.auto()


class Ticket:
    """One wait for `n` writes of the immediate `imm`; only `ImmCounters` makes and changes it."""

    __slots__ = ("imm", "n", "state")

    def __init__(self, imm: int, n: int) -> None:
        self.imm = imm
        self.n = n
        self.state = TicketState.PENDING

    @property
    def satisfied(self) -> bool:
        """Whether its counts are consumed and its waiter was not told yet."""
        return self.state is TicketState.SATISFIED

    def __repr__(self) -> str:
        return f"<Ticket {self.n} of immediate {self.imm:#x}, {self.state.name.lower()}>"


class _Entry:
    """One immediate: units not consumed, holders, the queue, and the number of tickets satisfied but not delivered."""

    __slots__ = ("holders", "queue", "undelivered", "units")

    def __init__(self) -> None:
        self.units = 0
        self.holders = 0
        self.queue: deque[Ticket] = deque()
        self.undelivered = 0

    @property
    def open(self) -> bool:
        """Whether a ticket may still take counts from here or give some back."""
        return bool(self.queue) or self.undelivered > 0


class ImmCounters:
    """The counts of all immediates of one engine."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Return the number of immediates that have an entry."""
        return len(self._entries)

    def arrive(self, imm_data: int) -> list[Ticket]:
        """Count one stripe by the 32-bit immediate that it carried, and return the tickets that it satisfies."""
        imm, stripes = decode_immediate(imm_data)
        entry = self._entry(imm)
        entry.units += UNITS // stripes
        return self._commit(imm, entry)

    def value(self, imm: int) -> int:
        """Return the number of whole writes that were counted and not consumed."""
        entry = self._entries.get(check_immediate(imm))
        return entry.units // UNITS if entry else 0

    def wait(self, imm: int, n: int) -> Ticket:
        """Queue for `n` writes; the ticket may be satisfied at once (as n = 0 is, if no other waits before it).

        Raises UsageError for a negative n and for n over MAX_WAIT.
        """
        if not 0 <= n <= MAX_WAIT:
            raise UsageError(f"a wait for {n} counts, expected 0 to {MAX_WAIT}")
        ticket = Ticket(check_immediate(imm), n)
        entry = self._entry(ticket.imm)
        entry.queue.append(ticket)
        self._commit(ticket.imm, entry)
        return ticket

    def deliver(self, ticket: Ticket) -> None:
        """Record that the waiter of a satisfied ticket was told: its counts are consumed for good.

        Raises UsageError for a ticket that is not satisfied.
        """
        if not ticket.satisfied:
            raise UsageError(f"{ticket!r} cannot be delivered: only a satisfied ticket is, and once")
        ticket.state = TicketState.DELIVERED
        entry = self._entries[ticket.imm]
        entry.undelivered -= 1
        self._commit(ticket.imm, entry)

    def cancel(self, ticket: Ticket) -> list[Ticket]:
        """End a wait and return the tickets that this satisfies; a ticket that is over is left unchanged."""
        if ticket.state not in (TicketState.PENDING, TicketState.SATISFIED):
            return []
        entry = self._entries[ticket.imm]
        if ticket.state is TicketState.PENDING:
            entry.queue.remove(ticket)
        else:
            entry.undelivered -= 1
            entry.units += ticket.n * UNITS
        ticket.state = TicketState.CANCELLED
        return self._commit(ticket.imm, entry)

    def hold(self, imm: int) -> None:
        """Keep an immediate's entry until `free`, even at zero."""
        self._entry(check_immediate(imm)).holders += 1

    def free(self, imm: int) -> None:
        """Remove one holder of an immediate; with neither a holder nor an open ticket left, drop its remaining counts.

        Counts are kept for an open ticket: to free an immediate for good, cancel its waits first. Stripes of it that
        arrive later start a new count.
        """
        entry = self._entries.get(check_immediate(imm))
        if entry is None:
            return
        entry.holders = max(0, entry.holders - 1)
        if entry.holders == 0 and not entry.open:
            entry.units = 0
        self._commit(imm, entry)

    def _entry(self, imm: int) -> _Entry:
        return self._entries.setdefault(imm, _Entry())

    def _commit(self, imm: int, entry: _Entry) -> list[Ticket]:
        """Satisfy from the head of the queue for as long as there is enough; drop an entry that is no longer needed."""
        satisfied = []
        while entry.queue and entry.units >= entry.queue[0].n * UNITS:
            ticket = entry.queue.popleft()
            entry.units -= ticket.n * UNITS
            entry.undelivered += 1
            ticket.state = TicketState.SATISFIED
            satisfied.append(ticket)
        if not (entry.units or entry.holders or entry.open):
            del self._entries[imm]
        return satisfied
