"""Rails: opened NICs behind one contract, and the way from the layers above to the compiled code (`aiote_native`).

The layers above use `RailSet`, which holds the rails of one engine with their native core. They also handle some native
objects, whose names this module re-exports. Above it only `aiote.gpu` and `aiote.moe` import `aiote_native`, for
kernels of their own.
"""

from aiote_native.buffers import AcquiredBuffer, acquire, section
from aiote_native.clocks import NativeAlarm
from aiote_native.core import Core
from aiote_native.cuda.events import EventPool
from aiote_native.direct import Direct
from aiote_native.elements import check_elements
from aiote_native.flights import Flight
from aiote_native.forks import ForkError, after_fork
from aiote_native.heartbeats import Pulse, check_pulses
from aiote_native.layers import LayerMoves, LayerRun, OfferedLayers, PushedLayers, row_fault
from aiote_native.loops import OwnLoop
from aiote_native.peer_wakeups import guarded_socket, parse_address
from aiote_native.peers import PeerLink, deliver
from aiote_native.prepared import PreparedTargets, TargetRun
from aiote_native.provider import NativeEndpoint
from aiote_native.proxy import ArmedRun, arm
from aiote_native.requests import (
    READ,
    WRITE,
    LocalSlice,
    PageSet,
    RemoteSlice,
    Request,
    is_stream,
    try_submit,
    try_submit_message,
    try_submit_pages,
)
from aiote_native.rows import CountRow
from aiote_native.scatter import ScatterTargets, scatter
from aiote_native.sharedpages import SharedPages
from aiote_native.sources import SourceRange
from aiote_native.status import StatusError, error_text
from aiote_native.stream_orders import Order
from aiote_native.unfolding import unfolded_bytes
from aiote_native.waiters import NativeWaiter, run, wake
from aiote_native.waits import CounterHandle, CounterWait, ValueWatch, read_value
from aiote_native.workrequests import LocalMemory, Operation, PageIndex, RemoteMemory, Waitable

from .contract import Rail, RailInfo
from .library import library_summary
from .rail_set import MAY_ALL, MAY_READ, MAY_WRITE, POOL_BYTES, PendingChannel, RailSet, pools_fit
from .reach import Reach, device_name, open_driver, sharing_error
from .sim import sim_identity

__all__ = [
    "MAY_ALL",
    "MAY_READ",
    "MAY_WRITE",
    "POOL_BYTES",
    "READ",
    "WRITE",
    "AcquiredBuffer",
    "ArmedRun",
    "Core",
    "CountRow",
    "CounterHandle",
    "CounterWait",
    "Direct",
    "EventPool",
    "Flight",
    "ForkError",
    "LayerMoves",
    "LayerRun",
    "LocalMemory",
    "LocalSlice",
    "NativeAlarm",
    "NativeEndpoint",
    "NativeWaiter",
    "OfferedLayers",
    "Operation",
    "Order",
    "OwnLoop",
    "PageIndex",
    "PageSet",
    "PeerLink",
    "PendingChannel",
    "PreparedTargets",
    "Pulse",
    "PushedLayers",
    "Rail",
    "RailInfo",
    "RailSet",
    "Reach",
    "RemoteMemory",
    "RemoteSlice",
    "Request",
    "ScatterTargets",
    "SharedPages",
    "SourceRange",
    "StatusError",
    "TargetRun",
    "ValueWatch",
    "Waitable",
    "acquire",
    "after_fork",
    "arm",
    "check_elements",
    "check_pulses",
    "deliver",
    "device_name",
    "error_text",
    "guarded_socket",
    "is_stream",
    "library_summary",
    "open_driver",
    "parse_address",
    "pools_fit",
    "read_value",
    "row_fault",
    "run",
    "scatter",
    "section",
    "sharing_error",
    "sim_identity",
    "try_submit",
    "try_submit_message",
    "try_submit_pages",
    "unfolded_bytes",
    "wake",
]
