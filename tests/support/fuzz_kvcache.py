"""What is fuzzed of the KV cache: what members, registries, decoders and prefillers say, and what comes from etcd.

The targets `registry`, `member` and `transfer` take one message. `assembler` takes a program: steps of an `Op` and a
source, then a 16-bit length and that many bytes; what `Op.PART` makes of ten bytes is a frame of full length, so that
the limits are within reach of short inputs. `etcd` takes a byte that chooses the status, and what the gateway answers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from aiote.discovery import wire as registry_wire
from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.etcd_gateway import EtcdError, Lines, checked, packed
from aiote.discovery.membership import Member
from aiote.discovery.wire import Announce, Answer, Entry, Leave, Subscribe, Update
from aiote.kvcache import transferwire
from aiote.kvcache.transferwire import Accepted, Assembler, Cancel, Ended, Fill, Queued, Ranks
from aiote.service.reading import WireError

STATUSES = (200, 400, 401, 403, 404, 500, 503)
PREFIX = b"m/"
MESSAGES, NBYTES = 8, 1 << 16
"""What an assembler holds of a peer here: less than in earnest, for short inputs to come there."""
_PART = struct.Struct(">BBIHB")


class Op(IntEnum):
    """What a peer does next; a number beyond these is taken modulo their count."""

    RAW = 0  # a frame as it is
    PART = 1  # a frame of full length: kind, number, total, which part, and the first byte of it
    LOST = 2  # the peer goes


class Source:
    """Somebody who sends frames."""


def registry(data: bytes) -> None:
    """Decode one message of the embedded registry."""
    try:
        found = registry_wire.decode(data)
    except WireError:
        return
    assert registry_wire.encode(found) == data


def member(data: bytes) -> None:
    """Decode a member that stands by itself."""
    try:
        found = registry_wire.decode_member(data)
    except WireError:
        return
    assert registry_wire.encode_member(found) == data


def transfer(data: bytes) -> None:
    """Decode one message between a decoder and a prefiller."""
    try:
        found = transferwire.decode(data)
    except WireError:
        return
    assert transferwire.encode(found) == data


def assembler(data: bytes) -> None:
    """Feed an assembler frames of four peers; it holds no more of each than it says."""
    sources, tested, at = [Source() for _ in range(4)], Assembler(MESSAGES, NBYTES), 0
    while at < len(data):
        op, who = Op(data[at] % len(Op)), data[at] >> 6
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        body, at = data[at + 3 : stop], stop
        if op is Op.LOST:
            tested.forget(sources[who])
            sources[who] = Source()
            continue
        frame = part(body) if op is Op.PART else body
        _feed(tested, sources[who], frame)
        held = tested._open.get(sources[who], {})
        assert len(held) <= MESSAGES
        assert sum(len(one) for entry in held.values() for one in entry.parts.values()) <= NBYTES


def part(body: bytes) -> bytes:
    """Return the frame that a step `PART` stands for."""
    kind, number, total, place, first = _PART.unpack(body[: _PART.size].ljust(_PART.size, b"\0"))
    start = place * transferwire._PART
    size = max(0, min(transferwire._PART, total - start))
    head = transferwire._FRAME.pack(kind, transferwire.VERSION, number, total, start)
    return head + bytes((first,)).ljust(size, b"\0")


def _feed(tested: Assembler, source: Source, frame: bytes) -> None:
    try:
        found = tested.feed(source, frame)
    except WireError:
        return
    if found is not None:
        number = transferwire._FRAME.unpack_from(frame)[2]
        assert frame in transferwire.frames(transferwire.encode(found), number)


def etcd(data: bytes) -> None:
    """Take what a gateway streams, in chunks or at once, as pages and as news."""
    status, content = (STATUSES[data[0] % len(STATUSES)], data[1:]) if data else (200, b"")
    size = max(1, data[0]) if data else 1
    lines, reader, whole = [], Lines(), Lines()
    for at in range(0, len(content), size):
        lines += reader.feed(content[at : at + size])
    assert lines == whole.feed(content)
    here = EtcdRegistry("http://etcd", prefix=PREFIX.decode())
    for line in (*lines, content):
        try:
            answer = checked("/p", status, line)
        except EtcdError as error:
            assert len(str(error)) < 1000
            continue
        for take in (lambda answer: here._take_page(answer, {}, 0), lambda answer: here._apply_watch(answer, 7)):
            try:
                take(answer)
            except EtcdError as error:
                assert len(str(error)) < 1000
    for name, known in here._roster.known.items():
        assert known.name == name
        assert registry_wire.decode_member(registry_wire.encode_member(known)) == known


KVCACHE: dict[str, Callable[[bytes], None]] = {
    function.__name__: function for function in (registry, member, transfer, assembler, etcd)
}


# Seeds.


def kvcache_seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of these targets: target, name, bytes."""
    messages = _messages()
    return {
        "registry": {type(one).__name__.lower(): registry_wire.encode(one) for one in _registry_messages()},
        "member": {name: registry_wire.encode_member(one) for name, one in _members().items()},
        "transfer": {name: transferwire.encode(one) for name, one in messages.items()},
        "assembler": _programs(messages),
        "etcd": _answers(),
    }


def _members() -> dict[str, Member]:
    attributes = {"load": 3, "share": 0.5, "draining": True, "model": "m"}
    return {"bare": Member("a", "prefill", b"", 0), "whole": Member("b", "decode", b"address", 7, attributes)}


def _registry_messages() -> list[Announce | Leave | Subscribe | Update]:
    bare, whole = _members().values()
    entries = (Entry("a", 1000, bare), Entry("b", 2000, whole), Entry("c", 0, None))
    return [
        Announce(1, 2, 3000, whole),
        Leave(1, "a", 2),
        Subscribe(1, 2, 3000),
        Update(1, 2, 3, 4, 5, True, (Answer("a", 1), Answer("b", 2, "no")), entries),
    ]


def _messages() -> dict[str, transferwire.Message]:
    def fill(tokens: int) -> Fill:
        numbers = np.arange(tokens, dtype=np.uint32)
        places = {"imm": 5, "pool_pages": 64, "tail_offset": 8, "tail_bytes": 4}
        blobs = {"request": b"r", "print": bytes(16), "pool": b"pool", "tails": b"tails"}
        return Fill(serial=1, round=2, ranks=Ranks(0, 2, 1, 4), **places, **blobs, tokens=numbers, pages=numbers[:3])

    return {
        "fill": fill(5),
        "long-fill": fill(10_000),  # three frames
        "cancel": Cancel(1),
        "accepted": Accepted(2),
        "queued": Queued(4),
        "ended": Ended(3, "why"),
    }


def step(op: Op, body: bytes = b"", who: int = 0) -> bytes:
    """Return the bytes of one step of `assembler`."""
    choice = next(value for value in range(who << 6, 1 << 8) if Op(value % len(Op)) is op)
    return bytes((choice,)) + len(body).to_bytes(2, "big") + body


def _programs(messages: dict[str, transferwire.Message]) -> dict[str, bytes]:
    cut = {name: list(transferwire.frames(transferwire.encode(one), 9)) for name, one in messages.items()}
    found = {name: b"".join(step(Op.RAW, frame) for frame in frames) for name, frames in cut.items()}
    backwards = cut["long-fill"][::-1]
    return found | {
        "backwards": b"".join(step(Op.RAW, frame) for frame in backwards),
        "twice": b"".join(step(Op.RAW, frame) for frame in backwards[:2] * 2),
        "other-kind": b"".join(step(Op.RAW, frame) for frame in (*backwards[:2], b"\xe3" + backwards[2][1:])),
        "other-kind-last": b"".join(
            step(Op.RAW, frame) for frame in (*cut["long-fill"][:2], b"\xe3" + backwards[0][1:])
        ),
        "lost": step(Op.RAW, backwards[0]) + step(Op.LOST) + b"".join(step(Op.RAW, frame) for frame in backwards),
        "many": b"".join(step(Op.PART, _PART.pack(0xE2, number, 1 << 20, 1, 0)) for number in range(20)),
        "large": b"".join(step(Op.PART, _PART.pack(0xE2, place % 2, 1 << 20, place, 1)) for place in range(40)),
    }


def _answers() -> dict[str, bytes]:
    def kv(name: str, one: Member) -> dict[str, str]:
        value = packed(registry_wire.encode_member(one))
        return {"key": packed(PREFIX + name.encode()), "value": value, "mod_revision": "8", "lease": "1"}

    bare, whole = _members().values()
    kvs = [kv("a", bare), kv("b", whole), kv("c", bare)]
    header = {"revision": "9"}
    events = [{"kv": kvs[0]}, {"type": "DELETE", "kv": {"key": kvs[1]["key"], "mod_revision": "9"}}]
    said = {
        "page": {"header": header, "kvs": kvs, "more": True, "count": "3"},
        "created": {"result": {"header": header, "created": True}},
        "events": {"result": {"header": header, "events": events}},
        "compacted": {"result": {"header": header, "canceled": True, "compact_revision": "5"}},
        "refused": {"error": "etcdserver: permission denied", "message": "permission denied", "code": 7},
        "stream-error": {"error": {"grpc_code": 11, "http_code": 400, "message": "compacted"}},
    }
    found = {name: bytes((4 if "ref" in name else 7,)) + json.dumps(one).encode() + b"\n" for name, one in said.items()}
    return found | {"stream": b"\7" + b"".join(found[name][1:] for name in ("created", "events", "compacted"))}
