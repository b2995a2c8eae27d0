"""A submitted request."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .aio import wake
from .errors import AioteError, ClosedError, FabricError, LeaseRevokedError, TransferError, UsageError
from .rails import Operation, error_text

if TYPE_CHECKING:
    from .aio import EventLoop, Waiter
    from .peer import Peer

__all__ = ["Transfer"]

BROKEN = frozenset(
    {
        errno.ECANCELED,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EIO,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
"""What providers report, at random, for a peer that died a moment ago and for a key that its owner withdrew."""
PERHAPS = "; the peer is gone, or it has closed that memory"


class Transfer(Operation):
    """A transfer under way: awaitable, and `cancel()`.

    Awaiting it ends when the transfer is over, by then no NIC uses its local buffer. Cancelling a task that
    awaits it cancels the transfer: what is not posted is dropped, what is posted drains, then the cancellation
    goes on. Several tasks may await one.
    """

    __slots__ = ("_failure", "_launch", "_loop", "_revoked", "_waiters", "description", "lease", "peer")

    def __init__(
        self, loop: EventLoop, peer: Peer, description: str, launch: Callable[[Transfer], None], lease: int = 0
    ) -> None:
        self.peer = peer
        self.description = description
        self.lease = lease
        self._revoked = False
        self._loop = loop
        self._launch: Callable[[Transfer], None] | None = launch
        self._failure: AioteError | None = None
        self._waiters: list[Waiter] | None = None
        self.on_over = self._over

    def start(self) -> None:
        """Hand it to the native core; called once, when the peer is connected and has room."""
        launch, self._launch = self._launch, None
        assert launch is not None
        try:
            launch(self)
        except AioteError as error:
            self._end(error, started=True)
        except ValueError as error:
            self._end(UsageError(f"{self.description}: {error}"), started=True)
        except RuntimeError as error:
            self._end(ClosedError(f"{self.description}: {error}"), started=True)

    def fail(self, error: AioteError) -> None:
        """End it before it was handed to the core."""
        if self._failure is None and not self.is_over:
            self._launch = None
            self._end(error, started=False)

    def _end(self, error: AioteError, *, started: bool) -> None:
        self._failure = error
        self.peer.transfer_over(self, started=started)
        self._wake_waiters()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self.is_over or self._failure is not None

    def cancel(self) -> None:
        """Ask it to end: nothing more is posted, and what was posted drains. It is not over yet when this returns."""
        if self._launch is not None:
            self.fail(TransferError(self, None, f"{self.description}: cancelled before anything was posted"))
        elif not self.done():
            self.peer.cancel_transfer(self)

    def revoke(self) -> None:
        """End it because its lease was taken back."""
        if self._launch is not None:
            self.fail(self._lease_error("nothing was posted"))
        elif not self.done():
            self._revoked = True
            self.peer.cancel_transfer(self)

    def _lease_error(self, progress: str) -> TransferError:
        cause = LeaseRevokedError(
            str(self.peer.address), f"it has revoked lease {self.lease}, which this memory was of"
        )
        return self._error(cause, f"{self.description} failed, {progress}: {cause}")

    def exception(self) -> AioteError | None:
        """Return the error that it ended with, None when it went well or is not over."""
        if self._failure is not None or not self.is_over or (self.errno == 0 and not self.was_cancelled):
            return self._failure
        self._failure = self.explain()
        return self._failure

    def explain(self) -> TransferError:
        """Say what became of it and of its bytes."""
        reason = self.peer.reason
        progress = f"{self.confirmed_bytes} of {self.total_bytes} bytes confirmed"
        if self._revoked:
            return self._lease_error(progress)
        if self.was_cancelled:
            return self._error(None, f"{self.description}: cancelled, {progress}")
        rail = self.peer.rail_name(self.rail)
        where = f" on rail {rail}" if rail else ""
        if reason:
            cause: AioteError = self.peer.error()
        else:
            text = error_text(self.errno) + (PERHAPS if self.errno in BROKEN else "")
            cause = FabricError(self.errno, text, operation=self.description, rail=rail)
            where += f" with peer {self.peer.address}"
        return self._error(cause, f"{self.description}{where} failed, {progress}: {cause}")

    def _error(self, cause: AioteError | None, text: str) -> TransferError:
        error = TransferError(
            self,
            cause,
            text,
            confirmed=self.peer.confirmed,
            confirmed_bytes=self.confirmed_bytes,
            total_bytes=self.total_bytes,
        )
        error.__cause__ = cause
        return error

    def _over(self, _item: object) -> None:
        self.peer.transfer_over(self, started=True)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            wake(waiter)

    def __await__(self) -> Generator[Any, Any, None]:
        if not self.done():
            waiter = self._loop.waiter()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            try:
                yield from waiter.__await__()
            except GeneratorExit:
                # The coroutine is being dropped, not cancelled: nothing can be awaited any more.
                self.cancel()
                raise
            except BaseException:
                self.cancel()
                if not self.done():
                    yield from self.peer.drain(self).__await__()
                raise
        if (self.errno or self._failure is not None) and (error := self.exception()) is not None:
            raise error

    def __repr__(self) -> str:
        state = "over" if self.done() else "waiting for its peer" if self._launch is not None else "under way"
        return f"<Transfer {self.description}, {state}>"
