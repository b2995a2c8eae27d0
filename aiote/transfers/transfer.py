"""A submitted request: its state, its cancellation, and the error that it ends with.

This module must not know how connections are made or how the native core posts.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ..errors import AioteError, ClosedError, FabricError, LeaseRevokedError, TransferError, UsageError
from ..rails import Request, error_text

if TYPE_CHECKING:
    from ..rails import PeerLink
    from .owner import TransferOwner

__all__ = ["Launch", "Transfer"]

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
"""Codes that providers report at random for either cause: the peer has just died, or the owner withdrew the key."""
Launch = Callable[["Transfer", "PeerLink"], None]
"""Hands a transfer to the native core, over the link to its peer at that time."""
PERHAPS = "; the peer is gone, it has closed that memory, or its GPU failed"


class _Ending:
    """A waiter without a task: waking it calls a function, once."""

    def __init__(self, transfer: Transfer, callback: Callable[[Transfer], object]) -> None:
        self._transfer = transfer
        self._callback: Callable[[Transfer], object] | None = callback

    def done(self) -> bool:
        return self._callback is None

    def set_result(self, _: object) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            try:
                callback(self._transfer)
            except Exception:
                sys.excepthook(*sys.exc_info())


class Transfer(Request):
    """A transfer in flight: awaitable, and `cancel()`.

    Awaiting it ends when the transfer is over; by then no NIC uses its local buffer. Cancelling a task that awaits it
    cancels the transfer: requests that are not posted are dropped, posted requests drain, then the cancellation
    continues. Several tasks may await one transfer.
    """

    # A transfer that starts at once is made without `__init__` (`RequestStarter`); then it has only these values.
    peer: TransferOwner
    _text = ""
    _revoked = False
    _failure: AioteError | None = None
    _launch: Launch | None = None

    def __init__(self, peer: TransferOwner, description: str, launch: Launch, lease: int = 0) -> None:
        self.peer = peer
        self._text = description
        self._launch = launch
        self.lease = lease

    @property
    def description(self) -> str:
        """The operation in words, for error messages: the verb and its extent."""
        if self.pages:
            verb = "read_pages" if self.verb == "read" else "write_pages"
            return f"{verb} of {self.pages} pages of {self.total_bytes // self.pages} bytes"
        return self._text or f"{self.verb} of {self.total_bytes} bytes"

    def start(self, link: PeerLink) -> None:
        """Hand it to the native core, over this link; called once, when the peer is connected and has room."""
        launch, self._launch = self._launch, None
        assert launch is not None
        try:
            launch(self, link)
        except AioteError as error:
            self._end(error)
        except ValueError as error:
            self._end(UsageError(f"{self.description}: {error}"))
        except RuntimeError as error:
            self._end(ClosedError(f"{self.description}: {error}"))
        except BaseException as error:
            # No other code refers to the transfer now, so the tasks that await it must be told here.
            self._end(ClosedError(f"{self.description}: {error!r}"))
            raise

    def fail(self, error: AioteError) -> None:
        """End it before it is handed to the core."""
        if self._failure is None and not self.is_over:
            self._launch = None
            self._end(error)

    def _end(self, error: AioteError) -> None:
        self._failure = error
        self.refuse()
        self.peer.transfer_refused(self)

    def require_here(self) -> None:
        """Raise UsageError if the caller runs in another event loop than the engine's."""
        self.peer.require_here()

    def cancel(self) -> None:
        """Ask it to end: the engine posts no more of it, and posted requests drain. This returns before it is over."""
        self.require_here()
        self.give_up()

    def give_up(self) -> None:
        """Ask it to end. Unlike `cancel` this does not check the event loop, because an interrupted await calls it."""
        if self._launch is not None:
            self.fail(TransferError(self, None, f"{self.description}: cancelled before anything was posted"))
        elif not self.done():
            self.peer.cancel_transfer(self)

    def revoke(self) -> None:
        """End it because its lease was revoked."""
        if self._launch is not None:
            self.fail(self._lease_error("nothing was posted"))
        elif not self.done():
            self._revoked = True
            self.peer.cancel_transfer(self)

    def _lease_error(self, progress: str) -> TransferError:
        cause = LeaseRevokedError(
            self.peer.name, f"it has revoked lease {self.lease} of this memory; ask it for a new descriptor"
        )
        return self._error(cause, f"{self.description} failed, {progress}: {cause}")

    def exception(self) -> AioteError | None:
        """Return the error that it ended with; None if it succeeded or is not over."""
        if self._failure is not None or not self.is_over or (self.errno == 0 and not self.was_cancelled):
            return self._failure
        self._failure = self.explain()
        return self._failure

    def explain(self) -> TransferError:
        """Return the error that it ended with, which states how many of its bytes are confirmed."""
        reason = self.peer.reason
        progress = f"{self.confirmed_bytes} of {self.total_bytes} bytes confirmed"
        if self._revoked:
            return self._lease_error(progress)
        if self.was_cancelled:
            return self._error(None, f"{self.description}: cancelled, {progress}")
        rail = self.peer.rail_name(self.rail)
        where = f" on rail {rail}" if rail else ""
        behind = "" if self.order is None else self.order.failure
        if reason:
            cause: AioteError = self.peer.error()
        elif behind:
            cause = FabricError(self.errno, behind, operation=f"{self.description} behind a stream")
        elif self.broken:
            cause = FabricError(self.errno, self.broken, operation=self.description, rail=rail)
        else:
            text = error_text(self.errno) + (PERHAPS if self.errno in BROKEN else "")
            cause = FabricError(self.errno, text, operation=self.description, rail=rail)
            where += f" with peer {self.peer.name}"
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

    def add_done_callback(self, callback: Callable[[Transfer], object]) -> None:
        """Call `callback` with the transfer when that is over, in the engine's own callback; at once if it already is.

        The callback must not block. An exception that it raises is reported to `sys.excepthook` and goes no further.
        """
        self.require_here()
        ending = _Ending(self, callback)
        if self.done():
            ending.set_result(None)
        elif self.waiter is None:
            self.waiter = ending
        else:
            self.waiter = [*(self.waiter if type(self.waiter) is list else [self.waiter]), ending]

    def raise_failure(self) -> None:
        """Raise the error that it ended with, if there is one."""
        error = self.exception()
        if error is not None:
            raise error

    def interrupted(self, error: BaseException) -> Generator[Any, Any, None]:
        """Cancel and drain the transfer after an exception interrupted an await of it, then raise that exception."""
        self.give_up()
        if not self.done():
            yield from self.peer.drain(self).__await__()
        raise error

    def __repr__(self) -> str:
        state = "over" if self.done() else "waiting for its peer" if self._launch is not None else "under way"
        return f"<Transfer {self.description}, {state}>"
