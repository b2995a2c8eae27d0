"""How calls fail, on one page.

Each type says whether the method ran; `CallError.ran` says it to a program: "no", "perhaps" or "yes".

* `BusyError`: the server has no room for one more call. It did not run.
* `DrainingError`: the server takes no new calls, for it is about to end. It did not run.
* `NotServedError`: nobody at that address serves this method. It did not run.
* `InvalidCallError`: the server says that the arguments do not fit the method. It did not run.
* `CallLostError`: the peer was lost before it had answered. It did not run where no request had left, else perhaps.
* `RemoteError`: the method raised. It ran, and ended with this.
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
    """A call ended without a result. `method` is what was called, `ran` whether it ran: "no", "perhaps" or "yes"."""

    ran: Ran = "no"

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method = method
        self.reason = reason


class BusyError(CallError):
    """The server runs as many calls as it may, and as many wait; or there is no room for the call's arrays."""


class DrainingError(CallError):
    """The server ends once its calls have: it takes no new ones."""


class NotServedError(CallError):
    """The peer serves no such method, or serves nothing."""


class InvalidCallError(CallError):
    """The server says that the arguments do not fit the method as it has it."""


class CallLostError(CallError):
    """The peer, or its server, was gone before it had answered; `ran` is "no" where no request had left, else
    "perhaps".
    """

    def __init__(self, method: str, reason: str, ran: Ran) -> None:
        super().__init__(method, f"{reason}; the method {'did not run' if ran == 'no' else 'has perhaps run'}")
        self.ran = ran


class RemoteError(CallError):
    """The method raised: `kind` is the name of the exception's type, `message` its text. Nothing else of it travels."""

    ran = "yes"

    def __init__(self, method: str, kind: str, message: str) -> None:
        super().__init__(method, f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message
