"""aiote: an asyncio-native transfer engine for LLM systems.

`async with aiote.open_engine() as engine:` and then `await engine.write_imm(src, dst, imm)` on one side,
`await engine.counter(imm).wait(n)` on the other.
"""

from typing import TYPE_CHECKING

# Imported first, so that in a tree without compiled modules the error says so, whatever else is missing there.
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
    ImmediateBlock,
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
    SharedMemory,
    Transfer,
)

__version__: str

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Look up `__version__` in the installed metadata on first use, because that takes longer than many imports."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        return metadata.version(__name__)


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
    "ImmediateBlock",
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
    "SharedMemory",
    "Transfer",
    "TransferError",
    "UsageError",
    "VerbsConfig",
    "__version__",
    "open_engine",
]
