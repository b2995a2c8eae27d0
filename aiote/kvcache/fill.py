"""The one call between decoders and prefillers: `Prefill.fill`, a service of `aiote.service`.

A decode rank calls it at each prefill rank that has something to write for it, and reads the stream:

| the stream           | says                                                                                    |
|----------------------|-----------------------------------------------------------------------------------------|
| an item, `"queued"`  | it comes after other requests, of which one has moved on: its silence is no stall       |
| ends                 | all was written. The decoder has counted that before, as a rule                         |
| raises `FillRefused` | nothing is written for it any more, though not all of it was: and why                   |

To leave the stream is to cancel the request: `await stream.aclose()` returns when nothing is written for it any more,
for the method ends only then. What a request names is looked at by `Prefiller` before anything is written.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import aiote

from .. import service
from ..service.background import to_the_end
from .cache_layout import CacheLayout

if TYPE_CHECKING:
    from .job import Job
    from .orders import Order

__all__ = [
    "LAST_IMMEDIATE",
    "REQUEST_BYTES",
    "FillRefused",
    "FillRequest",
    "Numbers",
    "Prefill",
    "Progress",
    "Ranks",
    "fingerprint",
]

MOST_RANKS = 1024
REQUEST_BYTES = 64
DESCRIPTOR_BYTES = 4096
PRINT_BYTES = 16
LAST_IMMEDIATE = (1 << 28) - 1
"""The greatest value that an engine's users have."""

Numbers: TypeAlias = NDArray[np.uint32]
Progress: TypeAlias = Literal["queued"]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranked: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Descriptor: TypeAlias = Annotated[bytes, Meta(max_length=DESCRIPTOR_BYTES)]


class FillRefused(aiote.AioteError):
    """A request is not filled, or not any more; the text says why. Nothing is written for it after that."""


class Ranks(NamedTuple):
    """Which rank of how many the decoder is, and which it takes the prefiller for."""

    prefill: Rank
    of_prefill: Ranked
    decode: Rank
    of_decode: Ranked


class FillRequest(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Ask for a prompt's cache. `round` counts the request's tries with one group of prefillers after another.

    `imm` is the immediate of layer 0, the next ones those of the others, then that of the tail. `pool` and `tails` are
    descriptors of leases; `pool_pages` is how many pages a layer has there. The tail's `tail_bytes` (0: it is not asked
    for of this rank) begin at `tail_offset`. `tokens` and `pages` are rows.
    """

    round: Annotated[int, Meta(ge=0, lt=1 << 16)]
    ranks: Ranks
    imm: Annotated[int, Meta(ge=0, le=LAST_IMMEDIATE)]
    pool_pages: Count
    tail_offset: Count
    tail_bytes: Count
    request: Annotated[bytes, Meta(max_length=REQUEST_BYTES)]
    print: Annotated[bytes, Meta(max_length=PRINT_BYTES)]
    pool: Descriptor
    tails: Descriptor
    tokens: NDArray[np.uint32]
    pages: NDArray[np.uint32]


class Prefill(service.Service):
    """A prefill rank, as decoders call it. `take` makes a peer's request a part of a job, or raises FillRefused."""

    name = "kvcache.Prefill"

    def __init__(self, take: Callable[[aiote.Peer, FillRequest], tuple[Job, Order]]) -> None:
        self._take = take

    @service.method(raises=[FillRefused])
    async def fill(self, request: FillRequest) -> AsyncIterator[Progress]:
        """Have a prompt computed and written; see the table of this module."""
        peer = service.current_call().peer
        job, order = self._take(peer, request)
        try:
            while not job.over:
                if order.queued:
                    order.queued = False
                    yield "queued"
                else:
                    await order.news.wait()
        finally:
            if not job.over:
                job.stop(f"the decoder is lost: {peer.reason}" if peer.lost else "the decoder has cancelled it")
                await to_the_end(job.wait_over)
        if job.reason:
            raise FillRefused(job.reason)


@functools.lru_cache(maxsize=64)
def fingerprint(layout: CacheLayout) -> bytes:
    """Return 16 bytes that two layouts have in common only if pages of one are pages of the other."""
    fields = (layout.layers, layout.kv_heads, layout.head_size, layout.page_tokens, str(layout.dtype))
    text = repr((*fields, "MLA" if layout.mla else layout.order))
    return hashlib.blake2b(text.encode(), digest_size=PRINT_BYTES).digest()
