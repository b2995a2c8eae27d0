"""aiote: an asyncio-native transfer engine for LLM systems.

`async with aiote.open_engine() as engine:` and then `await engine.write_imm(src, dst, imm)` on one side,
`await engine.counter(imm).wait(n)` on the other.
"""

# First: where the sources are not compiled this says so, whatever else is missing there.
from .rails import Flight, RailInfo

# isort: split
from .config import EngineConfig, VerbsConfig
from .core.address import Address
from .engine import Engine, open_engine
from .errors import (
    AioteError,
    AuthenticationError,
    ClosedError,
    ConnectTimeoutError,
    FabricError,
    LeaseRevokedError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    QueueFull,
    TransferError,
    UsageError,
)
from .observe import EngineStatistics, Event
from .transfers import (
    Counter,
    CounterRow,
    Lease,
    Message,
    Pages,
    Peer,
    PeerGroup,
    PreparedPages,
    PreparedScatter,
    Region,
    RemoteRegion,
    ScatterTarget,
    Transfer,
)

__version__ = "0.1.0"

__all__ = [
    "Address",
    "AioteError",
    "AuthenticationError",
    "ClosedError",
    "ConnectTimeoutError",
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
    "PeerLostError",
    "PeerRefusedError",
    "PreparedPages",
    "PreparedScatter",
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
