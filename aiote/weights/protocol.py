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

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import numpy as np

import aiote

from .. import service
from .layout import Layout
from .rank_memory import Bytes, RankMemory

__all__ = [
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
    "layout_of",
    "packed_layout",
]

Mode = Literal["inplace", "gated", "shadow"]
State = Literal["empty", "ready", "updating", "torn"]


class StaleUpdateError(aiote.AioteError):
    """The update is no later than what the rank has, or than one that it takes part in."""


class PlanMismatchError(aiote.AioteError):
    """A rank does not have the plan that the controller has: they were given different recipes."""


class Update(msgspec.Struct, frozen=True, order=True):
    """Which update: the controller's epoch, which grows with each controller, and the version of the weights."""

    epoch: int
    version: int


class Where(msgspec.Struct, frozen=True):
    """Where a tensor lies in its rank's memory: which region, and the byte at which it begins."""

    region: int
    offset: int


class TargetState(msgspec.Struct, frozen=True):
    """What a target is: its rank, its replica, how it takes updates, what it holds now, and its layout as JSON."""

    rank: int
    replica: str
    mode: Mode
    state: State
    update: Update | None
    layout: Bytes
    places: dict[str, Where]


class SourceState(msgspec.Struct, frozen=True):
    """What a source is: its rank, its layout as JSON, and descriptors of its memory for sources that gather."""

    rank: int
    layout: Bytes
    places: dict[str, Where]
    regions: list[bytes]
    address: str


class UpdateOrder(msgspec.Struct, frozen=True):
    """Take an update from these sources (addresses), each of which commits once."""

    update: Update
    sources: list[str]


class Step(msgspec.Struct, frozen=True):
    """How far a target is.

    With "lent" come the commits' immediate, for each source descriptors of the regions, and where tensors lie in these.
    """

    kind: Literal["lent", "counted", "committed"]
    imm: int = 0
    lent: list[list[bytes]] = []
    places: dict[str, Where] = {}


class WriteTarget(msgspec.Struct, frozen=True):
    """A target as a source writes to it."""

    rank: int
    address: str
    imm: int
    regions: list[bytes]
    places: dict[str, Where]


class Sent(msgspec.Struct, frozen=True):
    """What a source has done: bytes written and gathered, its peak of staging memory, targets that failed and why."""

    written: int
    gathered: int
    peak: int
    failed: dict[int, str]


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
    async def send(self, update: Update, digest: bytes, destinations: list[WriteTarget]) -> Sent:
        """Write this source's part to every target, and commit there."""
        raise NotImplementedError


def packed_layout(layout: Layout) -> Bytes:
    """Return a layout as bytes that travel."""
    return np.frombuffer(json.dumps(layout.describe(), separators=(",", ":")).encode(), np.uint8)


def layout_of(packed: Bytes) -> Layout:
    """Return the layout of such bytes. Raises UsageError for anything else."""
    try:
        plain: dict[str, Any] = json.loads(packed.tobytes())
    except ValueError as error:
        raise aiote.UsageError(f"this is no description of a layout: {error}") from None
    return Layout.from_description(plain)


def places_of(memory: RankMemory) -> dict[str, Where]:
    """Return where a rank's tensors lie, as it travels."""
    return {name: Where(place.region, place.offset) for name, place in memory.places.items()}
