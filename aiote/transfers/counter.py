"""Counts of immediates, awaited."""

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
    """What is counted until it is closed; a context manager that closes it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiters: set[Waiter] = set()
        self._closed = False

    def close(self) -> None:
        """Free what is counted: waits end with ClosedError, what was not consumed is dropped. Idempotent."""
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

    Counts that arrived before the counter was made are there; several counters of one immediate share one count.
    Leaving the context (or `close`) drops what was counted and not consumed, when no other counter of the same
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
        """Whole writes that arrived and were not consumed."""
        return self._handle.value

    async def wait(self, n: int = 1) -> None:
        """Wait until n writes have arrived, and consume them.

        Several waits on one immediate are served in order. A cancelled wait consumes nothing. Raises
        UsageError for n that is not an integer from 0 to 2**40, ClosedError when the counter or the engine is
        closed before or meanwhile.
        """
        await self.wait_unless(n, None)

    async def wait_unless(self, n: int, lost: Callable[[], BaseException | None] | None) -> None:
        """Wait as `wait` does, or until `wake_waits` is called and `lost` returns an error, which is raised then."""
        waiting = self._handle.begin(n) or self._handle.begin(self._checked(n), True)
        if waiting is None:
            raise UsageError(f"wait({n!r}): the counter of immediate {self.imm:#x} takes no waits")
        while not waiting.satisfied:
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
            if not waiting.satisfied and (lost is None or self._closed or self._runtime.closed):
                # The counter or the engine was closed under it.
                self._withdraw(waiting)
                self._require_open()
                break
        waiting.take()

    def wake_waits(self) -> None:
        """Have the waits that may be given up look again whether they are."""
        self._wake_all()

    def release(self) -> None:
        """Let go of the count without dropping what it has."""
        self._handle.close()

    def _checked(self, n: object) -> int:
        """Return the number as a plain one. Raises what keeps a wait for it from being queued."""
        if not isinstance(n, int) or not 0 <= n <= 1 << 40:
            raise UsageError(f"wait({n!r}): expected the number of writes to wait for, an integer from 0 to 2**40")
        self._require_open()
        return int(n)

    def _withdraw(self, waiting: CounterWait) -> None:
        """End a wait, and look soon: what it leaves may be enough for the next in the queue."""
        waiting.cancel()
        self._runtime.kick()

    def _require_open(self) -> None:
        self._runtime.require_open()
        if self._closed:
            raise ClosedError(f"the counter of immediate {self.imm:#x} is closed")

    def __aiter__(self) -> Counter:
        """Iterate over arrivals: each step waits for one write, consumes it and gives the immediate's value."""
        return self

    async def __anext__(self) -> int:
        await self.wait(1)
        return self.imm

    def _let_go(self) -> None:
        self._handle.close(discard=True)

    def __repr__(self) -> str:
        return f"<Counter {self.imm:#x}, {'closed' if self._closed else self.value}>"


class CounterRow(Counted):
    """The counts of immediates in a row, so many of each, waited for together. Made by `Engine.counters`.

    A context manager that frees the immediates; what was counted on them and not consumed is dropped then. Wake-ups are
    for all that came at once, so a row costs little more than one counter. Until all have come, or it is closed, the
    engine takes it for awaited.
    """

    def __init__(self, runtime: Runtime, row: CountRow) -> None:
        super().__init__(runtime)
        self._row = row

    def __len__(self) -> int:
        return len(self._row)

    @property
    def progress(self) -> tuple[int, int]:
        """How many immediates have all their counts, and how many counts others have: it changes with all that
        comes.
        """
        return self._row.progress()

    async def wait(self, count: int) -> int:
        """Wait until the first `count` immediates have all their counts, and return how many of the first ones have.

        Several tasks may wait. Cancelling loses nothing. Raises ClosedError when the row or the engine is closed
        before or meanwhile, UsageError for more than there are.
        """
        self._runtime.loop.require_here()
        if not 0 <= count <= len(self._row):
            raise UsageError(f"wait({count!r}): the row has {len(self._row)} immediates")
        while (reached := self._row.advance()) < count:
            waiting = self._row.latest(count)
            if self._closed or waiting is None:
                self._runtime.require_open()
                raise ClosedError("the row of counters is closed")
            await self._rest(waiting)
        return reached

    async def _rest(self, waiting: CounterWait) -> None:
        """Sleep until a wait is over, or the row is closed."""
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
    """The counts of immediates of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._grants = ImmediateGrants(runtime)

    def open(self, imm: int | None = None) -> Counter:
        """Open the counter of an immediate, or of one that nobody uses; see `Engine.counter`."""
        self.runtime.require_open()
        value = self._grants.single() if imm is None else check_immediate(imm)
        try:
            return Counter(self.runtime, self.runtime.core.counter(value))
        except OverflowError as error:
            raise _too_many(error) from None

    def open_row(self, first: int, needs: Sequence[int]) -> CounterRow:
        """Open the counters of immediates in a row; see `Engine.counters`."""
        self.runtime.require_open()
        value = check_immediate(first)
        for need in needs:
            if not isinstance(need, int) or not 0 <= need <= 1 << 40:
                raise UsageError(
                    f"counters: {need!r}: expected numbers of writes to wait for, integers from 0 to 2**40"
                )
        try:
            return CounterRow(self.runtime, CountRow(self.runtime.core, value, needs))
        except OverflowError as error:
            raise _too_many(error) from None
        except ValueError as error:
            raise UsageError(f"counters: {error}") from None

    def reserve(self, count: int, sources: Iterable[Peer | Address | str] | None) -> ImmediateBlock:
        """Reserve immediates in a row; see `Engine.reserve_immediates`."""
        self.runtime.require_open()
        return self._grants.block(count, sources)


def _too_many(error: OverflowError) -> UsageError:
    return UsageError(f"counter: {error}; close some, or raise config.max_counters")
