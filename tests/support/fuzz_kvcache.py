"""What is fuzzed of the KV cache: what decoders ask for. The target `fill` takes the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

import aiote
from aiote.core.address import Address
from aiote.core.descriptor import RailKey, RegionDescriptor
from aiote.kvcache import CacheLayout
from aiote.kvcache.fill import LAST_IMMEDIATE, FillRequest, Prefill, Ranks, fingerprint
from aiote.kvcache.orders import OrderBuilder
from aiote.service import codec
from aiote.service.definition import methods_of
from aiote.transfers import RemoteRegion

PREFILLER = b"t" * 16
DECODER = Address("localhost", 4000, b"o" * 16, 8)
LAYOUT = CacheLayout(layers=3, kv_heads=4, head_size=2, page_tokens=4, dtype="uint8")
(FILL,) = methods_of(Prefill)


class Decoder:
    """The peer whose requests they are."""

    address = DECODER


def fill(data: bytes) -> None:
    """Take the arguments of a decoder's call, and look at what it asks for, as a prefiller does."""
    try:
        (request,) = msgspec.structs.astuple(codec.decode(FILL.read_arguments, data))
    except ValueError:
        return
    again, arrays = codec.encode(FILL.arguments(request))
    if not arrays:
        (second,) = msgspec.structs.astuple(codec.decode(FILL.read_arguments, again))
        assert codec.encode(FILL.arguments(second))[0] == again
    attached: list[aiote.RemoteRegion] = []

    def attach(descriptor: bytes) -> aiote.RemoteRegion:
        attached.append(RemoteRegion.attached(RegionDescriptor.from_bytes(descriptor), PREFILLER))
        return attached[-1]

    try:
        order = OrderBuilder(LAYOUT, 0, 1, attach).order(cast("aiote.Peer", Decoder()), request)
    except aiote.AioteError as error:
        assert len(str(error)) < 1000
        return
    owners = {(remote.owner.identity, remote.owner.incarnation) for remote in attached if remote.writable}
    assert owners == {(DECODER.identity, DECODER.incarnation)}
    assert order.pool.nbytes == LAYOUT.pool_bytes(request.ranks.of_decode, order.table.pool)
    assert max(order.table.numbers) < order.table.pool
    assert len(set(order.table.numbers.tolist())) == LAYOUT.pages_for(len(request.tokens))
    assert (order.tail.nbytes if order.tail is not None else 0) == request.tail_bytes
    assert request.imm + LAYOUT.layers <= LAST_IMMEDIATE


KVCACHE: dict[str, Callable[[bytes], None]] = {"fill": fill}


# Seeds.


def kvcache_seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of these targets: target, name, bytes."""
    return {
        "fill": {name: codec.encode(FILL.arguments(one))[0] for name, one in fills().items()},
    }


def lent(nbytes: int, **changes: Any) -> bytes:
    """Return the descriptor of memory that the decoder has lent to the prefiller."""
    fields = {"region": 1, "address": 4096, "writable": True, "lease": 2, "holder": PREFILLER, "readable": False}
    return bytes(RegionDescriptor(owner=DECODER, length=nbytes, keys=(RailKey(1, 2),), **{**fields, **changes}))


def fills() -> dict[str, FillRequest]:
    """Return requests for the prefiller of the target: right ones, and some that are not."""
    tokens = np.arange(19, dtype=np.uint32)
    right = FillRequest(
        round=1,
        ranks=Ranks(0, 1, 0, 1),
        imm=5,
        pool_pages=64,
        tail_offset=8,
        tail_bytes=4,
        request=b"r",
        print=fingerprint(LAYOUT),
        pool=lent(LAYOUT.pool_bytes(1, 64)),
        tails=lent(100),
        tokens=tokens,
        pages=tokens[:5],
    )
    changes: dict[str, dict[str, Any]] = {
        "right": {},
        "without-tail": {"tail_bytes": 0, "tails": b""},
        "of-four": {"ranks": Ranks(0, 1, 3, 4), "pool": lent(LAYOUT.pool_bytes(4, 64))},
        "no-lease": {"pool": lent(LAYOUT.pool_bytes(1, 64), lease=0, holder=bytes(16))},
        "read-only": {"tails": lent(100, writable=False)},
        "twice": {"pages": tokens[:5] // 2},
        "long": {
            "tokens": np.arange(1500, dtype=np.uint32),
            "pages": np.arange(375, dtype=np.uint32),
            "pool_pages": 400,
            "pool": lent(LAYOUT.pool_bytes(1, 400)),
        },
    }
    return {name: msgspec.structs.replace(right, **change) for name, change in changes.items()}
