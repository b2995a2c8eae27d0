"""What decode ranks call at a prefill rank: `Transfers`, a service of `aiote.service`.

| call       | asks for                                                                                               |
|------------|--------------------------------------------------------------------------------------------------------|
| `describe` | what the rank's cache is                                                                               |
| `open`     | a session: the map of the rank's cache onto a part of the caller's. `memories` describe the caller's,  |
|            | to be written; where none is given the answer describes the rank's, to be read. It ends with the       |
|            | connection, and nothing is written for it over the next one                                            |
| `push`     | a request's pages, written as they are computed. The stream has no items, and ends when all are        |
| `pull`     | a request's pages, to be read. The stream says where they are when they are computed, and keeps them   |
| `moving`   | one message in a while for all requests of the session: which wait in a queue that moves, or compute   |
| `renew`    | that requests are kept which wait for pages of the caller's: one message in a while for all of them    |
| `finish`   | whether they were kept until now: what was read is theirs only then. They need not be kept any more    |

A request is matched by its name with what the prefill rank's program offers, whichever comes first. To leave a stream
is to cancel: `await stream.aclose()` returns when nothing is written for it any more, for the method ends only then. A
stream that ends with `TransferRefused` has come to that by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import aiote

from .. import service
from .mapping import MappingError, PageRow
from .tensors import CacheSpec

__all__ = ["Fetch", "NoSessionError", "Opened", "Pinned", "TransferRefused", "Transfers", "rows_of", "rows_to"]

Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
Group: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
Interval: TypeAlias = Annotated[float, Meta(ge=0.01, le=3600)]
Descriptor: TypeAlias = Annotated[bytes, Meta(max_length=4096)]
MOST_RENEWED = 4096
"""Requests of one message."""


class TransferRefused(aiote.AioteError):
    """A request's cache is not moved, or not any more; the text says why. Nothing is written for it after that."""


class NoSessionError(TransferRefused):
    """A prefill rank has forgotten a session, for others of the same decode rank; a new one does."""


class Row(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A `PageRow` on its way."""

    pages: NDArray[np.int64]
    start: Number


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """A session's number, and descriptors of the prefill rank's memories."""

    session: Number
    memories: list[Descriptor]


class Fetch(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request to be pushed: how many tokens, into which pages of each group, counted on immediates from `imm` on."""

    session: Number
    request: Name
    tokens: Number
    imm: Annotated[int, Meta(ge=0, lt=1 << 28)]
    rows: dict[Group, Row]


class Pinned(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Where a request's pages are at the prefill rank, until `finish`."""

    tokens: Number
    rows: dict[Group, Row]


class Rank(Protocol):
    """What answers the calls."""

    def describe(self) -> CacheSpec: ...
    async def open(self, peer: aiote.Peer, part: CacheSpec, immediates: list[int], memories: list[bytes]) -> Opened: ...
    async def push(self, peer: aiote.Peer, fetch: Fetch) -> None: ...
    def pull(self, peer: aiote.Peer, session: int, request: str) -> AsyncGenerator[Pinned]: ...
    def moving(self, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]: ...
    def renew(self, requests: list[str]) -> None: ...
    def finish(self, peer: aiote.Peer, session: int, request: str) -> bool: ...


class Until(AsyncIterator[None]):
    """A stream without items, which ends when what is awaited has."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work

    async def __anext__(self) -> None:
        await self._work()
        raise StopAsyncIteration


class Transfers(service.Service):
    """A prefill rank, as decode ranks call it; see the table of this module."""

    name = "kvcache.Transfers"

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @service.method(idempotent=True)
    async def describe(self) -> CacheSpec:
        """Return what the rank's cache is."""
        return self._rank.describe()

    @service.method(raises=[MappingError, TransferRefused])
    async def open(self, part: CacheSpec, immediates: list[Number], memories: list[Descriptor]) -> Opened:
        """Open a session; `immediates` says which one of a request's each layer of the part counts on."""
        return await self._rank.open(service.current_call().peer, part, immediates, memories)

    @service.method(raises=[MappingError, TransferRefused, NoSessionError])
    async def push(self, fetch: Fetch) -> AsyncIterator[None]:
        """Have a request's pages written."""
        return Until(partial(self._rank.push, service.current_call().peer, fetch))

    @service.method(raises=[MappingError, TransferRefused, NoSessionError])
    async def pull(self, session: Number, request: Name) -> AsyncIterator[Pinned]:
        """Have a request's pages kept until they are read."""
        async with aclosing(self._rank.pull(service.current_call().peer, session, request)) as items:
            async for item in items:
                yield item

    @service.method(raises=[TransferRefused, NoSessionError])
    async def moving(self, session: Number, interval: Interval) -> AsyncIterator[list[Name]]:
        """Hear every so many seconds which requests of a session are not stuck."""
        async with aclosing(self._rank.moving(service.current_call().peer, session, interval)) as items:
            async for item in items:
                yield item

    @service.method(idempotent=True)
    async def renew(self, requests: Annotated[list[Name], Meta(max_length=MOST_RENEWED)]) -> None:
        """Say that requests are still wanted, which wait for pages; the rank keeps them for another while."""
        self._rank.renew(requests)

    @service.method
    async def finish(self, session: Number, request: Name) -> bool:
        """Say that a request's pages were read, and hear whether they were kept until now."""
        return self._rank.finish(service.current_call().peer, session, request)


def rows_of(rows: dict[int, Row]) -> dict[int, PageRow]:
    """Return rows that have come from elsewhere. Raises UsageError for what is none."""
    return {group: PageRow(row.pages, row.start) for group, row in rows.items()}


def rows_to(rows: dict[int, PageRow]) -> dict[int, Row]:
    """Return rows for the way."""
    return {group: Row(row.pages, row.start) for group, row in rows.items()}
