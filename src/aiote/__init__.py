"""aiote: an asyncio-native transfer engine for LLM systems.

`async with aiote.open_engine() as engine:` and then `await engine.write_imm(src, dst, imm)` on one side,
`await engine.counter(imm).wait(n)` on the other.
"""

from .config import EngineConfig, VerbsConfig
from .core.address import Address
from .counter import Counter, CounterRow
from .engine import Engine
from .errors import (
    AioteError,
    ClosedError,
    FabricError,
    LeaseRevokedError,
    PeerError,
    QueueFull,
    TransferError,
    UsageError,
)
from .group import PeerGroup, ScatterTarget
from .inbox import Message
from .leases import Lease
from .observe import EngineStatistics, Event
from .opening import open_engine
from .peer import Peer
from .rails import Flight, RailInfo
from .region import Pages, Region, RemoteRegion
from .transfer import Transfer

__version__ = "0.1.0"

__all__ = [
    "Address",
    "AioteError",
    "ClosedError",
    "Counter",
    "CounterRow",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "Event",
    "FabricError",
    "Flight",
    "Lease",
    "LeaseRevokedError",
    "Message",
    "Pages",
    "Peer",
    "PeerError",
    "PeerGroup",
    "QueueFull",
    "RailInfo",
    "Region",
    "RemoteRegion",
    "ScatterTarget",
    "Transfer",
    "TransferError",
    "UsageError",
    "VerbsConfig",
    "__version__",
    "open_engine",
]
