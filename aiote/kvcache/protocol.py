"""Define `Transfers`, the service (`aiote.service`) that decode ranks call at a prefill rank, and its messages.

| call       | effect                                                                                                 |
|------------|--------------------------------------------------------------------------------------------------------|
| `describe` | returns the spec of the rank's cache                                                                   |
| `open`     | opens a session: maps the rank's cache onto a part of the caller's. `memories` describe the caller's   |
|            | memories, which the rank writes; without them the answer describes the rank's memories, which the      |
|            | caller reads. The session ends with the connection; the rank does not continue it over the next one    |
| `push`     | the rank writes a request's pages as they are computed. The stream has no items; it ends when all are  |
|            | written                                                                                                |
| `pull`     | the caller reads a request's pages. The stream tells where they are once they are computed; the rank   |
|            | keeps them while the stream is open                                                                    |
| `moving`   | sends one message per interval for all requests of the session: those that wait in a queue that moves, |
|            | and those being computed                                                                               |
| `renew`    | keeps requests that wait for pages of the caller: one message from time to time for all of them        |
| `finish`   | reports that a request was read and returns whether the rank kept its pages until now; only then the   |
|            | caller may use what it read. The rank need not keep the pages any longer                               |

A prefill rank matches a request by name with an offer of its program, whichever comes first. Leaving a stream cancels
it: `await stream.aclose()` returns when the rank has stopped writing for it, because the method ends only then. A
stream that ends with `TransferRefused` was ended by the rank, not by the caller.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import aiote

from .. import service
from .mapping import MOST_PIECES, MappingError, PageRow
from .tensors import MAX_GROUPS, MAX_MEMORIES, MAX_TENSORS, CacheSpec

__all__ = [
    "MOST_NAMED",
    "NoSessionError",
    "Opened",
    "Pinned",
    "PushRequest",
    "SentRows",
    "TransferRefused",
    "Transfers",
    "rows_of",
    "rows_to",
]

Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
Group: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
Interval: TypeAlias = Annotated[float, Meta(ge=0.01, le=3600)]
Descriptor: TypeAlias = Annotated[bytes, Meta(max_length=4096)]
MOST_NAMED = 4096
"""The most requests in one message of `renew` or `moving`."""
Names: TypeAlias = Annotated[list[Name], Meta(max_length=MOST_NAMED)]
Descriptors: TypeAlias = Annotated[list[Descriptor], Meta(max_length=MAX_MEMORIES)]


class TransferRefused(aiote.AioteError):
    """A request's cache is not moved, or no longer moved; the text says why. No writes for the request follow."""


class NoSessionError(TransferRefused):
    """A prefill rank has dropped a session in favor of others of the same decode rank; a new session works again."""


class SentPageRow(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A `PageRow` as it is sent."""

    pages: NDArray[np.int64]
    start: Number


SentRows: TypeAlias = Annotated[dict[Group, SentPageRow], Meta(max_length=MAX_GROUPS)]


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """A session's number, and descriptors of the prefill rank's memories."""

    session: Number
    memories: Descriptors


class PushRequest(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request to be pushed: the number of tokens, the target pages of each group, and the first immediate `imm`.

    `counts_suffice`: the counts tell the reader that all has arrived, so it does not wait for the stream's end.
    """

    session: Number
    request: Name
    tokens: Number
    imm: Annotated[int, Meta(ge=0, lt=1 << 28)]
    rows: SentRows
    counts_suffice: bool = False


class Pinned(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request's pages at the prefill rank, which keeps them until `finish`."""

    tokens: Number
    rows: SentRows


class PrefillRank(Protocol):
    """The object that answers the calls of `Transfers`."""

    def describe(self) -> CacheSpec: ...
    async def open(self, peer: aiote.Peer, part: CacheSpec, immediates: list[int], memories: list[bytes]) -> Opened: ...
    def push(self, peer: aiote.Peer, fetch: PushRequest) -> service.DirectCall: ...
    def pull(self, peer: aiote.Peer, session: int, request: str) -> AsyncGenerator[Pinned]: ...
    def moving(self, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]: ...
    def renew(self, requests: list[str]) -> None: ...
    def finish(self, peer: aiote.Peer, session: int, request: str) -> bool: ...


class Transfers(service.Service):
    """The service of a prefill rank for decode ranks; see the table of this module."""

    name = "kvcache.Transfers"

    def __init__(self, rank: PrefillRank) -> None:
        self._rank = rank

    @service.method(idempotent=True)
    async def describe(self) -> CacheSpec:
        """Return the spec of the rank's cache."""
        return self._rank.describe()

    @service.method(raises=[MappingError, TransferRefused])
    async def open(
        self, part: CacheSpec, immediates: Annotated[list[Number], Meta(max_length=MAX_TENSORS)], memories: Descriptors
    ) -> Opened:
        """Open a session; the i-th layer of the part counts on the immediate `imm + immediates[i]` of a request."""
        return await self._rank.open(service.current_call().peer, part, immediates, memories)

    @service.method(raises=[MappingError, TransferRefused, NoSessionError], direct=True)
    def push(self, fetch: PushRequest) -> AsyncIterator[None]:
        """Write a request's pages to the caller; the stream ends when all are written."""
        return self._rank.push(service.current_call().peer, fetch)

    @service.method(raises=[MappingError, TransferRefused, NoSessionError])
    async def pull(self, session: Number, request: Name) -> AsyncIterator[Pinned]:
        """Keep a request's pages until the caller has read them; yield where they are."""
        async with aclosing(self._rank.pull(service.current_call().peer, session, request)) as items:
            async for item in items:
                yield item

    @service.method(raises=[TransferRefused, NoSessionError])
    async def moving(self, session: Number, interval: Interval) -> AsyncIterator[Names]:
        """Yield every `interval` seconds the requests of a session that are not stuck, if there are any."""
        async with aclosing(self._rank.moving(service.current_call().peer, session, interval)) as items:
            async for item in items:
                yield item

    @service.method(idempotent=True)
    async def renew(self, requests: Names) -> None:
        """Keep requests that still wait for pages of the caller; the rank's `match_timeout` begins anew for them."""
        self._rank.renew(requests)

    @service.method
    async def finish(self, session: Number, request: Name) -> bool:
        """Record that the caller has read a request's pages; return whether the rank kept them until now."""
        return self._rank.finish(service.current_call().peer, session, request)


def rows_of(rows: dict[int, SentPageRow]) -> dict[int, PageRow]:
    """Return the page rows of a received message. Raises UsageError for anything that is not a row, and for more pages
    than the pieces that a layer may have.
    """
    if (pages := sum([row.pages.size for row in rows.values()])) > MOST_PIECES:
        raise aiote.UsageError(f"a request with {pages} pages: expected at most {MOST_PIECES}")
    return {group: PageRow(row.pages, row.start) for group, row in rows.items()}


def rows_to(rows: dict[int, PageRow]) -> dict[int, SentPageRow]:
    """Return page rows in the form in which they are sent."""
    return {group: SentPageRow(row.pages, row.start) for group, row in rows.items()}
