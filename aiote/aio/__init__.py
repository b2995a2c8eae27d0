"""The only layer that knows which event loop runs: asyncio (with uvloop, too) or trio.

The layers above call `current_loop()` and use waiters, tasks and descriptors. It must not know engines.
"""

from anyio.abc import ByteStream

from .control_stream import ControlConnection, ControlListener, PendingConnection, dial
from .driver import Driver
from .handover import Handover, close_aside, hand_over
from .loops import EventLoop, LoopTask, Waiter, current_loop, report
from .offload import ThreadCall, in_thread
from .tasks import TaskScope, plain_errors, report_callback_error, run_background_tasks, run_shielded
from .waiting import Backoff, Condition, TurnQueue, finish, poll_until, run, run_within, sleep, wait_shielded, wake
from .window import TransferWindow

__all__ = [
    "Backoff",
    "ByteStream",
    "Condition",
    "ControlConnection",
    "ControlListener",
    "Driver",
    "EventLoop",
    "Handover",
    "LoopTask",
    "PendingConnection",
    "TaskScope",
    "ThreadCall",
    "TransferWindow",
    "TurnQueue",
    "Waiter",
    "close_aside",
    "current_loop",
    "dial",
    "finish",
    "hand_over",
    "in_thread",
    "plain_errors",
    "poll_until",
    "report",
    "report_callback_error",
    "run",
    "run_background_tasks",
    "run_shielded",
    "run_within",
    "sleep",
    "wait_shielded",
    "wake",
]
