"""The parent's part of a run: it starts prefiller and decoder, hands out prompts, gathers tokens, and detects deaths.

The phases of a request: the parent asks both children for it by its number; its pages move; its first token arrives,
then the rest; it is over.

When something fails, the parent first lets the decoder report how each open request ended. Then it asks for a last
report, so that the error can state whether the pages were freed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

import aiote
from aiote.demo import tokens
from aiote.demo.children import Child, how_it_ended, spawn
from aiote.demo.faults import DemoError
from aiote.demo.life import first_of
from aiote.demo.settings import Settings

__all__ = ["ChildReport", "Observer", "RequestTrace", "RunFailed", "RunResult", "run"]

_READY_S = 60.0
# The engine detects a lost prefiller at once if its sockets close, and after heartbeat_timeout if it is silent.
_DRAIN_S = 20.0
_EXIT_S = 1.0
_REPORT_S = 60.0


class Observer(Protocol):
    """An observer of a run's progress."""

    def started(self, pages: int, tokens: int) -> None:
        """Record that the run begins, and how many pages and tokens there will be."""

    def pages(self, count: int) -> None:
        """Record that `count` more pages are in flight."""

    def token(self) -> None:
        """Record one more token."""


@dataclass(slots=True)
class RequestTrace:
    """The record of one request. Times are of the parent's clock, in seconds; 0.0 means not yet."""

    request: int
    prompt: tuple[int, ...]
    asked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    pages: int = 0
    tokens: list[int] = field(default_factory=list)
    checksum: int = 0
    reason: str = ""
    over: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_open(self) -> bool:
        """Whether the children were asked for the request and it has not ended successfully."""
        return bool(self.asked_s) and (not self.over.is_set() or bool(self.reason))


@dataclass(frozen=True, slots=True)
class ChildReport:
    """A child's last report. At least one transfer was in flight for `busy_s` seconds."""

    pages_held: int
    pages_total: int
    writes: int = 0
    bytes: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a successful run."""

    traces: tuple[RequestTrace, ...]
    reports: Mapping[str, ChildReport]
    rails: tuple[aiote.RailInfo, ...]
    pids: Mapping[str, int]


class RunFailed(DemoError):
    """A run failed; `details` are the same facts for a program."""

    def __init__(self, message: str, details: Mapping[str, object]) -> None:
        super().__init__(message)
        self.details = dict(details)


async def run(
    settings: Settings, prompts: Sequence[bytes], observer: Observer, *, kill_prefiller_after: float | None = None
) -> RunResult:
    """Generate for the prompts with a prefiller and a decoder in processes of their own.

    `kill_prefiller_after` kills the prefiller (SIGKILL) once that fraction of all pages is computed and in flight.
    Raises RunFailed if a process or a request fails, DemoError or AioteError if the run cannot begin.
    """
    config = settings.config()
    traces = tuple(RequestTrace(number, tuple(tokens.encode(prompt))) for number, prompt in enumerate(prompts))
    total = sum(config.layers * settings.pages_for(len(trace.prompt)) for trace in traces)
    # Report an unusable provider here, before any child is started.
    async with aiote.open_engine(settings.provider) as engine:
        rails = tuple(engine.rails)
    async with spawn("prefill", settings) as prefill, spawn("decode", settings) as decode:
        parent = _Parent(settings, traces, (prefill, decode), observer)
        parent.total_pages, parent.kill_at = total, kill_prefiller_after
        await parent.run()
    pids = {"router": os.getpid(), "prefill": prefill.process.pid, "decode": decode.process.pid}
    return RunResult(traces, parent.reports, rails, pids)


class _Parent:
    def __init__(
        self, settings: Settings, traces: tuple[RequestTrace, ...], children: tuple[Child, Child], observer: Observer
    ) -> None:
        self.reports: dict[str, ChildReport] = {}
        self.total_pages = 0
        self.kill_at: float | None = None
        self._settings, self._traces, self._observer = settings, traces, observer
        self._children = {child.role: child for child in children}
        self._ready, self._trouble = anyio.Event(), anyio.Event()
        self._ended = {child.role: anyio.Event() for child in children}
        self._sent = 0
        self._stopping = False

    async def run(self) -> None:
        """Manage the children from their start to their last report."""
        failure: RunFailed | None = None
        async with anyio.create_task_group() as group:
            for child in self._children.values():
                group.start_soon(self._follow, child)
            try:
                await self._greet()
                await self._unless_trouble(self._hand_out)
                await self._stop()
                if len(self.reports) < len(self._children):
                    raise _InTrouble
            except _InTrouble:
                failure = await self._explain()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _unless_trouble(self, wait: Callable[[], Awaitable[object]]) -> None:
        await first_of(wait, self._trouble.wait)
        if self._trouble.is_set():
            raise _InTrouble

    async def _follow(self, child: Child) -> None:
        """Record the facts that a child reports until it has ended."""
        async for fact in child.facts():
            self._take(child, fact)
        await child.wait()
        self._ended[child.role].set()
        if not self._stopping:
            self._trouble.set()

    async def _greet(self) -> None:
        """Wait until both children are ready, with the same model."""
        with anyio.move_on_after(_READY_S):
            await self._unless_trouble(self._ready.wait)
        if not self._ready.is_set():
            missing = [child.name for child in self._children.values() if not child.ready]
            raise DemoError(f"the {' and the '.join(missing)} did not report ready within {_READY_S:.0f} s")
        if len({child.ready["model"] for child in self._children.values()}) > 1:
            raise DemoError(
                "prefiller and decoder have different weights; did the weights file change between their starts?"
            )

    async def _hand_out(self) -> None:
        self._observer.started(self.total_pages, len(self._traces) * self._settings.new_tokens)
        places = anyio.Semaphore(self._settings.concurrency)
        prefill, decode = self._children["prefill"], self._children["decode"]

        async def run_one(trace: RequestTrace) -> None:
            trace.asked_s = time.perf_counter()
            await prefill.ask(request=trace.request, prompt=trace.prompt)
            await decode.ask(request=trace.request, prompt=trace.prompt, prefiller=prefill.ready["ready"])
            await trace.over.wait()
            if not trace.reason:
                places.release()

        async with anyio.create_task_group() as group:
            for trace in self._traces:
                await places.acquire()
                group.start_soon(run_one, trace)

    async def _stop(self) -> None:
        """Make the children that still run drain, report and end."""
        self._stopping = True
        async with anyio.create_task_group() as group:
            for child in self._children.values():
                group.start_soon(child.end, signal.SIGTERM, _REPORT_S)
        with anyio.move_on_after(_REPORT_S):
            for ended in self._ended.values():
                await ended.wait()

    def _take(self, child: Child, fact: dict[str, Any]) -> None:
        match fact:
            case {"ready": _}:
                if all(child.ready for child in self._children.values()):
                    self._ready.set()
            case {"report": report}:
                self.reports[child.role] = ChildReport(**report)
            case {"request": request, "pages": count}:
                self._progress(self._traces[request], count)
            case {"request": request, "token": token}:
                self._token(self._traces[request], token)
            case {"request": request, "checksum": checksum}:
                self._traces[request].checksum = checksum
                self._traces[request].over.set()
            case {"request": request, "failed": reason}:
                self._traces[request].reason = reason
                self._traces[request].over.set()
                self._trouble.set()
            case _:
                raise DemoError(f"the {child.name} wrote {fact!r}, which is not a message")

    def _progress(self, trace: RequestTrace, count: int) -> None:
        trace.pages += count
        self._sent += count
        self._observer.pages(count)
        if self.kill_at is not None and self._sent >= self.kill_at * self.total_pages:
            self.kill_at = None
            self._children["prefill"].send(signal.SIGKILL)

    def _token(self, trace: RequestTrace, token: int) -> None:
        trace.last_s = time.perf_counter()
        trace.first_s = trace.first_s or trace.last_s
        trace.tokens.append(token)
        self._observer.token()

    async def _explain(self) -> RunFailed:
        """Wait for open requests, gather the decoder's last report, and return an error that says what happened."""
        asked = [trace for trace in self._traces if trace.is_open]
        transferring = [trace for trace in asked if not trace.first_s]
        if any(trace.reason for trace in asked):
            # A request failed. If it failed because a child died, the child's exit is about to be reported.
            with anyio.move_on_after(_EXIT_S):
                await first_of(*(event.wait for event in self._ended.values()))
        ended = [child for role, child in self._children.items() if self._ended[role].is_set()]
        gone = next((child for child in ended if child.role not in self.reports), None)
        if not self._ended["decode"].is_set():
            with anyio.move_on_after(_DRAIN_S):
                for trace in asked:
                    await first_of(trace.over.wait, self._ended["decode"].wait)
        await self._stop()
        affected = asked if gone is not None and gone.role == "decode" else transferring
        held = self.reports.get("decode")
        return RunFailed(
            _early_end_text(gone)
            or f"{_failure_text(gone, affected, asked)}; {_pages(held, self._children['decode'])}",
            {
                "process": gone and gone.name,
                "pid": gone and gone.process.pid,
                "exit": gone and gone.process.returncode,
                "requests": [trace.request + 1 for trace in affected],
                "reasons": {trace.request + 1: trace.reason for trace in asked if trace.reason},
                "pages_held": held and held.pages_held,
                "pages_total": held and held.pages_total,
            },
        )


class _InTrouble(Exception):
    """Leave the regular flow of `_Parent.run`."""


def _early_end_text(gone: Child | None) -> str:
    """Return the error text for a child that ended before it was ready, or "" if no child did."""
    if gone is None or gone.ready or gone.process.returncode is None:
        return ""
    said, how = gone.complaint or "it said nothing", how_it_ended(gone.process.returncode)
    return f"the {gone.name} (pid {gone.process.pid}) ended before it was ready ({how}): {said}"


def _failure_text(gone: Child | None, affected: Sequence[RequestTrace], asked: Sequence[RequestTrace]) -> str:
    """Return the error text: which child died during which requests, or else which request failed."""
    names = " and ".join(str(trace.request + 1) for trace in affected)
    several = len(affected) > 1
    if gone is None:
        failed = [f"request {f.request + 1} failed: {f.reason}" for f in asked if f.reason]
        return "; ".join(failed) or "the run failed, and no process gave a reason"
    how = _describe_end(gone)
    doing = "transferred" if gone.role == "prefill" else "answered"
    while_ = (
        f"while request{'s' * several} {names} {'were' if several else 'was'} being {doing}"
        if affected
        else f"while no request was being {doing}"
    )
    return f"the {gone.name} (pid {gone.process.pid}) died {while_} ({how})"


def _describe_end(child: Child) -> str:
    """Describe how a child ended, with its last line on standard error."""
    assert child.process.returncode is not None
    return how_it_ended(child.process.returncode) + (f": {child.complaint}" if child.complaint else "")


def _pages(held: ChildReport | None, decoder: Child) -> str:
    if held is None:
        how = "it did not end" if decoder.process.returncode is None else _describe_end(decoder)
        return f"the decoder could not be asked about its pages ({how})"
    if held.pages_held:
        return f"the decoder still holds {held.pages_held} of {held.pages_total} pages"
    return f"the decoder freed its pages (0 of {held.pages_total} held)"
