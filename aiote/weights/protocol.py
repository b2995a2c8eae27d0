"""The messages and services (`aiote.service`) that the controller, sources and targets use to talk to each other.

For each target an update is one call with a stream of steps, from the lease of the target's memory to the commit. If
the stream ends in any other way than by the commit, for example because the controller died, the target revokes its
leases. So sources cannot write late, and no target waits for a peer that is gone.

    controller              target                    source
        | update(order) ------> |                        |
        | <------ Step "lent"   |                        |
        | send(update, destinations) ------------------> |
        |                       | <=== writes, a commit  |
        | <------ Step "counted"|                        |
        | commit(update) -----> |                        |
        | <------ Step "committed", the stream's end     |
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import aiote

from .. import service
from .layout import Layout
from .rank_memory import Bytes, RankArrays

__all__ = [
    "Descriptors",
    "Digest",
    "Numbers",
    "PlanMismatchError",
    "Sent",
    "SourceService",
    "SourceState",
    "SourceStates",
    "StaleUpdateError",
    "Step",
    "TargetService",
    "TargetState",
    "TargetStates",
    "Update",
    "UpdateOrder",
    "WriteTarget",
    "WriteTargets",
    "check_epoch",
    "digest_of",
    "layout_of",
    "packed_layout",
    "places_of",
]

Numbers = NDArray[np.uint64]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
RankNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Immediate: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 28)]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
MemoryDescriptor: TypeAlias = Annotated[bytes, Meta(max_length=1024)]
Reason: TypeAlias = Annotated[str, Meta(max_length=8192)]
MOST_RANKS = 1 << 16
Reasons: TypeAlias = Annotated[dict[RankNumber, Reason], Meta(max_length=MOST_RANKS)]
Mode = Literal["inplace", "gated", "shadow"]
State = Literal["empty", "ready", "updating", "torn"]


EPOCHS_AHEAD = 24 * 3600 * 10**9
"""How far an epoch may be ahead of this rank's clock: a day, in nanoseconds, the unit of default epochs."""
LAYOUT_BYTES = 16 << 20
"""The most bytes of one rank's layout. Each tensor takes 60 to 120 bytes, so more than 140,000 tensors fit."""
Extent: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Extents: TypeAlias = Annotated[list[Extent], Meta(max_length=32)]
SentLocalTensor: TypeAlias = tuple[list[tuple[Extents, Extents, Extents]], Extents, Extents]


class LayoutDescription(msgspec.Struct, frozen=True):
    """A layout in the form that `Layout.describe` returns."""

    shardings: list[tuple[Extents, list[SentLocalTensor]]]
    ranks: list[list[list[RankNumber]]]
    tensors: dict[str, tuple[Text, RankNumber, RankNumber]]


_layouts = msgspec.json.Decoder(LayoutDescription)


class StaleUpdateError(aiote.AioteError):
    """The update is not later than the rank's version, or than another update that the rank takes part in."""


class PlanMismatchError(aiote.AioteError):
    """A rank has another plan than the controller, because they were given different recipes."""


class Update(msgspec.Struct, frozen=True, order=True):
    """The identity of an update: the controller's epoch, which grows with each controller, and the weights' version."""

    epoch: Number
    version: Number


class Descriptors(msgspec.Struct, frozen=True):
    """Descriptors of memory, concatenated, and the end of each. As arrays they may be of any length in a message."""

    data: Bytes
    ends: Numbers

    def check(self, count: int) -> None:
        """Raise UsageError unless these are exactly `count` descriptors."""
        ends, data = self.ends, self.data
        if (
            data.ndim != 1
            or ends.shape != (count,)
            or (ends[1:] < ends[:-1]).any()
            or int(ends[-1:].sum()) != len(data)
        ):
            raise aiote.UsageError(f"expected {count} descriptors of memory, got {ends.shape} in {data.shape} bytes")

    def part(self, first: int, stop: int) -> Descriptors:
        """Return the descriptors from `first` to `stop` - 1. They were checked; no object is made of each."""
        ends = self.ends[first:stop]
        begin = self.ends[first - 1] if first else np.uint64(0)
        return Descriptors(self.data[int(begin) : int(ends[-1]) if len(ends) else int(begin)], ends - begin)

    @classmethod
    def of(cls, several: Sequence[bytes]) -> Descriptors:
        """Return descriptors in the form in which they travel."""
        ends = np.cumsum([len(one) for one in several], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(several), np.uint8), ends)

    def unpacked(self, count: int) -> list[bytes]:
        """Return the descriptors. Raises UsageError unless there are exactly `count`."""
        self.check(count)
        starts = [0, *self.ends.tolist()]
        whole = self.data.tobytes()
        return [whole[start:end] for start, end in itertools.pairwise(starts)]


class TargetState(msgspec.Struct, frozen=True):
    """A target's description of itself: its rank, its replica, how it takes updates, its state and version.

    It includes the target's layout as JSON, and `places`, where its tensors lie.
    """

    rank: RankNumber
    replica: Annotated[str, Meta(max_length=1024)]
    mode: Mode
    state: State
    update: Update | None
    layout: Bytes
    places: Numbers


class SourceState(msgspec.Struct, frozen=True):
    """A source's description of itself: its rank, its layout as JSON, and where gathering sources find its tensors."""

    rank: RankNumber
    layout: Bytes
    places: Numbers
    regions: Descriptors
    address: Text


class UpdateOrder(msgspec.Struct, frozen=True):
    """The order to take an update. Each source (by address) writes to its tensors in `written`, and commits once."""

    update: Update
    sources: Annotated[list[Text], Meta(max_length=MOST_RANKS)]
    written: Annotated[list[Numbers], Meta(max_length=MOST_RANKS)]


class Step(msgspec.Struct, frozen=True):
    """A target's progress in an update.

    A "lent" step carries for each source, one source after another, the immediate of its commit, and a descriptor of
    each region; a descriptor is empty if that source does not write to the region. `places` says where the tensors lie
    in these regions. `shared` describes shared memory that is region 0, for sources of the target's host, or is empty.
    """

    kind: Literal["lent", "counted", "committed"]
    imms: Annotated[list[Immediate], Meta(max_length=MOST_RANKS)] = []
    lent: Descriptors | None = None
    places: Numbers | None = None
    shared: MemoryDescriptor = b""


class WriteTarget(msgspec.Struct, frozen=True):
    """A target, described for a source that writes to it.

    `known` is the digest of the places that the source got with its plan. `places` is None if they are still valid, or
    else the new places. `shared` is the descriptor of the target's step.
    """

    rank: RankNumber
    address: Text
    imm: Immediate
    regions: Descriptors
    known: Digest
    places: Numbers | None
    shared: MemoryDescriptor = b""


class Sent(msgspec.Struct, frozen=True):
    """A source's result: bytes written and gathered, its peak of staging memory, targets that failed and why.

    `lost` names other sources that it could not gather from, and why. If there are any, this source has committed to no
    target.
    """

    written: Number
    gathered: Number
    peak: Number
    failed: Reasons
    lost: Reasons = {}


SourceStates: TypeAlias = Annotated[list[SourceState], Meta(max_length=MOST_RANKS)]
TargetStates: TypeAlias = Annotated[list[TargetState], Meta(max_length=MOST_RANKS)]
WriteTargets: TypeAlias = Annotated[list[WriteTarget], Meta(max_length=MOST_RANKS)]


class TargetService(service.Service):
    """The service of a target for its controller."""

    name = "aiote.weights.Target"

    @service.method(idempotent=True)
    async def describe(self) -> TargetState:
        """Return the target's description of itself."""
        raise NotImplementedError

    @service.method(raises=[StaleUpdateError])
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        """Take an update, and yield its steps. The update ends when the stream ends."""
        raise NotImplementedError
        yield

    @service.method(idempotent=True, raises=[StaleUpdateError])
    async def commit(self, update: Update) -> None:
        """Make the bytes that have arrived the current version. The controller calls this once all have arrived."""
        raise NotImplementedError


class SourceService(service.Service):
    """The service of a source for its controller."""

    name = "aiote.weights.Source"

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        """Return the source's description of itself."""
        raise NotImplementedError

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: SourceStates, targets: TargetStates, gather: str) -> bytes:
        """Plan, and return the plan's digest."""
        raise NotImplementedError

    @service.method(raises=[StaleUpdateError, PlanMismatchError])
    async def send(self, update: Update, digest: Digest, destinations: WriteTargets) -> Sent:
        """Write this source's part to every target, and commit to each target that has all of it."""
        raise NotImplementedError


def check_epoch(update: Update, latest: int) -> None:
    """Raise StaleUpdateError for an epoch more than a day ahead of this rank's clock and of its latest epoch.

    Such an epoch would make the rank refuse every later controller.
    """
    most = max(latest, time.time_ns()) + EPOCHS_AHEAD
    if update.epoch > most:
        raise StaleUpdateError(f"{update} is of an epoch after {most}, a day ahead of this rank's clock")


def digest_of(places: Numbers) -> bytes:
    """Return a hash of places: 16 bytes that no other places have."""
    return hashlib.blake2b(places.tobytes(), digest_size=16).digest()


def packed_layout(layout: Layout) -> Bytes:
    """Return a layout as bytes (JSON) that travel in a message."""
    return np.frombuffer(json.dumps(layout.describe(), separators=(",", ":")).encode(), np.uint8)


def layout_of(packed: Bytes) -> Layout:
    """Return the layout that `packed_layout` packed. Raises UsageError for other bytes, or more than `LAYOUT_BYTES`."""
    if packed.nbytes > LAYOUT_BYTES:
        raise aiote.UsageError(
            f"the layout has {packed.nbytes} bytes as JSON, expected at most {LAYOUT_BYTES}: describe "
            "this rank's own part only"
        )
    try:
        found = _layouts.decode(packed.tobytes())
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise aiote.UsageError(f"this is not the description of a layout: {error}") from None
    return Layout.from_description({"shardings": found.shardings, "ranks": found.ranks, "tensors": found.tensors})


def places_of(memory: RankArrays) -> Numbers:
    """Return where a rank's tensors lie, in the layout's order: a row (region's number, first byte) for each tensor."""
    found = [memory.places[name][:2] for name in memory.layout.tensors if name in memory.places]
    return np.array(found, np.uint64).reshape(-1, 2)
