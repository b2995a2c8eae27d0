"""The errors of calls.

Each type says whether the method ran; a program reads this from `CallError.ran`: "no", "perhaps" or "yes".

* `BusyError`: the server has no room for one more call. The method did not run.
* `DrainingError`: the server takes no new calls because it is about to end. The method did not run.
* `NotServedError`: the engine at that address does not serve this method. The method did not run.
* `InvalidCallError`: the server says that the arguments do not fit the method. The method did not run.
* `CallLostError`: the peer was lost before it answered. The method did not run if no request had left; otherwise it
  has perhaps run.
* `RemoteError`: the method ran and raised an exception.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..errors import AioteError

__all__ = [
    "BusyError",
    "CallError",
    "CallLostError",
    "DrainingError",
    "InvalidCallError",
    "NotServedError",
    "Ran",
    "RemoteError",
]

Ran: TypeAlias = Literal["no", "perhaps", "yes"]


class CallError(AioteError):
    """A call ended without a result. `method` is its name; `ran` tells whether it ran: "no", "perhaps" or "yes"."""

    ran: Ran = "no"

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method = method
        self.reason = reason


class BusyError(CallError):
    """The server's running calls and its queue are at their limits, or there is no memory for the call's arrays."""


class DrainingError(CallError):
    """The server takes no new calls because it ends when its present calls have ended."""


class NotServedError(CallError):
    """The peer does not serve this method, or serves no methods at all."""


class InvalidCallError(CallError):
    """The server says that the arguments do not fit its version of the method."""


class CallLostError(CallError):
    """The peer was lost, or its server ended, before it answered.

    `ran` is "no" if no request had left, otherwise "perhaps".
    """

    def __init__(self, method: str, reason: str, ran: Ran) -> None:
        super().__init__(method, f"{reason}; the method {'did not run' if ran == 'no' else 'has perhaps run'}")
        self.ran = ran


class RemoteError(CallError):
    """The method raised an exception. Only the name of its type (`kind`) and its text (`message`) travel."""

    ran = "yes"

    def __init__(self, method: str, kind: str, message: str) -> None:
        super().__init__(method, f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message
