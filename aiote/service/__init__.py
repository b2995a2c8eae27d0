"""Services of coroutines: calls between engines, with deadlines, remote cancellation and one-sided arrays.

See docs/services.md. It must not know the services that are built on it.
"""

from .callers import Callers, CallersLike, ForeignCallerError
from .client import client
from .definition import DirectCall, Out, Service, method
from .endpoint import Limits
from .errors import (
    BusyError,
    CallError,
    CallLostError,
    DrainingError,
    InvalidCallError,
    NotServedError,
    RemoteError,
)
from .interceptors import CallInfo, Interceptor, intercept_all
from .members import MemberSource
from .running import current_call
from .server import Health, HealthStatus, Server, serve
from .stream import Stream

__all__ = [
    "BusyError",
    "CallError",
    "CallInfo",
    "CallLostError",
    "Callers",
    "CallersLike",
    "DirectCall",
    "DrainingError",
    "ForeignCallerError",
    "Health",
    "HealthStatus",
    "Interceptor",
    "InvalidCallError",
    "Limits",
    "MemberSource",
    "NotServedError",
    "Out",
    "RemoteError",
    "Server",
    "Service",
    "Stream",
    "client",
    "current_call",
    "intercept_all",
    "method",
    "serve",
]
