"""Rail sets of one process, joined and driven by hand: what the contract suite and the tests of progress run on.

`Rails` owns the rail sets of one test and does what an event loop would: it calls a core while that asks for it, and
sleeps on the descriptors of all as soon as none does. Sleeping for good is a failure, so whatever runs here also tests
that every wake-up comes. With `threaded` the native threads make the progress, and only reaping is left.

A kind of rail joins the suite by one line in `KINDS`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aiote.core.pairing import pair_rails
from aiote.rails import (
    Core,
    CounterHandle,
    CounterWait,
    LocalMemory,
    Operation,
    PageIndex,
    PeerLink,
    RailSet,
    RemoteMemory,
    acquire,
)
from aiote.rails.sim import current_network
from aiote.testing import UNRULY, Fabric, NicModel
from aiote_native.sim.world import World
from support.gpu.standin_cuda import gpu_copy, lender_of, standin_path
from support.rails.standin_efa import still_open

TAKING = replace(UNRULY, refusals=0)
"""Some expectations are of senders that do nothing more, which a refused post needs them to."""
LIMIT_S = 60.0
"""ThreadSanitizer alone takes 4 s for a MiB of which it has to be told, cell by cell, that it is no race."""
SLICE_S = 0.001  # how often conditions are looked at that a native thread announces to nobody


@dataclass(frozen=True)
class Kind:
    """A kind of rail. `nic`: one that a rail set can open twice; `guards`: it refuses access that was not granted;
    `memory`: "host", or "cuda" on the stand-in for the driver.
    """

    provider: str
    nic: str = ""
    guards: bool = False
    memory: str = "host"


EFA = Kind("efa", nic="standin{}-rdm", guards=True)
"""On the stand-in for its provider; a process that is started to find it has no other (`standin_efa.environment`)."""
ON_STANDIN = "EFA_STANDIN_WIRE" in os.environ
KINDS = (
    Kind("tcp", nic="lo", guards=True),
    Kind("shm"),
    Kind("local", nic="local", guards=True),
    Kind("socket", nic="lo", guards=True),
    Kind("sim", nic="sim0", guards=True),
    Kind("verbs", nic="rxe0", guards=True),
)
if ON_STANDIN:
    KINDS = (EFA,)
elif os.environ.get("PROVE_OVER") == "efa":
    KINDS = (*KINDS, replace(EFA, nic=""))  # the names of this machine's NICs are unknown
STAGED = (Kind("local", nic="local", guards=True, memory="cuda"), Kind("socket", nic="lo", guards=True, memory="cuda"))
"""Rails that reach GPU memory through the host's."""


@dataclass(eq=False)
class Memory:
    """An array that is registered with a side's rails, and what its peers need to know of it."""

    array: Any
    local: LocalMemory

    @property
    def remote(self) -> RemoteMemory:
        return RemoteMemory(self.local.length, self.local.writable, self.local.keys)


@dataclass(eq=False)
class Side:
    """One rail set, the operations that ended on it, and the peers that failed it."""

    rail_set: RailSet
    awake: bool = True
    ended: list[Operation] = field(default_factory=list)
    failed: list[PeerLink] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    counters: list[CounterHandle] = field(default_factory=list)
    memory: str = "host"

    @property
    def core(self) -> Core:
        assert self.rail_set.core is not None
        return self.rail_set.core

    def turn(self, readable: bool) -> bool:
        """Do what an event loop does on one iteration; tell whether it would not sleep before the next one."""
        if not self.core.threaded and (self.awake or readable):
            self.awake = self.core.progress()
        self.failed += self.core.reap()
        return self.awake and not self.core.threaded

    def own(self, array: Any) -> Any:
        """Return an array in the kind of memory that the side registers: this one, or a GPU's with the same bytes.

        A bytearray stays the host's: it is for what its own lender says.
        """
        stays = self.memory == "host" or isinstance(array, bytearray) or lender_of(array) is not array
        return array if stays else gpu_copy(array).seen

    def register(self, array: Any) -> Memory:
        """Register an array, or so many zero bytes."""
        array = np.zeros(array, np.uint8) if isinstance(array, int) else array
        array = self.own(array)
        memory = Memory(array, self.rail_set.register(acquire(lender_of(array))))
        self.memories.append(memory)
        return memory

    def operation(self) -> Operation:
        operation = Operation()
        operation.on_over = self.ended.append
        return operation

    def write(
        self,
        link: PeerLink,
        src: Memory | None = None,
        dst: RemoteMemory | None = None,
        length: int | None = None,
        *,
        at: tuple[int, int] = (0, 0),
        imm: int = -1,
        reads: bool = False,
    ) -> Operation:
        """Submit one write (or read); `at` are the local and the remote offset. Without memory: an immediate alone."""
        operation, local = self.operation(), src.local if src else None
        if length is None:
            length = local.length if local else 0
        self.core.submit_single(link, operation, reads, local, at[0], dst, at[1], length, imm)
        self.awake = True
        return operation

    def write_pages(
        self,
        link: PeerLink,
        src: Memory,
        source: Iterable[int],
        dst: RemoteMemory,
        target: Iterable[int],
        page: int,
        *,
        strides: tuple[int, int] | None = None,
        at: tuple[int, int] = (0, 0),
        imm: int = -1,
    ) -> Operation:
        """Submit paged writes; `strides` and `at` are the local and the remote ones."""
        operation, (near, far) = self.operation(), strides or (page, page)
        here, there = PageIndex(source), PageIndex(target)
        self.core.submit_pages(link, operation, src.local, at[0], here, near, dst, at[1], there, far, page, imm)
        self.awake = True
        return operation

    def send(self, link: PeerLink, payload: bytes) -> Operation:
        operation = self.operation()
        self.core.submit_send(link, operation, payload)
        self.awake = True
        return operation

    def take(self, link: PeerLink) -> bytes | None:
        self.awake = True
        return link.take_message()

    def cancel(self, operation: Operation) -> None:
        self.core.cancel(operation)
        self.awake = True

    def count(self, imm: int) -> CounterHandle:
        """Return a handle of an immediate, closed with the side."""
        self.counters.append(self.core.counter(imm))
        return self.counters[-1]

    def wait(self, handle: CounterHandle, n: int, on_over: Callable[[Any], object] | None = None) -> CounterWait:
        waiting = CounterWait()
        waiting.on_over = on_over
        handle.wait(waiting, n)
        self.awake = True
        return waiting

    def close_link(self, link: PeerLink) -> None:
        link.close()
        self.awake = True

    def close(self) -> None:
        for link in tuple(self.core.peers):
            link.close()
        self.core.reap()
        for handle in self.counters:
            handle.close(discard=True)
        for memory in self.memories:
            memory.local.close()
        self.rail_set.close()


class Rails:
    """The rail sets of one test. `core` are arguments of every core, `model` is what simulated NICs are like."""

    def __init__(self, kind: Kind, threaded: bool = False, model: NicModel = TAKING, **core: Any) -> None:
        self.kind = kind
        self.threaded = threaded
        self.sides: list[Side] = []
        self._core = {"spin_us": 0, **core}
        self._poll = select.poll()
        self._sim = Fabric(seed=1, model=model) if kind.provider == "sim" else None

    def side(self, rails: int = 1, **more: Any) -> Side:
        """Open a rail set; more than one rail are all of the kind's one NIC, or of the first ones where its name takes
        a number. `more` are of it and its core.
        """
        names = tuple(self.kind.nic.format(i) for i in range(rails)) if rails > 1 else None
        library = os.environ.get("AIOTE_LIBFABRIC", "")
        core = {"threaded": self.threaded, **self._core, **more}
        token = current_network.set(self._sim.network if self._sim else None)
        try:
            cuda = standin_path() if self.kind.memory == "cuda" else ""
            rail_set = RailSet(self.kind.provider, names, host="127.0.0.1", library=library, cuda=cuda, **core)
            side = Side(rail_set, memory=self.kind.memory)
        finally:
            current_network.reset(token)
        self.sides.append(side)
        self._poll.register(side.core.fd, select.POLLIN)
        return side

    def join(
        self,
        a: Side,
        b: Side,
        *,
        pairs: list[tuple[int, int]] | None = None,
        pools: tuple[tuple[int, int], tuple[int, int]] = ((16, 4096), (16, 4096)),
        greeted: bool = True,
        probe: bool = True,
    ) -> tuple[PeerLink, PeerLink]:
        """Connect two sides as two sessions do: all channels, then the pools, then progress on both, then a probe.

        `pairs` are (rail of a, rail of b), `pools` (slots, bytes) of a and of b; not `greeted`: as if neither knew
        that the other has made progress.
        """
        chosen = pairs or pair_rails([r.wire for r in a.rail_set.rails], [r.wire for r in b.rail_set.rails])
        ends = [(a.rail_set.open_channel(i, j), b.rail_set.open_channel(j, i)) for i, j in chosen]
        links = a.core.add_peer(b), b.core.add_peer(a)
        for other, turned in ((b, 1), (a, -1)):
            for mine, theirs in (end[::turned] for end in ends):
                if wakeup := other.core.wakeup_event:
                    mine.map_memory([os.dup(fd) for fd in theirs.shared(wakeup)], wakeup.address)
                    assert not mine.refused
        # Both ways at every step: neither side makes progress on a channel before the other has joined its end.
        for this, other, link, turned in ((a, b, links[0], 1), (b, a, links[1], -1)):
            for mine, theirs in (end[::turned] for end in ends):
                keys = other.rail_set.scratch.keys[theirs.rail.index]
                this.rail_set.join(link, mine, theirs.address, *keys, peer_slot=(theirs.slot, theirs.generation))
        a.rail_set.open_mailbox(links[0], *pools[0], *pools[1])
        b.rail_set.open_mailbox(links[1], *pools[1], *pools[0])
        for side in (a, b) * 2:
            side.core.progress()
        for link in links if greeted else ():
            link.record_greeting()
        a.awake = b.awake = True
        if probe:
            first = a.write(links[0])
            first.on_over = None
            self.finish(first)
        return links

    def drive(self, until: Callable[[], bool], *only: Side) -> None:
        """Run the loop of all sides (or of some) until a condition holds; fail when everybody sleeps for good."""
        sides = list(only or self.sides)
        deadline = time.monotonic() + LIMIT_S
        busy = True
        while True:
            wait_s = 0.0 if busy else SLICE_S if self.threaded else LIMIT_S
            ready = {fd for fd, _ in self._poll.poll(wait_s * 1000)}
            assert busy or ready or self.threaded, "every core said that it is safe to sleep, and nothing wakes any"
            turns = [side.turn(side.core.fd in ready) for side in sides]
            busy = any(turns)
            if until():
                return
            assert time.monotonic() < deadline, f"not reached in {LIMIT_S} s"

    def finish(self, *operations: Operation) -> None:
        """Drive until these are over, and expect that all went well."""
        self.drive(lambda: all(operation.is_over for operation in operations))
        assert {operation.errno for operation in operations} <= {0}

    def arrived(self, *waits: CounterWait) -> None:
        """Drive until the counts of all waits have come, and take them."""
        self.drive(lambda: all(wait.is_over for wait in waits))
        for wait in waits:
            assert wait.satisfied
            wait.take()

    def rest(self) -> None:
        """Drive until no core does anything of its own accord any more: what is over is over then."""
        deadline = time.monotonic() + LIMIT_S
        if self.threaded:
            still = None
            while (
                self._on_its_way()
                or still != (still := [self._work(side) for side in self.sides])
                or not self._threads_rest()
            ):
                self._sweep()
                self.drive(lambda: True)
                assert time.monotonic() < deadline, "some core never rests"
            return
        # In this order: what has come meanwhile can be polled.
        while self._on_its_way() or self._poll.poll(0) or any(side.awake for side in self.sides):
            self.drive(lambda: True)
            assert time.monotonic() < deadline, "some core never rests"

    @property
    def world(self) -> World:
        """The simulated network, of rails of that kind."""
        assert self._sim is not None
        return self._sim.network.world

    def _sweep(self) -> None:
        """Have every core's thread do a whole round from now on: on a busy machine it may not have run for long."""
        deadline = time.monotonic() + LIMIT_S
        for side in self.sides:
            # One round may be under way.
            goal = side.core.statistics()["rounds"] + 2
            while side.core.statistics()["rounds"] < goal:
                assert time.monotonic() < deadline, "a thread does no more rounds"
                side.core.wake()
                time.sleep(0.001)

    def _on_its_way(self) -> bool:
        """Whether a network that nobody has to call has something that will come by itself."""
        if self.kind is EFA:
            return still_open("work") > 0
        return self._sim is not None and self._sim.network.has_opened_engine and self._sim.network.world.under_way > 0

    @staticmethod
    def _work(side: Side) -> tuple[int, ...]:
        counted = side.core.statistics()
        return tuple(counted[name] for name in ("posted", "completed", "immediates", "inbox"))

    def wakeups(self) -> int:
        """Sleep for a while and count how often some core was woken: a descriptor that spins gives thousands.

        The least of three windows: a library's own timer or late event may fill one, a spin fills each.
        """
        least = self._wakeups()
        for _ in range(2):
            if least:
                least = min(least, self._wakeups())
        return least

    def _wakeups(self, seconds: float = 0.1) -> int:
        until, count = time.monotonic() + seconds, 0
        rounds = self._rounds()
        while (left := until - time.monotonic()) > 0:
            if self._poll.poll(left * 1000):
                count += 1
                self.drive(lambda: True)
        return count if not self.threaded else count + self._rounds() - rounds

    def _threads_rest(self) -> bool:
        """Tell whether no native thread makes rounds; libfabric 1.17 keeps one busy while it ends a connection."""
        before = self._rounds()
        return not self._poll.poll(SLICE_S * 1000) and self._rounds() == before

    def _rounds(self) -> int:
        return sum(side.core.statistics()["rounds"] for side in self.sides)

    def close(self) -> None:
        """Close everything; what is still in flight anywhere is an error."""
        for side in self.sides:
            for link in tuple(side.core.peers):
                link.close()
        while self.sides:
            self.sides.pop().close()
        if self._sim is not None:
            self._sim.close()


@contextmanager
def opened(kind: Kind, threaded: bool = False, **core: Any) -> Iterator[Rails]:
    """Give the rails of one test and close them."""
    rails = Rails(kind, threaded, **core)
    try:
        yield rails
    finally:
        rails.close()


def filled(length: int, seed: int = 1) -> Any:
    """Return so many random bytes, none of them zero."""
    return np.random.default_rng(seed).integers(1, 256, length, dtype=np.uint8)


@dataclass(frozen=True)
class Pair:
    """Two sides that are joined: `ab` is a's link to b, `ba` the other end of it."""

    rails: Rails
    a: Side
    b: Side
    ab: PeerLink
    ba: PeerLink

    @classmethod
    def of(cls, rails: Rails, **join: Any) -> Pair:
        a, b = rails.side(), rails.side()
        return cls(rails, a, b, *rails.join(a, b, **join))


def readable(*fds: int, seconds: float = 0.0) -> list[int]:
    """Return those of the descriptors that can be read, after waiting for one for at most so long."""
    return select.select(fds, [], [], seconds)[0]
