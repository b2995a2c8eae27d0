"""Counters of immediates: open them, read them, wait on them.

This module owns the waits of one engine's tasks on those counts. It must not know how the NIC reports an immediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from ..aio import wake
from ..core.striping import check_immediate
from ..errors import ClosedError, UsageError
from ..rails import CounterHandle, CounterWait, CountRow
from .immediates import ImmediateBlock, ImmediateGrants

if TYPE_CHECKING:
    from types import TracebackType

    from ..aio import Waiter
    from ..core.address import Address
    from ..runtime import Runtime
    from .peer import Peer

__all__ = ["Counter", "CounterRow", "Counters"]


class Counted:
    """Hold counts and the tasks that wait on them until `close`; a context manager that closes itself."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiters: set[Waiter] = set()
        self._closed = False

    def close(self) -> None:
        """Close the counter or row: its waits end with ClosedError, and counts that were not consumed are dropped.

        Idempotent.
        """
        if not self._runtime.inherited:
            self._runtime.loop.require_here()
        if self._closed:
            return
        self._closed = True
        self._wake_all()
        self._let_go()

    def _wake_all(self) -> None:
        for waiter in tuple(self._waiters):
            wake(waiter)

    def _let_go(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Counter(Counted):
    """The count of one immediate. Made by `Engine.counter`; a context manager that frees the immediate.

    It includes the writes that arrived before the counter was made. Several counters of one immediate share one count.
    Leaving the context (or `close`) drops the counts that were not consumed, unless another counter of the same
    immediate is open.
    """

    def __init__(self, runtime: Runtime, handle: CounterHandle) -> None:
        super().__init__(runtime)
        self._handle = handle

    @property
    def imm(self) -> int:
        """The immediate's value, 28 bits."""
        return self._handle.imm

    @property
    def value(self) -> int:
        """The number of whole writes that arrived and were not consumed yet."""
        return self._handle.value

    async def wait(self, n: int = 1) -> None:
        """Wait until n writes have arrived, and consume them.

        Several waits on one immediate are served in order. A cancelled wait consumes nothing. Raises UsageError if n is
        not an integer from 0 to 2**40, ClosedError if the counter or the engine is already closed or is closed during
        the wait.
        """
        await self.wait_unless(n, None)

    async def wait_unless(self, n: int, lost: Callable[[], BaseException | None] | None) -> None:
        """Wait as `wait` does, but call `lost` first and after each `wake_waits`; raise the error if it returns one."""
        waiting = self._handle.begin(n) or self._handle.begin(self._check_count(n), checked=True)
        if waiting is None:
            raise UsageError(f"wait({n!r}): the counter of immediate {self.imm:#x} takes no waits")
        if waiting.satisfied:
            waiting.take()
            return
        times = self._runtime.wait_times
        began = times.begin() if times is not None else 0
        while True:
            error = lost() if lost is not None else None
            if error is not None:
                self._withdraw(waiting)
                raise error
            waiter = waiting.waiter = self._runtime.loop.waiter()
            self._waiters.add(waiter)
            try:
                await waiter
            except BaseException:
                self._withdraw(waiting)
                raise
            finally:
                self._waiters.discard(waiter)
            if waiting.satisfied:
                break
            if lost is None or self._closed or self._runtime.closed:
                # The counter or the engine was closed during the wait.
                self._withdraw(waiting)
                self._require_open()
                return
        if began and times is not None:
            times.end("counter", began)
        waiting.take()

    def wake_waits(self) -> None:
        """Wake the waits of `wait_unless`, so that each calls its `lost` again."""
        self._wake_all()

    def release(self) -> None:
        """Close this handle of the count without dropping the counts that were not consumed."""
        self._handle.close()

    def _check_count(self, n: object) -> int:
        """Return n as a plain int. Raises UsageError or ClosedError if no wait for it can be queued."""
        if not isinstance(n, int) or not 0 <= n <= 1 << 40:
            raise UsageError(f"wait({n!r}): expected the number of writes to wait for, an integer from 0 to 2**40")
        self._require_open()
        return int(n)

    def _withdraw(self, waiting: CounterWait) -> None:
        """End a wait, and make the driver look soon: the counts that it leaves may satisfy the next queued wait."""
        waiting.cancel()
        self._runtime.kick()

    def _require_open(self) -> None:
        self._runtime.require_open()
        if self._closed:
            raise ClosedError(f"the counter of immediate {self.imm:#x} is closed")

    def __aiter__(self) -> Counter:
        """Iterate over arrivals: each step waits for one write, consumes it and yields the immediate's value."""
        return self

    async def __anext__(self) -> int:
        await self.wait(1)
        return self.imm

    def _let_go(self) -> None:
        self._handle.close(discard=True)

    def __repr__(self) -> str:
        return f"<Counter {self.imm:#x}, {'closed' if self._closed else self.value}>"


class CounterRow(Counted):
    """The counts of consecutive immediates that are waited for together, each with its own number of writes.

    Made by `Engine.counters`. A context manager that frees the immediates and drops the counts that were not consumed.
    One wake-up covers everything that arrived at once, so a row costs little more than one counter. The engine treats
    the row as awaited until all writes have arrived or the row is closed.
    """

    def __init__(self, runtime: Runtime, row: CountRow) -> None:
        super().__init__(runtime)
        self._row = row

    def __len__(self) -> int:
        return len(self._row)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of immediates that have all their counts, and of counts on the others. Each arrival changes it."""
        return self._row.progress()

    async def wait(self, count: int) -> int:
        """Wait until the first `count` immediates have all their counts; return how many from the first on have them.

        Several tasks may wait. Cancelling loses nothing. Raises UsageError if `count` exceeds the length of the row,
        ClosedError if the row or the engine is already closed or is closed during the wait.
        """
        self._runtime.loop.require_here()
        if not 0 <= count <= len(self._row):
            raise UsageError(f"wait({count!r}): the row has {len(self._row)} immediates")
        if (reached := self._row.advance()) >= count:
            return reached
        times = self._runtime.wait_times
        began = times.begin() if times is not None else 0
        while reached < count:
            waiting = self._row.latest(count)
            if self._closed or waiting is None:
                self._runtime.require_open()
                raise ClosedError("the row of counters is closed")
            await self._wait_for_counts(waiting)
            reached = self._row.advance()
        if began and times is not None:
            times.end("row", began)
        return reached

    async def _wait_for_counts(self, waiting: CounterWait) -> None:
        """Sleep until this wait of the native core is over or the row is closed."""
        waiter = self._runtime.loop.waiter()
        others = waiting.waiter or []
        waiting.waiter = [*others, waiter]
        self._waiters.add(waiter)
        try:
            await waiter
        except BaseException:
            if waiting.waiter is not None:
                waiting.waiter = [other for other in waiting.waiter if other is not waiter]
            raise
        finally:
            self._waiters.discard(waiter)

    def _let_go(self) -> None:
        self._row.close()
        self._runtime.kick()

    def __repr__(self) -> str:
        return f"<CounterRow of {len(self)}, {'closed' if self._closed else self._row.reached}>"


class Counters:
    """The counters of one engine, and the immediates that it grants for them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._grants = ImmediateGrants(runtime)

    def open(self, imm: int | None = None) -> Counter:
        """Open the counter of an immediate, or of one that the engine grants; see `Engine.counter`."""
        self.runtime.require_open()
        value = self._grants.single() if imm is None else check_immediate(imm)
        try:
            return Counter(self.runtime, self.runtime.core.counter(value))
        except OverflowError as error:
            raise _too_many(error) from None

    def open_row(self, first: int, needs: Sequence[int]) -> CounterRow:
        """Open the counters of consecutive immediates; see `Engine.counters`."""
        self.runtime.require_open()
        value = check_immediate(first)
        try:
            return CounterRow(self.runtime, CountRow(self.runtime.core, value, needs))
        except OverflowError as error:
            raise _too_many(error) from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"counters: {error}") from None

    def reserve(self, count: int, sources: Iterable[Peer | Address | str] | None) -> ImmediateBlock:
        """Reserve consecutive immediates; see `Engine.reserve_immediates`."""
        self.runtime.require_open()
        return self._grants.block(count, sources)


def _too_many(error: OverflowError) -> UsageError:
    return UsageError(f"counter: {error}; close some, or raise config.max_counters")
