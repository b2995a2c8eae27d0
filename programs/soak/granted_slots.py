"""What one life gets from another: slots of memory that are the other's to write to, each under a *grant*.

A grant says what is to be written (the receiver draws it, so it knows what to expect) and with which immediate, which
is used for this grant only. When its count is complete every byte of the slot is checked, the slot is cleaned and
granted anew. A writer whose transfer did not go well says so with `over`; then the count must be what it says, and the
slot holds bytes of this grant or none. When the connection is lost the slots are checked the same way, and again a
little later: no byte may move any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote
import registered_memory
from payload import CLEAN, GREY, SLOT_BYTES, first_difference, name_bytes
from tasks import Task, end

if TYPE_CHECKING:
    from life import Life

SLOTS = 4
PAGE_BYTES = (256, 4096, 8192)
MAX_PAGES = 64
MAX_PARTS = 6
KINDS = ("write", "write", "pages", "pages", "parts", "alone")
KEPT_S = 1.0
"""How long a count is still looked at after it was complete."""
REST_S = 0.2


@dataclass
class Slot:
    """One slot, and the grant that is open for it."""

    memory: Any
    number: int
    grant: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    counter: aiote.Counter | None = None
    over: tuple[int, int] | None = None
    stirred: anyio.Event | None = None


class GrantedSlots:
    """The slots of one connection. `run` ends when the connection has ended."""

    def __init__(self, life: Life, peer: aiote.Peer, writer: int) -> None:
        self.life = life
        self.peer = peer
        self.writer = writer
        self.memory = registered_memory.zeros(SLOTS * SLOT_BYTES)
        self.region = life.engine.register(self.memory)
        self.slots = [Slot(self.memory[i * SLOT_BYTES : (i + 1) * SLOT_BYTES], i) for i in range(SLOTS)]
        self._ticket = 0
        self._kept: deque[tuple[float, int, int, aiote.Counter]] = deque()
        self._counted: dict[int, int] = {}
        self._notes: set[int] = set()
        self._stirred = anyio.Event()

    def violation(self, text: str) -> None:
        self.life.violation(f"what life {self.writer} wrote here: {text}")

    async def run(self) -> None:
        tasks: list[Task] = []
        try:
            library = self.life.library_region.descriptor.hex()
            await self.life.tell(self.peer, "granted", descriptor=self.region.descriptor.hex(), library=library)
            tasks += [self.life.spawn(self._serve, slot) for slot in self.slots]
            await self.peer.wait_closed()
        finally:
            if tasks:
                await self.life.dog.over("the slots' tasks end", end(self.life.tasks, tasks))
            await self._rest()

    # Grants.

    def _draw(self, slot: Slot) -> dict[str, Any]:
        rng = self.life.rng
        self._ticket += 1
        kind = rng.choice(KINDS)
        grant: dict[str, Any] = {"ticket": self._ticket, "slot": slot.number, "what": kind, "n": 1}
        if kind == "pages":
            grant["page"] = rng.choice(PAGE_BYTES)
            grant["n"] = rng.randint(1, MAX_PAGES)
            grant["indices"] = rng.sample(range(SLOT_BYTES // grant["page"]), grant["n"])
            grant["length"] = grant["n"] * grant["page"]
        else:
            grant["length"] = min(SLOT_BYTES, max(MAX_PARTS, int(2 ** rng.uniform(0, 20))))
            if kind == "parts":
                grant["n"] = rng.randint(2, MAX_PARTS)
        return grant

    def _expect(self, grant: dict[str, Any]) -> Any:
        """Return what the slot will hold."""
        data = self.life.payload.of(grant["length"], "write", self.writer, self.life.number, grant["ticket"])
        expected = np.zeros(SLOT_BYTES, np.uint8)
        if grant["what"] == "pages":
            whole = len(expected) // grant["page"] * grant["page"]
            expected[:whole].reshape(-1, grant["page"])[grant["indices"]] = data.reshape(-1, grant["page"])
        else:
            expected[: len(data)] = data
        return expected

    async def _serve(self, slot: Slot) -> None:
        after = 0
        while True:
            grant = self._draw(slot)
            slot.expected = self._expect(grant)
            slot.over, slot.stirred = None, anyio.Event()
            slot.counter = self.life.engine.counter()
            slot.grant = grant
            await self.life.tell(self.peer, "grant", after=after, imm=slot.counter.imm, **grant)
            await self._arrival(slot)
            after = grant["ticket"]
            slot.memory[:] = CLEAN
            self._look_at_kept()

    async def _arrival(self, slot: Slot) -> None:
        """Wait for the count of a grant, or for the word that it will not be complete, and check what is there."""
        counter, stirred, n, ticket = slot.counter, slot.stirred, slot.grant["n"], slot.grant["ticket"]
        assert counter is not None
        assert stirred is not None
        waiting = self.life.tasks.start(counter.wait(n))
        waiting.add_done_callback(lambda _task: stirred.set())
        try:
            await stirred.wait()
        finally:
            await end(self.life.tasks, [waiting])
        if not waiting.cancelled():
            if error := waiting.exception():
                raise error
            self._whole(slot)
            self._keep(ticket, n, 0, counter)
            if slot.over is not None:
                self._compare(ticket, *slot.over)
            return
        assert slot.over is not None
        least, most = slot.over
        with self.life.dog.expecting(f"{least} counts of ticket {ticket} that life {self.writer} has confirmed"):
            while counter.value < least:
                await anyio.sleep(0.002)
        if counter.value >= n:
            self._whole(slot)
        else:
            self._partial(slot, unsure=False)
        self._keep(ticket, counter.value, counter.value, counter)
        self._compare(ticket, least, most)

    def _keep(self, ticket: int, counted: int, value: int, counter: aiote.Counter) -> None:
        self._counted[ticket] = counted
        if len(self._counted) > 256:
            del self._counted[next(iter(self._counted))]
        self._kept.append((self.life.dog.lived, ticket, value, counter))

    def _compare(self, ticket: int, least: int, most: int) -> None:
        counted = self._counted.get(ticket)
        if counted is not None and not least <= counted <= most:
            self.violation(f"ticket {ticket} has counted {counted}, its writer says from {least} to {most}")

    def _look_at_kept(self, *, all_of_them: bool = False) -> None:
        """Close the counts that were complete a while ago; nothing may have been added."""
        now = self.life.dog.lived
        while self._kept and (all_of_them or now - self._kept[0][0] > KEPT_S):
            _since, ticket, value, counter = self._kept.popleft()
            if counter.value != value:
                self.violation(f"ticket {ticket} counted on: {counter.value} instead of {value}")
            counter.close()

    # Checks.

    def _whole(self, slot: Slot) -> None:
        self.life.tally["verified grants"] += 1
        self.life.tally["verified bytes"] += slot.grant["length"]
        if not np.array_equal(slot.memory, slot.expected):
            told = {name: value for name, value in slot.grant.items() if name != "indices"}
            self.violation(f"{told}: {first_difference(slot.memory, slot.expected)}")

    def _partial(self, slot: Slot, *, unsure: bool) -> None:
        """Check that there are bytes of this grant or none; `unsure`: grey ones may be there as well."""
        wrong = (slot.memory != slot.expected) & (slot.memory != CLEAN)
        grey = int(np.count_nonzero(slot.memory[wrong] == GREY))
        if unsure and grey:
            self.life.tally["slots with bytes of an unconfirmed transfer"] += 1
        if np.count_nonzero(wrong) > (grey if unsure else 0):
            told = {name: value for name, value in slot.grant.items() if name != "indices"}
            at = np.flatnonzero(wrong)
            self.violation(f"{told}, not complete: {name_bytes(slot.memory[at])}, first at {at[0]}")

    async def _rest(self) -> None:
        """Look at what a lost connection left behind: it may have ended anywhere, but it has ended."""
        then = self.memory.copy()
        for slot in self.slots:
            if slot.expected is not None:
                self._partial(slot, unsure=True)
        await anyio.sleep(REST_S)
        if not np.array_equal(self.memory, then):
            changed = first_difference(self.memory, then)
            self.violation(f"bytes arrived after the connection was lost ({self.peer.reason}): {changed}")
        for slot in self.slots:
            if slot.counter is not None:
                if not self.life.engine.closed and slot.counter.value > slot.grant["n"]:
                    self.violation(f"{slot.counter.value} counts of a grant of {slot.grant['n']}")
                slot.counter.close()
        if not self.life.engine.closed:
            self._look_at_kept(all_of_them=True)
        await self.life.dog.over("close the region of a lost connection", self.region.aclose())

    # Messages.

    def on_over(self, ticket: int, least: int, most: int, payload: bytes) -> None:
        """Take the writer's word that it is done with a grant, though not as it should be."""
        for slot in self.slots:
            if slot.grant.get("ticket") == ticket and slot.stirred is not None and slot.over is None:
                slot.over = least, most
                slot.stirred.set()
                return
        self._compare(ticket, least, most)

    def on_note(self, number: int, payload: bytes) -> None:
        """Check a message that carries data."""
        expected = self.life.payload.of(len(payload), "note", self.writer, self.life.number, number).tobytes()
        if payload != expected:
            self.violation(f"note {number} of {len(payload)} bytes is not what was sent")
        if number in self._notes:
            self.violation(f"note {number} came twice")
        self._notes.add(number)
        self._stir()
        self.life.tally["notes received"] += 1

    def _stir(self, _task: object = None) -> None:
        """Have those look again who wait for notes."""
        self._stirred.set()
        self._stirred = anyio.Event()

    def on_finish(self, notes: list[int], payload: bytes) -> None:
        self.life.spawn(self._finish, set(notes))

    async def _finish(self, notes: set[int]) -> None:
        """Wait until every note of a list is there, and say so."""
        closed = self.life.tasks.start(self.peer.wait_closed())
        closed.add_done_callback(self._stir)
        with self.life.dog.expecting(f"{len(notes)} notes that life {self.writer} has sent"):
            while not notes <= self._notes and not closed.done():
                await self._stirred.wait()
        closed.cancel()
        await self.life.tell(self.peer, "finished")
