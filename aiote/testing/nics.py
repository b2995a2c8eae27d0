"""Models of simulated NICs.

A NIC is busy with one operation for `operation_us` and `bytes / gbps`, combined by `overlap`. The sent bytes are in the
other side's memory `latency_us` later, and the sender learns that `answer_us` after that. A random delay of at most
`jitter_us` is added to each of these times, independently; only jitter changes the order of events.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..rails.sim import SimNic

__all__ = ["CONNECTX7_400G", "EFA_100G", "EFA_200G", "EFA_400G", "MODELS", "NULL_NIC", "UNRULY", "NicModel"]

MAX_PIECES = MAX_SGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NicModel:
    """A kind of NIC; times in microseconds.

    name: for people. gbps: the payload that it carries (0: any amount at once); speed_gbps: its nominal speed.
    operation_us: its time for an operation without bytes, the inverse of its message rate. overlap: how well that time
    and the bytes' time overlap, time = (operation^x + bytes^x)^(1/x), 0: perfectly. queue: operations that an endpoint
    accepts before it refuses more; events: arrivals that are not yet polled before further ones wait. pieces: the most
    pieces that a payload is placed in, in any order. max_sge: the most SGEs of one operation (tcp and shm of libfabric
    accept 4, NICs 1). refusals: the share of posts that are refused temporarily at random. lingers: bytes that have
    left a NIC arrive even if its endpoint is closed meanwhile, as on a wire. forgets_us: an immediate is reported up to
    this time after it came, and never if the endpoint is closed meanwhile, because EFA drops the contents of its
    queues. packet_bytes: a NIC sends this number of bytes of each of its writes in turn, as RDMA NICs do with their
    queue pairs; 0: one write after the other. null: every operation ends at once, and no bytes are moved.
    """

    name: str
    gbps: float = 0.0
    speed_gbps: float = 0.0
    latency_us: float = 1.0
    answer_us: float = 1.0
    jitter_us: float = 0.0
    operation_us: float = 0.0
    overlap: float = 0.0
    queue: int = 256
    events: int = 256
    pieces: int = 1
    max_sge: int = 1
    refusals: float = 0.0
    lingers: bool = False
    forgets_us: float = 0.0
    packet_bytes: int = 0
    null: bool = False

    def __post_init__(self) -> None:
        """Check the numbers. Raises UsageError."""
        times = (self.gbps, self.latency_us, self.answer_us, self.jitter_us, self.operation_us, self.overlap)
        if min(times) < 0 or self.forgets_us < 0 or not 0 <= self.refusals < 1:
            raise UsageError("NicModel: expected times and a bandwidth from 0 on, and refusals from 0 to below 1")
        if not 1 <= self.pieces <= MAX_PIECES or self.queue < 1 or self.events < 1:
            raise UsageError(f"NicModel: expected a queue and events of at least 1, and pieces from 1 to {MAX_PIECES}")
        if not 0 <= self.packet_bytes < 1 << 32:
            raise UsageError(f"packet_bytes={self.packet_bytes}: expected 0 to {(1 << 32) - 1}")
        if not 1 <= self.max_sge <= MAX_SGE:
            raise UsageError(f"max_sge={self.max_sge}: expected 1 to {MAX_SGE}")

    def nic(self, index: int) -> SimNic:
        """Return the description of NIC `index` of a host for the simulated network."""
        numbers: dict[str, float] = {
            "latency": round(self.latency_us * 1000),
            "answer": round(self.answer_us * 1000),
            "jitter": round(self.jitter_us * 1000),
            "operation": round(self.operation_us * 1000),
            "per_byte": 8 / self.gbps if self.gbps else 0.0,
            "overlap": self.overlap,
            "depth": self.queue,
            "events": self.events,
            "pieces": self.pieces,
            "max_sge": self.max_sge,
            "refusals": round(self.refusals * 65536),
            "lingers": self.lingers,
            "forgets": round(self.forgets_us * 1000),
            "packet": self.packet_bytes,
            "null": self.null,
        }
        return SimNic(f"sim{index}", round((self.speed_gbps or self.gbps) * 1000), numbers)


UNRULY = NicModel(
    name="unruly", latency_us=2, answer_us=1, jitter_us=20, queue=64, events=64, pieces=4, refusals=1 / 128
)
"""Not modelled on a real NIC: it reorders everything, splits payloads, and has short queues. For tests."""

NULL_NIC = NicModel(name="null", latency_us=0, answer_us=0, queue=4096, null=True)
"""A NIC without costs: a request over it takes only aiote's own time. For benchmarks of posting."""

CONNECTX7_400G = NicModel(
    name="ConnectX-7 400G",
    gbps=376,
    speed_gbps=400,
    latency_us=8.4,
    answer_us=3.0,
    operation_us=0.088,
    overlap=2,
)

EFA_200G = NicModel(
    name="EFA 200G",
    gbps=182,
    speed_gbps=200,
    latency_us=24.5,
    answer_us=7.4,
    operation_us=0.948,
)

EFA_100G = NicModel(name="EFA 100G", gbps=91, speed_gbps=100, latency_us=24.5, answer_us=7.4, operation_us=0.948)

EFA_400G = NicModel(name="EFA 400G", gbps=364, speed_gbps=400, latency_us=24.5, answer_us=7.4, operation_us=0.474)

MODELS = {model.name: model for model in (UNRULY, CONNECTX7_400G, EFA_100G, EFA_200G, EFA_400G)}
