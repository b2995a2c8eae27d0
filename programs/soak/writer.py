"""What one life does to another over one connection: it fills the slots that it is granted, reads, and sends notes, and
cancels some of all that in every way there is.

As soon as a transfer is over its memory is filled with poison, for then no NIC may touch it any more: black, or grey
where the error said that this is not confirmed. No receiver may ever see black. What was read into is filled as well,
and nothing may change it.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote
from granted_slots import MAX_PARTS
from messages import encode
from payload import BLACK, GREY, SLOT_BYTES, first_difference
from tasks import Task

if TYPE_CHECKING:
    from life import Life, Source

CANCELLED_SHARE = 0.3
CANCEL_AFTER_S = 0.004
PAUSE_S = 0.03
READ_EVERY_S = 0.05
NOTE_EVERY_S = 0.02
NOTE_BYTES = 8000
NOTES_AT_ONCE = 1000
UNCHANGED_S = 0.05


class Writer:
    """One connection, from the writer's side. `run` ends when the connection has ended and all transfers with it."""

    def __init__(self, life: Life, peer: aiote.Peer, other: int) -> None:
        self.life = life
        self.peer = peer
        self.other = other
        self.remote: aiote.RemoteRegion | None = None
        self.library: aiote.RemoteRegion | None = None
        self._early: list[dict[str, Any]] = []
        self._ops: set[Task] = set()
        self._returning: dict[int, object] = {}
        self._returned: set[int] = set()
        self._notes: list[int] = []
        self._next_note = 0
        self._unanswered = 0
        self._finished = anyio.Event()

    def violation(self, text: str) -> None:
        self.life.violation(f"writing to life {self.other}: {text}")

    async def run(self) -> None:
        try:
            try:
                await self.life.tell(self.peer, "hello", life=self.life.number)
            except aiote.AioteError as error:
                # Nobody cancelled it, so what failed is the connection.
                self.life.failed(error)
                await self.life.dog.over(f"the loss of {self.peer} after {error}", self.peer.wait_closed())
            await self.peer.wait_closed()
        finally:
            self._finished.set()
            for token in self._returning.values():
                self.life.dog.end(token)
            if self._ops:
                await self.life.dog.over(
                    f"{len(self._ops)} transfers with a lost peer", self.life.tasks.wait(self._ops)
                )

    def _start(self, work: Any, *args: Any) -> None:
        task = self.life.spawn(work, *args)
        self._ops.add(task)
        task.add_done_callback(self._ops.discard)

    # Messages.

    def on_granted(self, descriptor: str, library: str, payload: bytes) -> None:
        """Begin, now that it is known where to write to."""
        self.remote = self.life.engine.attach(bytes.fromhex(descriptor))
        self.library = self.life.engine.attach(bytes.fromhex(library))
        while self._early:
            self.on_grant(payload=b"", **self._early.pop())
        self._start(self._read_on)
        self._start(self._note_on)

    def on_grant(self, payload: bytes, **grant: Any) -> None:
        """Fill a slot; the grant says which one of ours came to its end."""
        if self.remote is None:
            self._early.append(grant)
            return
        after = grant.pop("after")
        if after in self._returning:
            self.life.dog.end(self._returning.pop(after))
        else:
            self._returned.add(after)  # it was counted before we knew that it is over
        if not self.life.finishing and not self.peer.lost:
            self._start(self._fill, grant)

    def on_finished(self, payload: bytes) -> None:
        self._unanswered -= 1
        if not self._unanswered:
            self._finished.set()

    # Writing.

    async def _fill(self, grant: dict[str, Any]) -> None:
        await anyio.sleep(self.life.rng.uniform(0, PAUSE_S))
        if self.peer.lost or self.life.finishing:
            return
        source = self.life.take()
        length, ticket = grant["length"], grant["ticket"]
        source.memory[:length] = self.life.payload.of(length, "write", self.life.number, self.other, ticket)
        transfers: list[tuple[aiote.Transfer, int, int]] = []
        try:
            await self._carry_out(grant, source, transfers)
        finally:
            sure = all(self._over(transfer) for transfer, _n, _unit in transfers)
            source.memory[:length] = BLACK if sure else GREY
        if sure:
            await self.life.give_back(source)
        else:
            self.life.bury(source)
        await self._account(grant, transfers)

    async def _carry_out(
        self, grant: dict[str, Any], source: Source, transfers: list[tuple[aiote.Transfer, int, int]]
    ) -> None:
        """Start the transfers of a grant, and see them through; each goes into the list with its counts."""
        engine, imm, length = self.life.engine, grant["imm"], grant["length"]
        assert self.remote is not None
        base = grant["slot"] * SLOT_BYTES
        local, remote = source.region[:length], self.remote[base : base + length]
        slot = self.remote[base : base + SLOT_BYTES]
        match grant["what"]:
            case "write":
                transfers.append((engine.submit_write_imm(local, remote, imm), 1, length))
            case "pages":
                pages, n = grant["page"], grant["n"]
                here, there = aiote.Pages(local, range(n), pages), aiote.Pages(slot, grant["indices"], pages)
                transfers.append((engine.submit_write_pages(here, there, imm), n, pages))
            case "parts":
                assert length >= MAX_PARTS
                cuts = [length * i // grant["n"] for i in range(grant["n"] + 1)]
                for low, high in itertools.pairwise(cuts):
                    if self.peer.lost:
                        break  # one before has found that out; the next would go over another connection
                    part = engine.submit_write_imm(local[low:high], remote[low:high], imm)
                    transfers.append((part, 1, high - low))
            case "alone":
                first = engine.submit_write(local, remote)
                transfers.append((first, 0, length))
                await self._see_through(first)
                if first.exception() is None:
                    transfers.append((engine.submit_write_imm(None, self.peer, imm), 1, 0))
        for transfer, _n, _unit in transfers:
            await self._see_through(transfer)

    def _over(self, transfer: aiote.Transfer) -> bool:
        """Count what became of a transfer, and tell whether no more of it can reach the other side."""
        if not transfer.done():
            return False
        error = transfer.exception()
        if error is None:
            self.life.tally["transfers"] += 1
            self.life.tally["bytes"] += transfer.confirmed_bytes
            return True
        cancelled = isinstance(error, aiote.TransferError) and error.cause is None
        self.life.tally["cancelled transfers" if cancelled else "failed transfers"] += 1
        self.life.failed(error)
        return getattr(error, "confirmed", True)

    async def _account(self, grant: dict[str, Any], transfers: list[tuple[aiote.Transfer, int, int]]) -> None:
        """Say what the receiver cannot know: how much of a grant was not counted, and why it waits in vain."""
        least = most = 0
        for transfer, n, unit in transfers:
            if transfer.exception() is None:
                counted = n
            elif unit == 0:  # an immediate alone confirms no bytes
                most, counted = most + n, 0
            else:
                counted = min(n, transfer.confirmed_bytes // unit)
            least, most = least + counted, most + counted
        if self.peer.lost or self._finished.is_set():
            return
        ticket = grant["ticket"]
        if ticket in self._returned:
            self._returned.discard(ticket)
        else:
            what = f"the slot of ticket {ticket} of life {self.other} to be granted again"
            self._returning[ticket] = self.life.dog.begin(what)
        if least < grant["n"]:
            await self.life.tell(self.peer, "over", ticket=ticket, least=least, most=most)

    # Cancelling.

    async def _see_through(self, transfer: aiote.Transfer) -> None:
        """Await a transfer, perhaps cancelling it; what it raises is looked at later.

        `wait_for` gets a little time in any case: with none it cancels what it has not begun to await.
        """
        rng, tasks = self.life.rng, self.life.tasks
        way = rng.choice(tasks.ways) if rng.random() < CANCELLED_SHARE else ""
        delay = rng.uniform(0, CANCEL_AFTER_S) if rng.random() < 0.8 or way == "wait_for" else 0
        task = tasks.start(tasks.await_by(way, transfer, delay))
        await tasks.begun(task)  # one that is cancelled before it began has not awaited anything
        if way != "wait_for":  # a second cancellation makes wait_for of Python 3.11 leave what it has cancelled
            self.life.inner.add(task)
            task.add_done_callback(self.life.inner.discard)
        if way in ("transfer.cancel", tasks.from_outside):
            with anyio.move_on_after(delay):
                await tasks.wait({task})
            if not task.done():
                (transfer if way == "transfer.cancel" else task).cancel()
        with self.life.dog.expecting(f"{transfer} with {self.peer}, {way or 'not cancelled'}"):
            await tasks.wait({task})
        if not transfer.done():
            how = "cancelled" if task.cancelled() else repr(task.exception())
            self.violation(f"{transfer} ({way or 'no cancellation'}) is under way, its await ended: {how}; {self.peer}")
        if way and transfer.was_cancelled:
            self.life.tally[f"cancelled by {way}"] += 1
        if task.cancelled():
            self.life.tally["cancelled awaits"] += 1
        elif not isinstance(task.exception(), aiote.AioteError | TimeoutError | None):
            self.violation(f"{transfer} raised {task.exception()!r}")

    # Reading and notes.

    async def _on(self, every: float, step: Callable[[], Awaitable[None]]) -> None:
        while not (self.peer.lost or self.life.finishing):
            await step()
            await anyio.sleep(self.life.rng.uniform(0, every))

    async def _read_on(self) -> None:
        await self._on(READ_EVERY_S, self._read)

    async def _note_on(self) -> None:
        await self._on(NOTE_EVERY_S, self._note)

    async def _read(self) -> None:
        assert self.library is not None
        source, rng = self.life.take(), self.life.rng
        length = int(2 ** rng.uniform(0, 19.5))
        start = rng.randint(0, self.library.nbytes - length)
        transfer = self.life.engine.submit_read(self.library[start : start + length], source.region[:length])
        await self._see_through(transfer)
        self._over(transfer)
        if transfer.exception() is None:
            expected = self.life.payload.of(self.library.nbytes, "library", self.other)[start : start + length]
            if not np.array_equal(source.memory[:length], expected):
                self.violation(f"read of {length}: {first_difference(source.memory[:length], expected)}")
        source.memory[:] = BLACK
        await anyio.sleep(UNCHANGED_S)
        if not (source.memory == BLACK).all():
            changed = first_difference(source.memory, np.full(SLOT_BYTES, BLACK, np.uint8))
            self.violation(f"{transfer} ({transfer.exception()}) wrote to its memory after it was over: {changed}")
        await self.life.give_back(source)

    async def _note(self) -> None:
        self._next_note += 1
        number = self._next_note
        data = self.life.payload.of(
            self.life.rng.randint(0, NOTE_BYTES), "note", self.life.number, self.other, number
        ).tobytes()
        transfer = self.life.engine.submit_send(self.peer, encode("note", data, number=number))
        await self._see_through(transfer)
        if self._over(transfer) and transfer.exception() is None:
            self._notes.append(number)
            self.life.tally["notes sent"] += 1

    async def finish(self) -> None:
        """See through what is under way; then the other side has to have got all that was confirmed."""
        while self._ops and not self.peer.lost:
            with anyio.move_on_after(0.05):
                await self.life.tasks.wait(self._ops)
        while self._returning and not self.peer.lost:
            await anyio.sleep(0.01)
        if self.peer.lost or self.remote is None:
            return
        lists = [self._notes[start : start + NOTES_AT_ONCE] for start in range(0, len(self._notes), NOTES_AT_ONCE)]
        self._unanswered = len(lists)
        try:
            for notes in lists:
                await self.life.tell(self.peer, "finish", notes=notes)
        except aiote.AioteError as error:
            self.life.failed(error)
            return
        if lists:
            await self._finished.wait()
            self.life.tally["agreements at the end"] += 1
