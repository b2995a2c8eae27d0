"""Rails: opened NICs behind one contract, and the way from the layers above to the compiled code (`aiote_native`).

The layers above use `RailSet`, which holds the rails of one engine with their native core, and some native objects,
whose names this module re-exports. Above it only `aiote.gpu` and `aiote.moe` import `aiote_native`, for kernels of
their own. It must not know event loops.
"""

from aiote_native.channels.heartbeats import BeatCounts, ControlSocket, Pulse, check_pulses
from aiote_native.channels.peers import PeerLink, deliver
from aiote_native.counters.waits import CounterHandle, CounterWait, CountRow, SourceRange, ValueWatch, read_value
from aiote_native.cuda.driver import EventPool
from aiote_native.engine.core import Core
from aiote_native.engine.provider import NativeEndpoint
from aiote_native.requests.operations import (
    Flight,
    LocalMemory,
    NativeWaiter,
    Operation,
    Order,
    PageIndex,
    RemoteMemory,
    Waitable,
    WaiterQueue,
    run,
    wake,
)
from aiote_native.requests.pages import PageNumbers, RequestPages, RequestPlan, page_fault, piece_offsets
from aiote_native.requests.prepared import (
    LayerMoves,
    LayerRun,
    OfferedLayers,
    PreparedTargets,
    PushedLayers,
    TargetRun,
)
from aiote_native.requests.request import (
    READ,
    WRITE,
    LocalSlice,
    PageSet,
    RemoteSlice,
    Request,
    RequestStarter,
    ScatterTargets,
    is_stream,
    scatter,
)
from aiote_native.requests.threaded import ArmedRun, Direct, arm
from aiote_native.system.base import ForkError, NativeAlarm, OwnLoop, StatusError, after_fork, error_text
from aiote_native.system.buffers import AcquiredBuffer, acquire, check_elements, section, unfolded_bytes
from aiote_native.system.wakeups import SharedPages, guarded_socket, parse_address

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
    "BeatCounts",
    "ControlSocket",
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
    "PageNumbers",
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
    "RequestPages",
    "RequestPlan",
    "RequestStarter",
    "ScatterTargets",
    "SharedPages",
    "SourceRange",
    "StatusError",
    "TargetRun",
    "ValueWatch",
    "Waitable",
    "WaiterQueue",
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
    "page_fault",
    "parse_address",
    "piece_offsets",
    "pools_fit",
    "read_value",
    "run",
    "scatter",
    "section",
    "sharing_error",
    "sim_identity",
    "unfolded_bytes",
    "wake",
]
