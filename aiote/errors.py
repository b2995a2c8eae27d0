"""The errors that aiote raises, on one page.

Each type answers one question: whose fault was it, and what can be done.

* `UsageError`: the caller's. The arguments were wrong; nothing was started, nothing changed.
* `ClosedError`: the caller's or nobody's. The engine, region, counter or peer was closed, before or meanwhile.
* `FabricError`: the provider's. A call into libfabric or the kernel failed; `errno`, `operation` and `rail` say
which.
* `PeerError`: the other side's, or the network's; `reason` says what happened. `PeerLostError`: a peer that was
connected died, restarted, left or fell silent. `ConnectTimeoutError`: it did not answer in time. `PeerRefusedError`: it
answered, and wants no connection. `AuthenticationError`: one side has another cluster key, or none.
* `LeaseRevokedError`: the other side's right. It has taken back the memory that it had lent.
* `QueueFull`: nobody's. As many transfers as the config admits are unfinished; nothing was started.
* `TransferError`: one transfer's. It names the transfer and what became of its bytes; the cause is chained.

Cancellation is not an error and is never wrapped: `asyncio.CancelledError` and `trio.Cancelled` pass through as they
are. Errors can be pickled and copied: the copy has the same text and attributes, but no `transfer`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AioteError",
    "AuthenticationError",
    "ClosedError",
    "ConnectTimeoutError",
    "FabricError",
    "LeaseRevokedError",
    "PeerError",
    "PeerLostError",
    "PeerRefusedError",
    "QueueFull",
    "TransferError",
    "UsageError",
]


class AioteError(Exception):
    """Base of everything that aiote raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__.copy())


def _restored(kind: type[AioteError], args: tuple[Any, ...], attributes: dict[str, Any]) -> AioteError:
    """Make an error as it was pickled; its constructor may want other arguments than those that it keeps."""
    error = kind.__new__(kind)
    # Not by the constructor: it would put the text together once more. OSError reads its number and text here.
    super(AioteError, error).__init__(*args)
    error.args = args
    error.__dict__.update(attributes)
    error.__cause__ = attributes.get("cause")
    return error


class UsageError(AioteError, ValueError):
    """An argument was wrong: the message says what came, what was expected and what to do."""


class ClosedError(AioteError):
    """The object was closed before the call, or while it was waiting."""


class FabricError(AioteError, OSError):
    """A call into the provider failed.

    `errno` is the positive error number (libfabric's own numbers start at 256), `operation` the call that failed,
    `rail` the rail's name or an empty string where no rail was open yet.
    """

    def __init__(self, errno: int, message: str, *, operation: str, rail: str = "") -> None:
        super().__init__(errno, message)
        self.operation = operation
        self.rail = rail

    def __str__(self) -> str:
        where = f" on rail {self.rail}" if self.rail else ""
        return f"{self.operation}{where}: {self.strerror} (errno {self.errno})"


class PeerError(AioteError):
    """The peer refused, died, restarted or fell silent.

    `peer` is the peer's address as text, `reason` what happened, `operation` what was asked of it, or an empty
    string where that was to connect.
    """

    def __init__(self, peer: str, reason: str, *, operation: str = "") -> None:
        super().__init__(f"{operation}: peer {peer}: {reason}" if operation else f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason
        self.operation = operation


class PeerLostError(PeerError):
    """A peer that was connected died, restarted, said goodbye or fell silent."""


class ConnectTimeoutError(PeerError, TimeoutError):
    """No connection was made within `connect_timeout`."""


class PeerRefusedError(PeerError):
    """The peer answered, and no connection came of it: nobody listens there, or the two do not fit together."""


class AuthenticationError(PeerRefusedError):
    """The two engines do not have the same cluster key, or only one of them has one."""


class LeaseRevokedError(PeerError):
    """The peer has taken back the lease that a transfer went through, before it or meanwhile."""


class QueueFull(AioteError):
    """A `submit_` form met the limit of unfinished transfers toward one peer; `engine.room` waits for room."""


class TransferError(AioteError):
    """A transfer ended without completing.

    `transfer` is the transfer, `cause` what ended it (also chained as `__cause__`). Of its `total_bytes`
    `confirmed_bytes` have arrived, the others may have or not; `confirmed` tells whether it is certain that from now on
    no more of them can. The local buffer is out of use in every case.
    """

    def __init__(
        self,
        transfer: object,
        cause: BaseException | None,
        message: str,
        *,
        confirmed: bool = True,
        confirmed_bytes: int = 0,
        total_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.transfer = transfer
        self.cause = cause
        self.confirmed = confirmed
        self.confirmed_bytes = confirmed_bytes
        self.total_bytes = total_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        # A transfer is its engine's; its text is in the message.
        return _restored, (type(self), self.args, {**self.__dict__, "transfer": None})
