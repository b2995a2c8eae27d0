"""Share the process's engine: each user acquires a bridge to it, uses the bridge from any thread, and closes it."""

from __future__ import annotations

import atexit
import inspect
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import aiote

from ..config import EngineConfig
from ..engine import Opening
from ..errors import ClosedError, UsageError
from .calls import Call, wait_refused
from .held import HeldContext
from .moves import ThreadTransfer
from .promise import Promise, outlast, until_done
from .registered_memory import MemorySource, Registration
from .thread import EngineThread, make_closed_error

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
    """Leave the engine to the parent process, because its thread does not run in this forked child."""
    global _shared, _lock
    _lock = threading.RLock()
    if _shared is not None:
        _shared.inherited = True
        # Keep a reference: if its loop were freed, that would remove descriptors from the epoll instance, which the
        # parent process shares.
        _inherited.append(_shared)
        _shared = None


os.register_at_fork(after_in_child=_in_child)


def _let_go_dropped(thread: EngineThread, held: SharedRegistration) -> None:
    # A stopping engine closes all its registrations by itself.
    if not thread.stopping:
        Call(thread, None, thread.memory.let_go(held), uncancellable=True).start()


@atexit.register
def _at_exit() -> None:
    """End the engine while threads still run, and before `aiote.engine` warns about an engine that was left open."""
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
    """Return a bridge to this process's engine. The first call opens the engine, and the last `close` closes it.

    provider, rails, config, settings: as for `aiote.open_engine`. kept_bytes: how many bytes of memory without a holder
    may stay registered, and alive (256 MiB by default). If the engine is open already, arguments that are not given are
    those of the open engine.

    This waits until the engine is open: about 10 ms, up to a second if libfabric is loaded. After a fork, the child
    process acquires an engine of its own. Raises UsageError if an argument differs from the open engine's, and on the
    thread of a closed bridge, because that thread has to end before the next engine opens. Raises what `open_engine`
    raises.
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
    """Raise UsageError if the requested settings differ from those of the open engine."""
    has, asked = thread.opening.arguments, given.arguments
    pairs: list[tuple[str, object, object]] = [("provider", has[0], asked[0]), ("rails", has[1], asked[1])]
    pairs.append(("kept_bytes", thread.kept_bytes, kept_bytes))
    for field in fields(EngineConfig):
        here, there = getattr(has[2], field.name), getattr(asked[2], field.name)
        # Never show a key.
        pairs.append((field.name, here, there) if field.repr or here == there else (field.name, "another", "this one"))
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if differing:
        what = "; ".join(f"{name} is {here!r}, not {there!r}" for name, here, there in differing)
        raise UsageError(
            f"this process's engine is already open with other settings ({what}), and all callers "
            "share it: give the same settings, or none"
        )


def _release(thread: EngineThread) -> None:
    """Remove a user; end the engine after the last one."""
    with _lock:
        thread.users -= 1
        if not thread.users:
            thread.stop()


class Bridge:
    """One user's access to the process's engine, made by `acquire`. A context manager, and an asynchronous one.

    Everything but `engine` may be used from any thread, and the coroutines from any event loop. Operations on a closed
    bridge raise ClosedError; in a forked child process, operations on the parent's bridge raise UsageError. If a bridge
    is dropped without `close`, it is closed when Python collects it, with a ResourceWarning. Unfinished calls and held
    registrations keep a reference to the bridge.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._shared: dict[int, SharedRegistration] = {}
        self._numbers = itertools.count()
        self._closing: Promise[None] | None = None
        with _lock:
            thread.users += 1

    def _abandon(self) -> None:
        """Give back a bridge that was not returned to any caller."""
        self._closing = Promise()
        _release(self._thread)

    @property
    def engine(self) -> aiote.Engine:
        """The engine, for coroutines that run on the bridge. Do not use the engine on any other thread.

        A coroutine may be made on any thread: `bridge.call(bridge.engine.write(source, target))`. Raises ClosedError.
        """
        self.require_open()
        return self._thread.engine

    @property
    def closed(self) -> bool:
        """Whether this bridge is closed or being closed."""
        return self._closing is not None or self._thread.stopping

    # Coroutines.

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the engine's event loop and wait for its result, in any thread but the bridge's own.

        The coroutine is cancelled after `timeout` seconds, and when the wait is interrupted (Ctrl-C). This returns or
        raises only after the coroutine has ended, so its transfers have drained; the engine bounds that time
        (`drain_timeout`, then the loss of the peer). Raises what the coroutine raises, TimeoutError, ClosedError if the
        bridge is closed meanwhile, and UsageError on the bridge's own thread, which would wait for itself.
        """
        return self._call(work, timeout, waits=True).wait()

    def submit(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Start a coroutine on the engine's event loop; return its future, which is done when the coroutine has ended.

        `cancel()` of the future works from any thread; the future is done only after its transfers have drained.
        """
        call = self._call(work)
        call.start()
        return call

    def hold(self, context: Callable[[], AbstractAsyncContextManager[T]]) -> HeldContext[T]:
        """Enter an async context on the bridge, and wait until that is done; `close` of the result leaves it.

        context: makes the context, on the bridge's thread. An interruption of the wait cancels entering. Raises what
        entering raises, ClosedError if the bridge is closed, UsageError on the bridge's own thread.
        """
        return HeldContext(self, context)

    def prepare(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Return the call of a coroutine without starting it; its `start`, `wait` or `join` does."""
        return self._call(work)

    def write(self, source: aiote.Region, target: aiote.RemoteRegion, timeout: float | None = None) -> None:
        """Write all of `source` to all of `target` (same length) and wait, in any thread but the bridge's own.

        The calling thread posts the write and waits for it; if all goes well, the loop takes no part. `timeout`,
        interruptions and errors are those of `call`. When this raises, no NIC uses `source` any more. source:
        `Registration.region` or a part of it.
        """
        self._move(source, target, None, timeout, lambda: self.engine.write(source, target))

    def write_imm(self, source: aiote.Region | None, target: Any, imm: int, timeout: float | None = None) -> None:
        """Write as `write` does, and count 1 on immediate `imm` at the receiver; see `Engine.write_imm`."""
        self._move(source, target, imm, timeout, lambda: self.engine.write_imm(source, target, imm))

    def read(self, source: aiote.RemoteRegion, target: aiote.Region, timeout: float | None = None) -> None:
        """Read all of `source` into all of `target` (same length), as `write` writes."""
        self._move(target, source, None, timeout, lambda: self.engine.read(source, target), reads=True)

    def write_pages(
        self, source: aiote.Pages, target: aiote.Pages, imm: int | None = None, timeout: float | None = None
    ) -> None:
        """Write each page i of `source` to page i of `target`, as `write` does. imm: as for `Engine.write_pages`."""
        self._move(source, target, imm, timeout, lambda: self.engine.write_pages(source, target, imm))

    def read_pages(self, source: aiote.Pages, target: aiote.Pages, timeout: float | None = None) -> None:
        """Read each page i of `source` into page i of `target`, as `read` does."""
        self._move(target, source, None, timeout, lambda: self.engine.read_pages(source, target), reads=True)

    def _move(
        self,
        local: Any,
        remote: Any,
        imm: int | None,
        timeout: float | None,
        fallback: Callable[[], Coroutine[Any, Any, None]],
        *,
        reads: bool = False,
    ) -> None:
        self.require_open()
        self.require_elsewhere()
        ThreadTransfer(self, self._thread, fallback).run(local, remote, reads=reads, imm=imm, timeout=timeout)

    def attach(self, descriptor: bytes, **claim: Any) -> aiote.RemoteRegion:
        """Return the remote memory of a descriptor, as `Engine.attach` does, in any thread but the bridge's own."""

        async def attached() -> aiote.RemoteRegion:
            return self.engine.attach(descriptor, **claim)

        return self.call(attached())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's event loop and await its result, on any asyncio, uvloop or trio loop.

        If this is cancelled or interrupted (Ctrl-C under trio), the coroutine is cancelled; the interruption is raised
        after the coroutine has ended. Raises what the coroutine raises, and ClosedError if the bridge is closed
        meanwhile.
        """
        return await self._call(work).join()

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None, *, waits: bool = False) -> Call[T]:
        """Prepare a call. `waits`: this thread will wait for it, so it must not be the bridge's own."""
        if not inspect.iscoroutine(work):
            raise UsageError(
                f"expected a coroutine, which a call of an async function returns, got {type(work).__name__}"
            )
        try:
            self.require_open()
            if waits:
                self.require_elsewhere()
        except BaseException:
            work.close()
            raise
        return Call(self._thread, self, work, timeout)

    def require_elsewhere(self) -> None:
        """Raise UsageError on the bridge's own thread, which must not wait."""
        if self._thread.is_current:
            raise wait_refused()

    def require_open(self) -> None:
        """Raise ClosedError if this bridge is closed or being closed, and UsageError in a forked child process."""
        self._thread.require_parent()
        if self.closed:
            raise make_closed_error()

    # Memory.

    def register(self, memory: Any, access: Access = "read-write") -> Registration:
        """Register memory, or share its registration with the other holders of the same memory and access.

        memory: a contiguous torch tensor on the CPU, of any dtype; or an object that `Engine.register` takes, or one
        with `__array_interface__`. For a tensor, the whole storage is registered, once for all its views; the
        descriptor covers only the view. access: as for `Engine.register`. With "local", memory without a holder may
        stay registered, and alive, within `kept_bytes`. With any other access, peers may have its keys, so the
        registration ends with its last holder. Use this in any thread but the bridge's own. Raises what
        `Engine.register_async` raises.
        """
        call = self._call(self._register(MemorySource(memory, access)), waits=True)
        try:
            return call.wait()
        except BaseException:
            self._take_back(call)
            raise

    async def register_async(self, memory: Any, access: Access = "read-write") -> Registration:
        """Register memory as `register` does, on any event loop, including the bridge's own."""
        call = self._call(self._register(MemorySource(memory, access)))
        try:
            return await call.join()
        except BaseException:
            self._take_back(call)
            raise

    async def _register(self, source: MemorySource) -> Registration:
        held = await self._thread.memory.hold(source)
        number = next(self._numbers)
        self._shared[number] = held
        try:
            return Registration(self, number, held, held.region[source.bytes])
        except BaseException:
            await self._let_go(number)
            raise

    def _take_back(self, call: Call[Registration]) -> None:
        """Close a registration that completed although its caller was interrupted."""
        if call.done() and not call.cancelled() and call.exception() is None:
            Call(self._thread, self, self._let_go(call.result().number)).start()

    async def _let_go(self, number: int) -> None:
        held = self._shared.pop(number, None)
        if held is not None:
            await self._thread.memory.let_go(held)

    def require_held(self, number: int) -> None:
        """Raise ClosedError if a registration is closed, and UsageError in a forked child process."""
        self._thread.require_parent()
        if number not in self._shared:
            raise ClosedError("the registration is closed: register the memory again")

    def holds(self, number: int) -> bool:
        """Tell whether a registration is open."""
        return number in self._shared and not (self.closed or self._thread.inherited)

    def close_registration(self, number: int) -> None:
        """Close a registration and wait in this thread until that is done."""
        if self.holds(number):
            with suppress(ClosedError):
                self._call(self._let_go(number), waits=True).wait()

    async def aclose_registration(self, number: int) -> None:
        """Close a registration and await that, on any event loop."""
        if self.holds(number):
            with suppress(ClosedError):
                await self._call(self._let_go(number)).join()

    def drop_registration(self, number: int) -> None:
        """Begin to close a dropped registration, from any thread, and warn about it."""
        if not self.holds(number):
            return
        held = self._shared.pop(number, None)
        # A garbage collection may run anywhere, even where the bridge's locks are held, so the loop closes the
        # registration. The callback has no reference to the bridge, which may be dropped as well.
        if held is not None:
            with suppress(RuntimeError):
                self._thread.loop.call_soon_threadsafe(_let_go_dropped, self._thread, held)
            warnings.warn(
                f"a registration of {held.key[1]} bytes was garbage-collected without close(): call it, or use `with`",
                ResourceWarning,
                3,
            )

    def trim(self, nbytes: int = 0) -> None:
        """Close registrations without holders until those that remain without holders take at most `nbytes` bytes.

        Use this before memory that was registered as "local" is unmapped or resized; in any thread but the bridge's
        own.
        """
        self.call(self._thread.memory.trim(nbytes))

    # The end.

    def close(self) -> None:
        """Cancel the calls of this bridge, wait until they have ended, and close its registrations. Idempotent.

        The last bridge of the process closes the engine. An interruption (Ctrl-C) is raised after that is done. Use
        this in any thread but the bridge's own; in a forked child process it does nothing.
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
        """Close as `close` does, on any event loop but the bridge's own. A cancellation is raised after the close."""
        closing = self._end()
        if closing is not None:
            try:
                with suppress(ClosedError):
                    await closing.join()
            finally:
                if self._thread.stopping:
                    await until_done(self._thread.ended)

    def _end(self) -> Call[None] | None:
        """Return the call that closes this bridge, always the same one; None in a forked child process."""
        if self._thread.inherited:
            return None
        self.require_elsewhere()
        return self._closing_call()

    def _closing_call(self) -> Call[None]:
        with _lock:
            if self._closing is None:
                self._closing = Call(self._thread, None, self._close(), uncancellable=True)
            return cast("Call[None]", self._closing)

    def __del__(self) -> None:
        # If `__init__` was interrupted, there is nothing to close.
        if "_closing" not in vars(self) or self._thread.inherited:
            return
        if self._closing is None and not self._thread.stopping:
            warnings.warn(
                f"{self!r} was garbage-collected without close(): call it, or use `with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
        elif not isinstance(self._closing, Call) or self._closing.done():
            return
        # The bridge was dropped open, or its close was interrupted before it began. Only schedule the close on the
        # loop, because any thread may run this: one that holds a lock of this module, or the bridge's own.
        with suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(lambda: self._closing_call().start())

    async def _close(self) -> None:
        await self._thread.end_calls(self)
        for number in tuple(self._shared):
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
