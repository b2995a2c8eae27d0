"""What controller, sources and targets say to each other, as services of `aiote.service`.

An update runs as one stream of calls for each target, from the lease of its memory to the commit. Its end by any way
but the commit, a controller's death among them, takes the memory back: nothing is written late, and no target waits for
somebody who is gone.

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
from .rank_memory import Bytes, RankMemory

__all__ = [
    "Descriptors",
    "Numbers",
    "PlanMismatchError",
    "Sent",
    "SourceService",
    "SourceState",
    "StaleUpdateError",
    "Step",
    "TargetService",
    "TargetState",
    "Update",
    "UpdateOrder",
    "WriteTarget",
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
Reason: TypeAlias = Annotated[str, Meta(max_length=8192)]
Mode = Literal["inplace", "gated", "shadow"]
State = Literal["empty", "ready", "updating", "torn"]


EPOCHS_AHEAD = 24 * 3600 * 10**9
"""Nanoseconds, as epochs are by default."""
LAYOUT_BYTES = 16 << 20
"""Of one rank's layout, 60 to 120 bytes for each tensor: more than 140,000 tensors."""
Extent: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Extents: TypeAlias = Annotated[list[Extent], Meta(max_length=32)]
Held: TypeAlias = tuple[list[tuple[Extents, Extents, Extents]], Extents, Extents]


class LayoutDescription(msgspec.Struct, frozen=True):
    """A layout as `Layout.describe` has it."""

    shardings: list[tuple[Extents, list[Held]]]
    ranks: list[list[list[RankNumber]]]
    tensors: dict[str, tuple[Text, RankNumber, RankNumber]]


_layouts = msgspec.json.Decoder(LayoutDescription)


class StaleUpdateError(aiote.AioteError):
    """The update is no later than what the rank has, or than one that it takes part in."""


class PlanMismatchError(aiote.AioteError):
    """A rank does not have the plan that the controller has: they were given different recipes."""


class Update(msgspec.Struct, frozen=True, order=True):
    """Which update: the controller's epoch, which grows with each controller, and the version of the weights."""

    epoch: Number
    version: Number


class Descriptors(msgspec.Struct, frozen=True):
    """Descriptors of memory, one after another, and where each ends: arrays, which messages of any length carry."""

    data: Bytes
    ends: Numbers

    @classmethod
    def of(cls, several: Sequence[bytes]) -> Descriptors:
        """Return these as they travel."""
        ends = np.cumsum([len(one) for one in several], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(several), np.uint8), ends)

    def unpacked(self, count: int) -> list[bytes]:
        """Return the descriptors. Raises UsageError unless there are `count`."""
        ends, data = self.ends, self.data
        if (
            data.ndim != 1
            or ends.shape != (count,)
            or (ends[1:] < ends[:-1]).any()
            or int(ends[-1:].sum()) != len(data)
        ):
            raise aiote.UsageError(
                f"{count} descriptors of memory are expected, got {ends.shape} in {data.shape} bytes"
            )
        starts = [0, *ends.tolist()]
        whole = data.tobytes()
        return [whole[start:end] for start, end in itertools.pairwise(starts)]


class TargetState(msgspec.Struct, frozen=True):
    """What a target is: its rank, its replica, how it takes updates, what it holds now.

    With it come its layout as JSON, and where its tensors lie.
    """

    rank: RankNumber
    replica: Annotated[str, Meta(max_length=1024)]
    mode: Mode
    state: State
    update: Update | None
    layout: Bytes
    places: Numbers


class SourceState(msgspec.Struct, frozen=True):
    """What a source is: its rank, its layout as JSON, and for sources that gather where its tensors lie."""

    rank: RankNumber
    layout: Bytes
    places: Numbers
    regions: Descriptors
    address: Text


class UpdateOrder(msgspec.Struct, frozen=True):
    """Take an update from these sources (addresses), each of which writes to these tensors and commits once."""

    update: Update
    sources: list[Text]
    written: list[Numbers]


class Step(msgspec.Struct, frozen=True):
    """How far a target is.

    With "lent" come the commits' immediate, for each source a descriptor of each region, one source after another,
    empty where that source has nothing to write, and where the tensors lie in these.
    """

    kind: Literal["lent", "counted", "committed"]
    imm: Immediate = 0
    lent: Descriptors | None = None
    places: Numbers | None = None


class WriteTarget(msgspec.Struct, frozen=True):
    """A target as a source writes to it.

    `places` are those of such a digest that came with a plan; they come again where they are others now.
    """

    rank: RankNumber
    address: Text
    imm: Immediate
    regions: Descriptors
    known: Digest
    places: Numbers | None


class Sent(msgspec.Struct, frozen=True):
    """What a source has done: bytes written and gathered, its peak of staging memory, targets that failed and why.

    Where sources were `lost` from which it gathers, it has committed nowhere.
    """

    written: Number
    gathered: Number
    peak: Number
    failed: dict[RankNumber, Reason]
    lost: dict[RankNumber, Reason] = {}


class TargetService(service.Service):
    """A target, to its controller."""

    name = "aiote.weights.Target"

    @service.method(idempotent=True)
    async def describe(self) -> TargetState:
        """Return what it is and has."""
        raise NotImplementedError

    @service.method(raises=[StaleUpdateError])
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        """Take an update; it is over with the stream."""
        raise NotImplementedError
        yield

    @service.method(idempotent=True, raises=[StaleUpdateError])
    async def commit(self, update: Update) -> None:
        """Make what has come the version; every byte of it has."""
        raise NotImplementedError


class SourceService(service.Service):
    """A source, to its controller."""

    name = "aiote.weights.Source"

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        """Return what it is and has."""
        raise NotImplementedError

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: list[SourceState], targets: list[TargetState], gather: str) -> bytes:
        """Plan, and return the plan's digest."""
        raise NotImplementedError

    @service.method(raises=[StaleUpdateError, PlanMismatchError])
    async def send(self, update: Update, digest: Digest, destinations: list[WriteTarget]) -> Sent:
        """Write this source's part to every target, and commit there."""
        raise NotImplementedError


def check_epoch(update: Update, latest: int) -> None:
    """Raise StaleUpdateError for an epoch more than a day ahead of clocks: it would shut out every later controller."""
    most = max(latest, time.time_ns()) + EPOCHS_AHEAD
    if update.epoch > most:
        raise StaleUpdateError(f"{update} is of an epoch after {most}, a day ahead of this rank's clock")


def digest_of(places: Numbers) -> bytes:
    """Return 16 bytes that no other places have."""
    return hashlib.blake2b(places.tobytes(), digest_size=16).digest()


def packed_layout(layout: Layout) -> Bytes:
    """Return a layout as bytes that travel."""
    return np.frombuffer(json.dumps(layout.describe(), separators=(",", ":")).encode(), np.uint8)


def layout_of(packed: Bytes) -> Layout:
    """Return the layout of such bytes. Raises UsageError for anything else, and for more than `LAYOUT_BYTES`."""
    if packed.nbytes > LAYOUT_BYTES:
        raise aiote.UsageError(
            f"a layout of {packed.nbytes} bytes of JSON: a rank describes its own part, in {LAYOUT_BYTES} at most"
        )
    try:
        found = _layouts.decode(packed.tobytes())
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise aiote.UsageError(f"this is no description of a layout: {error}") from None
    return Layout.from_description({"shardings": found.shardings, "ranks": found.ranks, "tensors": found.tensors})


def places_of(memory: RankMemory) -> Numbers:
    """Return where a rank's tensors lie, in the layout's order: numbers of regions, and bytes at which they begin."""
    found = [memory.places[name][:2] for name in memory.layout.tensors if name in memory.places]
    return np.array(found, np.uint64).reshape(-1, 2)
