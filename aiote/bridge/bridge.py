"""What users hold of the process's engine, and how it is acquired and given back."""

from __future__ import annotations

import atexit
import inspect
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import aiote

from ..config import EngineConfig
from ..engine import Opening
from ..errors import ClosedError, UsageError
from .calls import Call, wait_refused
from .moves import Move
from .promise import Promise, outlast, until_done
from .registered_memory import MemorySource, Registration
from .thread import EngineThread, closed

if TYPE_CHECKING:
    from types import TracebackType

    from ..transfers import Access, SharedRegistration

__all__ = ["Bridge", "acquire"]

T = TypeVar("T")
KEPT_BYTES = 256 << 20

_shared: EngineThread | None = None
_inherited: list[EngineThread] = []
_lock = threading.RLock()


def _in_child() -> None:
    """Leave the engine to the parent process: its thread does not run here."""
    global _shared, _lock
    _lock = threading.RLock()
    if _shared is not None:
        _shared.inherited = True
        # Its loop, were it freed, would take its descriptors out of the epoll instance, which is the parent's, too.
        _inherited.append(_shared)
        _shared = None


os.register_at_fork(after_in_child=_in_child)


def _let_go_dropped(thread: EngineThread, held: SharedRegistration) -> None:
    # An engine that is stopping closes all its memory.
    if not thread.stopping:
        Call(thread, None, thread.memory.let_go(held), firm=True).start()


@atexit.register
def _at_exit() -> None:
    """End the engine while threads still run, and before `aiote.engine` complains of one that was left open."""
    if _shared is not None:
        _shared.stop_at_exit()


def acquire(
    provider: str | None = None,
    rails: Iterable[str] | None = None,
    config: EngineConfig | None = None,
    *,
    kept_bytes: int | None = None,
    **settings: Any,
) -> Bridge:
    """Return a bridge to this process's engine, which the first who asks opens and the last `close` closes.

    provider, rails, config, settings: as of `aiote.open_engine`. kept_bytes: how many bytes of memory may stay
    registered, and alive, that nobody holds any more (256 MiB). What is not given is as the engine has it. Waits until
    the engine is open: some 10 ms, up to a second where libfabric is loaded. After a fork the child acquires one of its
    own. Raises UsageError where a setting differs from the open engine's, and on the thread of a closed bridge, which
    has to end first. Raises as `open_engine`.
    """
    global _shared
    with _lock:
        if _shared is None or _shared.stopping:
            opening = aiote.open_engine(provider or "auto", rails, config, **settings)
            thread = EngineThread(opening, KEPT_BYTES if kept_bytes is None else kept_bytes, _shared)
            try:
                thread.start()
                _shared = thread
                made = Bridge(thread)
            except BaseException:
                thread.stop()
                raise
        else:
            thread = _shared
            has = thread.opening.arguments
            given = aiote.open_engine(provider or has[0], rails or has[1], config or has[2], **settings)
            _require_same(thread, given, thread.kept_bytes if kept_bytes is None else kept_bytes)
            made = Bridge(thread)
    try:
        thread.wait_opened()
    except BaseException:
        made._abandon()
        raise
    return made


def _require_same(thread: EngineThread, given: Opening, kept_bytes: int) -> None:
    """Raise UsageError where an engine is asked for that the open one is not."""
    has, asked = thread.opening.arguments, given.arguments
    pairs: list[tuple[str, object, object]] = [("provider", has[0], asked[0]), ("rails", has[1], asked[1])]
    pairs.append(("kept_bytes", thread.kept_bytes, kept_bytes))
    for field in fields(EngineConfig):
        here, there = getattr(has[2], field.name), getattr(asked[2], field.name)
        # A key is not shown to anybody.
        pairs.append((field.name, here, there) if field.repr or here == there else (field.name, "another", "this one"))
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if differing:
        what = "; ".join(f"{name} is {here!r}, not {there!r}" for name, here, there in differing)
        raise UsageError(f"this process's engine is open, for all who acquire it, with other settings: {what}")


def _release(thread: EngineThread) -> None:
    """Take a user off, and end the engine with the last one."""
    with _lock:
        thread.users -= 1
        if not thread.users:
            thread.stop()


class Bridge:
    """A user's share of the process's engine; made by `acquire`. A context manager, and an asynchronous one.

    Everything but `engine` may be used from any thread, and the coroutines from any event loop. What a closed one is
    asked for raises ClosedError; in the child of a fork the parent's raises UsageError. One that is dropped is closed
    when Python collects it, with a ResourceWarning; calls under way, and registrations that are held, keep it.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._held: dict[int, SharedRegistration] = {}
        self._numbers = itertools.count()
        self._closing: Promise[None] | None = None
        with _lock:
            thread.users += 1

    def _abandon(self) -> None:
        """Give back the share of a bridge that no caller was given."""
        self._closing = Promise()
        _release(self._thread)

    @property
    def engine(self) -> aiote.Engine:
        """The engine, for coroutines that run on the bridge; on any other thread not to be used.

        A coroutine may be made anywhere: `bridge.call(bridge.engine.write(source, target))`.
        """
        self.require_open()
        return self._thread.engine

    @property
    def closed(self) -> bool:
        """Whether this bridge is closed or being closed."""
        return self._closing is not None or self._thread.stopping

    # Coroutines.

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine beside the engine and wait for its result, in any thread but the bridge's own.

        After `timeout` seconds it is cancelled. Whatever interrupts the wait (Ctrl-C) cancels it as well. This returns
        or raises once it has ended, so its transfers have drained, which the engine bounds (`drain_timeout`, then the
        loss of the peer). Raises what the coroutine raises, TimeoutError, ClosedError where the bridge is closed
        meanwhile, and UsageError on the bridge's own thread, which would wait for itself.
        """
        return self._call(work, timeout, waits=True).wait()

    def submit(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Start a coroutine beside the engine and return its future, which is done when the coroutine has ended.

        Its `cancel()` works from any thread; the future is cancelled once the transfers have drained.
        """
        call = self._call(work)
        call.start()
        return call

    def prepare(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Return the call of a coroutine that its `start`, `wait` or `join` begins."""
        return self._call(work)

    def write(self, source: aiote.Region, target: aiote.RemoteRegion, timeout: float | None = None) -> None:
        """Write all of `source` to all of `target` (same length) and wait, in any thread but the bridge's own.

        It is posted here, and waited for here; the loop has no part in it where all goes well. `timeout`, interruptions
        and errors are as of `call`; where it raises, no NIC uses `source` any more. source: of `Registration.region`.
        """
        self._move(source, target, None, timeout, lambda: self.engine.write(source, target))

    def write_imm(self, source: aiote.Region | None, target: Any, imm: int, timeout: float | None = None) -> None:
        """Write as `write` does and count 1 on immediate `imm` at the receiver; as `Engine.write_imm`."""
        self._move(source, target, imm, timeout, lambda: self.engine.write_imm(source, target, imm))

    def read(self, source: aiote.RemoteRegion, target: aiote.Region, timeout: float | None = None) -> None:
        """Read all of `source` into all of `target` (same length), as `write` writes."""
        self._move(target, source, None, timeout, lambda: self.engine.read(source, target), reads=True)

    def _move(
        self,
        local: Any,
        remote: Any,
        imm: int | None,
        timeout: float | None,
        otherwise: Callable[[], Coroutine[Any, Any, None]],
        *,
        reads: bool = False,
    ) -> None:
        self.require_open()
        self.require_elsewhere()
        Move(self, self._thread, otherwise).run(local, remote, reads=reads, imm=imm, timeout=timeout)

    def attach(self, descriptor: bytes, **claim: Any) -> aiote.RemoteRegion:
        """Return the memory that a descriptor is of, as `Engine.attach` does, in any thread but the bridge's own."""

        async def attached() -> aiote.RemoteRegion:
            return self.engine.attach(descriptor, **claim)

        return self.call(attached())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine beside the engine and await its result, on any asyncio, uvloop or trio loop.

        Cancelling this cancels the coroutine, as anything else does that interrupts the wait (Ctrl-C under trio), and
        is raised once it has ended. Raises what the coroutine raises, and ClosedError where the bridge is closed
        meanwhile.
        """
        return await self._call(work).join()

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None, *, waits: bool = False) -> Call[T]:
        """Prepare a call; `waits`: this thread is to wait for it."""
        if not inspect.iscoroutine(work):
            raise UsageError(f"a coroutine is expected, as an async function returns it, got {type(work).__name__}")
        try:
            self.require_open()
            if waits:
                self.require_elsewhere()
        except BaseException:
            work.close()
            raise
        return Call(self._thread, self, work, timeout)

    def require_elsewhere(self) -> None:
        """Raise UsageError on the bridge's own thread, which waits for nothing."""
        if self._thread.is_current:
            raise wait_refused()

    def require_open(self) -> None:
        """Raise ClosedError once this bridge is closed or being closed, UsageError in the child of a fork."""
        self._thread.require_parent()
        if self.closed:
            raise closed()

    # Memory.

    def register(self, memory: Any, access: Access = "read-write") -> Registration:
        """Register memory, or share its registration with whoever else has registered it with this access.

        memory: a tensor of torch on the CPU, of any dtype, contiguous; or what `Engine.register` takes, or an object
        with `__array_interface__`. Of a tensor the whole storage is registered, once for all its views; a descriptor is
        of the view alone. access: as of `Engine.register`. With "local" it may stay registered, and alive, when nobody
        holds it any more, within `kept_bytes`; with any other, peers may have its keys, and it ends with the last who
        holds it. In any thread but the bridge's own. Raises as `Engine.register_async`.
        """
        call = self._call(self._register(MemorySource(memory, access)), waits=True)
        try:
            return call.wait()
        except BaseException:
            self._take_back(call)
            raise

    async def register_async(self, memory: Any, access: Access = "read-write") -> Registration:
        """Register memory as `register` does, on any event loop, also the bridge's own."""
        call = self._call(self._register(MemorySource(memory, access)))
        try:
            return await call.join()
        except BaseException:
            self._take_back(call)
            raise

    async def _register(self, source: MemorySource) -> Registration:
        held = await self._thread.memory.hold(source)
        number = next(self._numbers)
        self._held[number] = held
        try:
            return Registration(self, number, held, held.region[source.bytes])
        except BaseException:
            await self._let_go(number)
            raise

    def _take_back(self, call: Call[Registration]) -> None:
        """Close what was registered for one who has not waited for it."""
        if call.done() and not call.cancelled() and call.exception() is None:
            Call(self._thread, self, self._let_go(call.result().number)).start()

    async def _let_go(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            await self._thread.memory.let_go(held)

    def require_held(self, number: int) -> None:
        """Raise ClosedError where a registration is closed, UsageError in the child of a fork."""
        self._thread.require_parent()
        if number not in self._held:
            raise ClosedError("the registration is closed")

    def holds(self, number: int) -> bool:
        """Tell whether a registration is open."""
        return number in self._held and not (self.closed or self._thread.inherited)

    def close_registration(self, number: int) -> None:
        """Close a registration and wait for it."""
        if self.holds(number):
            with suppress(ClosedError):
                self._call(self._let_go(number), waits=True).wait()

    async def aclose_registration(self, number: int) -> None:
        """Close a registration and await it."""
        if self.holds(number):
            with suppress(ClosedError):
                await self._call(self._let_go(number)).join()

    def drop_registration(self, number: int) -> None:
        """Begin to close a registration that was dropped, from any thread, and warn."""
        if not self.holds(number):
            return
        held = self._held.pop(number, None)
        # A collection may run anywhere, also where the bridge's locks are held, so the loop lets go of it. The callback
        # has no reference to the bridge, which may be dropped as well.
        if held is not None:
            with suppress(RuntimeError):
                self._thread.loop.call_soon_threadsafe(_let_go_dropped, self._thread, held)
            warnings.warn(f"a registration of {held.key[1]} bytes was dropped and not closed", ResourceWarning, 3)

    def trim(self, nbytes: int = 0) -> None:
        """End the registrations that nobody holds any more until they are of at most so many bytes.

        For memory that was registered as "local" and is to be unmapped or resized. In any thread but the bridge's own.
        """
        self.call(self._thread.memory.trim(nbytes))

    # The end.

    def close(self) -> None:
        """Cancel the calls of this bridge, wait until they have ended, close its registrations; idempotent.

        The last bridge of the process closes the engine. An interruption (Ctrl-C) is raised when that is done. In any
        thread but the bridge's own; in the child of a fork it does nothing.
        """
        closing = self._end()
        if closing is not None:
            try:
                with suppress(ClosedError):
                    closing.wait()
            finally:
                if self._thread.stopping:
                    outlast(self._thread.ended)
                    self._thread.join()

    async def aclose(self) -> None:
        """Close as `close` does, on any event loop but the bridge's own. A cancellation is raised when that is done."""
        closing = self._end()
        if closing is not None:
            try:
                with suppress(ClosedError):
                    await closing.join()
            finally:
                if self._thread.stopping:
                    await until_done(self._thread.ended)

    def _end(self) -> Call[None] | None:
        """Return the call that closes this bridge, made the first time; None in the child of a fork."""
        if self._thread.inherited:
            return None
        self.require_elsewhere()
        return self._closing_call()

    def _closing_call(self) -> Call[None]:
        with _lock:
            if self._closing is None:
                self._closing = Call(self._thread, None, self._close(), firm=True)
            return cast("Call[None]", self._closing)

    def __del__(self) -> None:
        # One whose making was interrupted has nothing.
        if "_closing" not in vars(self) or self._thread.inherited:
            return
        if self._closing is None and not self._thread.stopping:
            warnings.warn(f"{self!r} was dropped and not closed", ResourceWarning, stacklevel=2, source=self)
        elif not isinstance(self._closing, Call) or self._closing.done():
            return
        # Else a close was interrupted before it had begun.
        # Any thread may collect it, also one that holds a lock of ours or that is the bridge's: only the loop is told.
        with suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(lambda: self._closing_call().start())

    async def _close(self) -> None:
        await self._thread.end_calls(self)
        for number in tuple(self._held):
            await self._let_go(number)
        _release(self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Bridge, {'closed' if self.closed else f'to {self._thread.engine!r}'}>"
