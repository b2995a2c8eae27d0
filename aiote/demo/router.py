"""The parent's part of a run: starts prefiller and decoder, hands out prompts, gathers tokens, and notices who is gone.

A request is *asked* (sent to the decoder), then its pages go there, then its first token comes, then the rest, then it
is over. The engine promises no order between messages, so tokens carry their place, and a request is over once as many
are there as the decoder counted.

When something fails, the router first lets the decoder say how each open request ended, then asks for a last report, so
that the error can say what became of the pages.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio

import aiote
from aiote.demo import tokens, wire
from aiote.demo.child import NAMES, Child, how_it_ended, spawn
from aiote.demo.faults import DemoError
from aiote.demo.mail import Mail, open_mail
from aiote.demo.settings import Job, Settings
from aiote.demo.waits import first_of
from aiote.errors import AioteError

__all__ = ["Flight", "RunFailed", "RunResult", "Watch", "run"]

_READY_S = 60.0
# A lost prefiller is noticed by the engine at once when its sockets close, after the heartbeat limit when it is silent.
_SETTLE_S = 20.0
_EXIT_S = 1.0
_REPORT_S = 10.0


class Watch(Protocol):
    """Who wants to see a run progress."""

    def started(self, pages: int, tokens: int) -> None:
        """Take note that the run begins, and how many pages and tokens there will be."""

    def pages(self, count: int) -> None:
        """Take note that so many more pages are on their way."""

    def token(self) -> None:
        """Take note of one more token."""


@dataclass(slots=True)
class Flight:
    """One request on its way. Times are of the router's clock, in seconds; 0.0 is not yet."""

    request: int
    prompt: tuple[int, ...]
    asked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    pages: int = 0
    answer: dict[int, int] = field(default_factory=dict)
    count: int | None = None
    checksum: int = 0
    reason: str = ""
    over: anyio.Event = field(default_factory=anyio.Event)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens so far, in order."""
        return tuple(self.answer[index] for index in sorted(self.answer))

    @property
    def open(self) -> bool:
        """Return whether it was asked and is not over well."""
        return bool(self.asked_s) and (not self.over.is_set() or bool(self.reason))

    def settle(self) -> None:
        """Mark it as over if every token is there."""
        if self.count is not None and len(self.answer) == self.count:
            self.over.set()


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that went well."""

    flights: tuple[Flight, ...]
    reports: Mapping[str, wire.Report]
    rails: tuple[aiote.RailInfo, ...]
    pids: Mapping[str, int]


class RunFailed(DemoError):
    """A run that did not; `details` are the same facts for a program."""

    def __init__(self, message: str, details: Mapping[str, object]) -> None:
        super().__init__(message)
        self.details = dict(details)


async def run(
    settings: Settings, prompts: Sequence[bytes], watch: Watch, *, kill_prefiller_after: float | None = None
) -> RunResult:
    """Generate for the prompts with a prefiller and a decoder in processes of their own.

    `kill_prefiller_after` kills the prefiller (SIGKILL) once that fraction of all pages is computed and on its way.
    Raises RunFailed if a process or a request fails, DemoError or AioteError if the run cannot even begin.
    """
    layout = settings.layout(settings.config())
    flights = tuple(Flight(number, tuple(tokens.encode(prompt))) for number, prompt in enumerate(prompts))
    total = sum(layout.layers * layout.pages_for(len(flight.prompt)) for flight in flights)
    async with open_mail(settings.provider) as mail:
        job = Job(settings, router=str(mail.engine.address))
        async with spawn("prefill", job) as prefill, spawn("decode", job) as decode:
            router = _Router(mail, settings, flights, (prefill, decode), watch)
            router.total_pages, router.kill_at = total, kill_prefiller_after
            await router.run()
            rails = tuple(mail.engine.rails)
    pids = {"router": os.getpid(), "prefill": prefill.pid, "decode": decode.pid}
    return RunResult(flights, router.reports, rails, pids)


class _Router:
    def __init__(
        self,
        mail: Mail,
        settings: Settings,
        flights: tuple[Flight, ...],
        children: tuple[Child, Child],
        watch: Watch,
    ) -> None:
        self.reports: dict[str, wire.Report] = {}
        self.total_pages = 0
        self.kill_at: float | None = None
        self._settings, self._flights, self._watch = settings, flights, watch
        self._children = {child.role: child for child in children}
        self._mail = mail
        self._peers: dict[str, aiote.Peer] = {}
        self._hellos: dict[str, wire.Hello] = {}
        self._ready, self._reported, self._trouble = anyio.Event(), anyio.Event(), anyio.Event()
        self._ended = {child.role: anyio.Event() for child in children}
        self._sent = 0
        self._stopping = False

    async def run(self) -> None:
        """Live from the children's start to their last report."""
        failure: RunFailed | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen)
            for child in self._children.values():
                group.start_soon(self._guard, child)
            try:
                await self._greet()
                await self._unless_trouble(self._hand_out)
                await self._unless_trouble(self._stop)
            except _InTrouble:
                failure = await self._explain()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _unless_trouble(self, wait: Callable[[], Awaitable[object]]) -> None:
        await first_of(wait, self._trouble.wait)
        if self._trouble.is_set():
            raise _InTrouble

    async def _guard(self, child: Child) -> None:
        await child.wait()
        self._ended[child.role].set()
        if not self._stopping:
            self._trouble.set()

    async def _greet(self) -> None:
        """Wait until both children are ready, with the same model."""
        with anyio.move_on_after(_READY_S):
            await self._unless_trouble(self._ready.wait)
        if not self._ready.is_set():
            missing = [NAMES[role] for role in self._children if role not in self._hellos]
            raise DemoError(f"the {' and the '.join(missing)} did not report ready within {_READY_S:.0f} s")
        prefill, decode = self._hellos["prefill"], self._hellos["decode"]
        if prefill.fingerprint != decode.fingerprint:
            raise DemoError("prefiller and decoder hold different weights; did the weights file change meanwhile?")

    async def _send(self, role: str, message: wire.Message) -> None:
        try:
            await self._mail.send(self._peers[role], message)
        except AioteError:
            # The child is gone or going. Its guard or its silence says so better than this error.
            return

    async def _hand_out(self) -> None:
        self._watch.started(self.total_pages, len(self._flights) * self._settings.new_tokens)
        places = anyio.Semaphore(self._settings.concurrency)
        prefiller = self._hellos["prefill"].address

        async def one(flight: Flight) -> None:
            flight.asked_s = time.perf_counter()
            await self._send("decode", wire.Generate(flight.request, tokens.decode(flight.prompt), prefiller))
            await flight.over.wait()
            if not flight.reason:
                places.release()

        async with anyio.create_task_group() as group:
            for flight in self._flights:
                await places.acquire()
                group.start_soon(one, flight)

    async def _stop(self) -> None:
        """Ask the children that are there for their reports, and wait for them."""
        self._stopping = True
        for role in self._peers:
            if not self._ended[role].is_set():
                await self._send(role, wire.Stop())
        with anyio.move_on_after(_REPORT_S):
            for role in self._peers:
                await first_of(self._ended[role].wait, partial(self._report_of, role))

    async def _report_of(self, role: str) -> None:
        while role not in self.reports:
            self._reported = anyio.Event()
            await self._reported.wait()

    async def _listen(self) -> None:
        async for peer, message in self._mail:
            match message:
                case wire.Hello():
                    self._peers[message.role], self._hellos[message.role] = peer, message
                    if len(self._hellos) == len(self._children):
                        self._ready.set()
                case wire.Progress():
                    self._progress(message)
                case wire.Token():
                    self._token(self._flights[message.request], message)
                case wire.Done():
                    flight = self._flights[message.request]
                    flight.count, flight.checksum = message.count, message.checksum
                    flight.settle()
                case wire.Failed():
                    flight = self._flights[message.request]
                    flight.reason = message.reason
                    flight.over.set()
                    self._trouble.set()
                case wire.Report():
                    self.reports[message.role] = message
                    self._reported.set()
                case _:
                    raise wire.WireError(f"a {type(message).__name__} is not for a router")

    def _progress(self, message: wire.Progress) -> None:
        self._flights[message.request].pages += message.pages
        self._sent += message.pages
        self._watch.pages(message.pages)
        if self.kill_at is not None and self._sent >= self.kill_at * self.total_pages:
            self.kill_at = None
            os.kill(self._children["prefill"].pid, signal.SIGKILL)

    def _token(self, flight: Flight, message: wire.Token) -> None:
        flight.last_s = time.perf_counter()
        flight.first_s = flight.first_s or flight.last_s
        flight.answer[message.index] = message.token
        self._watch.token()
        flight.settle()

    async def _explain(self) -> RunFailed:
        """Let what is open settle, gather the last report of the decoder, and say what happened."""
        asked = [flight for flight in self._flights if flight.open]
        transferring = [flight for flight in asked if not flight.first_s]
        if any(flight.reason for flight in asked):
            # A request failed; if that is because a child died, its exit is about to be seen.
            with anyio.move_on_after(_EXIT_S):
                await first_of(*(event.wait for event in self._ended.values()))
        gone = next((child for role, child in self._children.items() if self._ended[role].is_set()), None)
        if not self._ended["decode"].is_set():
            with anyio.move_on_after(_SETTLE_S):
                for flight in asked:
                    await first_of(flight.over.wait, self._ended["decode"].wait)
        await self._stop()
        affected = asked if gone is not None and gone.role == "decode" else transferring
        held = self.reports.get("decode")
        return RunFailed(
            self._early(gone) or f"{_what(gone, affected, asked)}; {_pages(held)}",
            {
                "process": gone and gone.name,
                "pid": gone and gone.pid,
                "exit": gone and gone.code,
                "requests": [flight.request + 1 for flight in affected],
                "reasons": {flight.request + 1: flight.reason for flight in asked if flight.reason},
                "pages_held": held and held.pages_held,
                "pages_total": held and held.pages_total,
            },
        )

    def _early(self, gone: Child | None) -> str:
        """Say that a child ended before it was ready, if that is what happened."""
        if gone is None or gone.role in self._hellos or gone.code is None:
            return ""
        said = gone.complaint or "it said nothing"
        return f"the {gone.name} (pid {gone.pid}) ended before it was ready ({how_it_ended(gone.code)}): {said}"


class _InTrouble(Exception):
    """Leaves the straight path of `_Router.run`."""


def _what(gone: Child | None, affected: Sequence[Flight], asked: Sequence[Flight]) -> str:
    """Say who is gone, or else which request failed, and in the middle of what."""
    names = " and ".join(str(flight.request + 1) for flight in affected)
    several = len(affected) > 1
    if gone is None:
        failed = [f"request {f.request + 1} failed: {f.reason}" for f in asked if f.reason]
        return "; ".join(failed) or "the run failed for no reason that a process gave"
    assert gone.code is not None
    how = how_it_ended(gone.code) + (f": {gone.complaint}" if gone.complaint else "")
    doing = "transferred" if gone.role == "prefill" else "answered"
    while_ = (
        f"while request{'s' * several} {names} {'were' if several else 'was'} being {doing}"
        if affected
        else f"while no request was being {doing}"
    )
    return f"the {gone.name} (pid {gone.pid}) died {while_} ({how})"


def _pages(held: wire.Report | None) -> str:
    if held is None:
        return "the decoder could not be asked about its pages"
    if held.pages_held:
        return f"the decoder still holds {held.pages_held} of {held.pages_total} pages"
    return f"the decoder freed its pages (0 of {held.pages_total} held)"
