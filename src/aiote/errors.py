"""The errors that aiote raises, on one page.

Each type answers one question: whose fault was it, and what can be done.

* `UsageError`: the caller's. The arguments were wrong; nothing was started, nothing changed.
* `ClosedError`: the caller's or nobody's. The engine, region, counter or peer was closed, before or meanwhile.
* `FabricError`: the provider's. A call into libfabric or the kernel failed; `errno`, `operation` and `rail` say
which.
* `PeerError`: the other side's, or the network's. The peer refused, died, restarted or fell silent; `reason` says
which.
* `LeaseRevokedError`: the other side's right. It has taken back the memory that it had lent.
* `QueueFull`: nobody's. As many transfers as the config admits are unfinished; nothing was started.
* `TransferError`: one transfer's. It names the transfer and what became of its bytes; the cause is chained.

Cancellation is not an error and is never wrapped: `asyncio.CancelledError` and `trio.Cancelled` pass through as they
are.
"""

from __future__ import annotations

__all__ = [
    "AioteError",
    "ClosedError",
    "FabricError",
    "LeaseRevokedError",
    "PeerError",
    "QueueFull",
    "TransferError",
    "UsageError",
]


class AioteError(Exception):
    """Base of everything that aiote raises on purpose."""


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
