"""The errors that aiote raises, on one page.

Each type tells which side caused the error, and so how to handle it.

* `UsageError`: the caller. The arguments were wrong; the call started nothing and changed nothing.
* `ClosedError`: the caller, or neither side. The engine, region, counter or peer was closed, before the call or during
it.
* `FabricError`: the provider. A call into libfabric or the kernel failed; `errno`, `operation` and `rail` say
which.
* `PeerError`: the other side, or the network; `reason` says what happened. `PeerLostError`: a connected peer died,
restarted, left or fell silent. `ConnectTimeoutError`: the peer did not answer in time. `PeerRefusedError`: it
answered, but refused the connection. `AuthenticationError`: one side has another cluster key, or none.
* `LeaseRevokedError`: the other side, by right. It has revoked the lease of its memory.
* `QueueFull`: neither side. The config's limit of unfinished transfers is reached; the call started nothing.
* `TransferError`: one transfer ended. The error names the transfer and the state of its bytes; the cause is chained.

Cancellation is not an error and is never wrapped: `asyncio.CancelledError` and `trio.Cancelled` pass through
unchanged. Errors can be pickled and copied: the copy has the same text and attributes, but no `transfer`.
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
    """Base of every error that aiote raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__.copy())


def _restored(kind: type[AioteError], args: tuple[Any, ...], attributes: dict[str, Any]) -> AioteError:
    """Rebuild a pickled error, because its constructor may take other arguments than the stored ones."""
    error = kind.__new__(kind)
    # Do not call the constructor: it would compose the text again. OSError takes its number and text from the
    # arguments.
    super(AioteError, error).__init__(*args)
    error.args = args
    error.__dict__.update(attributes)
    error.__cause__ = attributes.get("cause")
    return error


class UsageError(AioteError, ValueError):
    """An argument was wrong: the message states the given value, the expected one and a remedy."""


class ClosedError(AioteError):
    """The object was closed before the call, or during its wait."""


class FabricError(AioteError, OSError):
    """A call into the provider failed.

    `errno` is the positive error number (libfabric's own numbers start at 256), `operation` the call that failed,
    `rail` the rail's name or an empty string if no rail was open yet.
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

    `peer` is the peer's address as text, `reason` what happened, `operation` the failed operation, or an empty string
    for connecting.
    """

    def __init__(self, peer: str, reason: str, *, operation: str = "") -> None:
        super().__init__(f"{operation}: peer {peer}: {reason}" if operation else f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason
        self.operation = operation


class PeerLostError(PeerError):
    """A connected peer died, restarted, closed the connection or fell silent."""


class ConnectTimeoutError(PeerError, TimeoutError):
    """No connection was made within `connect_timeout`."""


class PeerRefusedError(PeerError):
    """The peer's host answered without a connection: no engine listens there, or the two are incompatible."""


class AuthenticationError(PeerRefusedError):
    """The two engines do not have the same cluster key, or only one of them has one."""


class LeaseRevokedError(PeerError):
    """The peer revoked the lease that a transfer used, before the transfer or during it."""


class QueueFull(AioteError):
    """A `submit_` form met the limit of unfinished transfers toward one peer; `engine.room` waits for room."""


class TransferError(AioteError):
    """A transfer ended without completing.

    `transfer` is the transfer, `cause` the error that ended it (also chained as `__cause__`). Of its `total_bytes`,
    `confirmed_bytes` have arrived; the others may have arrived or not. `confirmed` tells whether it is certain that no
    more of them can arrive from now on. The local buffer is out of use in every case.
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
        # A transfer belongs to its engine and cannot be copied; the message contains its text.
        return _restored, (type(self), self.args, {**self.__dict__, "transfer": None})
