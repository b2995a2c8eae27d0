"""One engine of a worker, with everything that it does until it is closed: it takes what others write to it
(`granted_slots`), and it writes to the others (`writer`). The two are joined here by the messages that go between them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import numpy as np

import aiote
import registered_memory
from findings import Findings
from granted_slots import GrantedSlots
from messages import decode, encode
from payload import BLACK, SLOT_BYTES, Payload, first_difference
from tasks import Task
from watchdog import Watchdog
from writer import Writer

LIBRARY_BYTES = SLOT_BYTES
RETRY_S = (0.02, 0.2)
RECV_DEADLINE_S = 0.02


def kind_of(error: BaseException) -> str:
    """Name an error so that its like are counted together."""
    cause = getattr(error, "cause", None)
    text = re.sub(r"peer aiote://\S+ ", "", str(cause or error))
    if isinstance(error, aiote.TransferError) and cause is None:
        text = "cancelled"
    text = re.sub(r"aiote://\S+|\b[0-9a-f]{8,}\b", "...", re.sub(r"[\w ]* of \d+ bytes[^:]*: ", "", text))
    unsure = "" if getattr(error, "confirmed", True) else " (unconfirmed)"
    return f"{type(error).__name__}{unsure}: {re.sub(r'[0-9.]+', '#', text)[:70]}"


class Source:
    """Registered local memory of a life, used by one transfer at a time."""

    def __init__(self, engine: aiote.Engine) -> None:
        self.memory = registered_memory.full(SLOT_BYTES, BLACK)
        self.region = engine.register(self.memory)


class Life:
    """An engine and its work. `number` is its own among all lives of the soak."""

    def __init__(
        self, number: int, engine: aiote.Engine, seed: int, dog: Watchdog, tally: Counter[str], findings: Findings
    ) -> None:
        self.number = number
        self.engine = engine
        self.rng = random.Random(f"{seed}/{number}")
        self.payload = Payload(seed)
        self.dog, self.tasks = dog, dog.tasks
        self.tally = tally
        self.finishing = False
        self.inner: set[Task] = set()
        self._findings = findings
        self._granted: dict[aiote.Peer, GrantedSlots] = {}
        self._writers: dict[aiote.Peer, Writer] = {}
        self._outbound: dict[int, Task] = {}
        self._tasks: set[Task] = set()
        self._free: list[Source] = []
        self._buried: list[Source] = []
        self.library = registered_memory.zeros(LIBRARY_BYTES)
        self.library[:] = self.payload.of(LIBRARY_BYTES, "library", number)
        self.library_region = engine.register(self.library)
        self.spawn(self._receive)

    def violation(self, text: str) -> None:
        self._findings.violation(f"life {self.number}: {text}")

    def failed(self, error: BaseException) -> None:
        """Count an error that may happen."""
        self.tally[f"error {kind_of(error)}"] += 1

    def spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Task:
        """Run something that may end with an error of aiote's, and with no other."""
        task = self.tasks.start(self._guarded(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        try:
            await work(*args)
        except aiote.UsageError as error:
            self.violation(f"a usage error: {error!r}")
        except aiote.AioteError as error:
            self.failed(error)
        except Exception as error:
            self._findings.unexpected(error, f"life {self.number}, in {work!r}")

    # Memory to write from and to read into.

    def take(self) -> Source:
        return self._free.pop() if self._free else Source(self.engine)

    async def give_back(self, source: Source) -> None:
        """Use it again, or close it: the memory is out of use, so nothing is waited for."""
        if self.rng.random() < 0.9 and not self.engine.closed:
            self._free.append(source)
        else:
            await self.dog.over("close a region that is out of use", source.region.aclose())

    def bury(self, source: Source) -> None:
        """Keep what an unconfirmed transfer may still be read from, so that it stays grey."""
        self._buried.append(source)

    # Messages.

    async def tell(self, peer: aiote.Peer, kind: str, payload: Any = b"", **fields: Any) -> None:
        """Send a message; who does not take it loses the connection, so this ends."""
        await self.dog.over(f"send {kind} to {peer}", self.engine.send(peer, encode(kind, payload, **fields)))

    async def _receive(self) -> None:
        while True:
            message = await self._one_message()
            if message is not None:
                self._take(message.source, *self._decoded(message))

    def _decoded(self, message: aiote.Message) -> tuple[str, dict[str, Any], bytes]:
        try:
            return decode(message.data)
        except Exception:  # whatever it is, the message is not as it was sent
            self.violation(f"a message of {message.source} that nobody sends: {bytes(message.data)[:200]!r}")
            raise

    async def _one_message(self) -> aiote.Message | None:
        """Wait for a message, now and then with a deadline: a cancelled recv loses nothing."""
        if self.rng.random() < 0.7:
            return await self.engine.recv()
        message: list[aiote.Message] = []
        try:
            async with self.tasks.timeout(self.rng.uniform(0, RECV_DEADLINE_S)):
                message.append(await self.engine.recv())
        except TimeoutError:
            self.tally["cancelled receives"] += 1
        return message[0] if message else None

    def _take(self, peer: aiote.Peer, kind: str, fields: dict[str, Any], payload: bytes) -> None:
        if kind == "hello":
            if peer in self._granted:
                self.violation(f"a second hello of {peer}: a message came twice")
            elif not peer.lost:
                granted = self._granted[peer] = GrantedSlots(self, peer, fields["life"])
                self.spawn(self._hold, granted)
            return
        table: Any = self._writers if kind in ("granted", "grant", "finished") else self._granted
        owner = table.get(peer)
        if owner is not None:
            getattr(owner, f"on_{kind}")(payload=payload, **fields)

    async def _hold(self, granted: GrantedSlots) -> None:
        try:
            await granted.run()
        finally:
            del self._granted[granted.peer]

    # The others.

    def meet(self, others: dict[int, str]) -> None:
        """Write to these lives from now on, and to no others any more."""
        for number in set(self._outbound) - set(others):
            self._outbound.pop(number).cancel()
        for number, address in others.items():
            if number != self.number and number not in self._outbound:
                self._outbound[number] = self.spawn(self._visit, number, aiote.Address.parse(address))

    async def _visit(self, number: int, address: aiote.Address) -> None:
        """Connect to another life again and again, and write to it while the connection holds."""
        while not self.finishing and not self.engine.closed:
            try:
                peer = await self.dog.over(f"connect to life {number}", self.engine.connect(address))
            except aiote.ClosedError:
                return
            except aiote.AioteError as error:
                self.failed(error)
            else:
                if peer in self._writers:
                    self.violation(f"connecting to life {number} gave {peer}, which is written to already")
                    return
                self.tally["connections"] += 1
                writer = self._writers[peer] = Writer(self, peer, number)
                # A life that is no longer to be visited still has transfers to see through.
                await self.tasks.wait({self.spawn(self._follow, writer)})
            await anyio.sleep(self.rng.uniform(*RETRY_S))

    async def _follow(self, writer: Writer) -> None:
        try:
            await writer.run()
        finally:
            del self._writers[writer.peer]

    def cancel_some(self) -> int:
        """Cancel about half of the awaits on transfers."""
        chosen = [task for task in self.inner if self.rng.random() < 0.5]
        for task in chosen:
            task.cancel()
        return len(chosen)

    # The end.

    async def finish(self) -> None:
        """Start nothing new, and agree with each other life that is connected on what was sent and what arrived."""
        self.finishing = True
        for writer in tuple(self._writers.values()):
            await self.dog.over(f"agree with life {writer.other}", writer.finish())

    async def close(self, how: str) -> None:
        """Close the engine under all that is going on; every await ends with that."""
        self.finishing = True
        if how == "aclose":
            await self.dog.over("close the engine", self.engine.aclose())
        else:
            self.engine.abort()
        for task in self._outbound.values():
            task.cancel()
        while self._tasks:
            await self.dog.over(f"end of {len(self._tasks)} tasks after the close", self.tasks.wait(self._tasks))
        if not np.array_equal(self.library, self.payload.of(LIBRARY_BYTES, "library", self.number)):
            expected = self.payload.of(LIBRARY_BYTES, "library", self.number)
            self.violation(f"memory that is only read was written: {first_difference(self.library, expected)}")
        self._free.clear()
        self._buried.clear()
