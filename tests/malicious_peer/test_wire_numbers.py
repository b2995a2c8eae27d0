"""Every number that another process may say has bounds in the type that decodes it, and every list a most length: none
is NaN or infinite where it is used, and nothing goes through more than was expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_origin

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from aiote import service
from aiote.connectors.bucket_broadcast import Exchange, Feed
from aiote.connectors.vllm.requests import Remote
from aiote.discovery.registry_server import Keeping, Watching
from aiote.discovery.wire import MemberRecord
from aiote.kvcache.group import Worker
from aiote.kvcache.protocol import Transfers
from aiote.moe.joining import MoeService
from aiote.service.definition import methods_of
from aiote.service.frames import MAX_LEFT_S, CallFrame, Frame, pack, unpack
from aiote.service.server import Health, _Health
from aiote.weights.protocol import SourceService, TargetService
from aiote.weights.source import _ServedSource
from aiote.weights.target import _ServedTarget

SERVED = (Exchange, _Health, Keeping, MoeService, _ServedSource, _ServedTarget, Transfers, Watching, Worker)
CALLED = (Feed, Health, SourceService, TargetService)
SERVICES = (*SERVED, *CALLED)
UNSIGNED_64 = "MemberRecord.incarnation"
"""MessagePack has no larger integer, and msgspec no bound so large; `Member` checks it after JSON."""


NUMBERLESS = {"BoolType", "BytesType", "EnumType", "ExtType", "LiteralType", "NoneType", "StrType"}
"""What msgspec describes that has no number: whatever is added to it is looked at before."""


def parts_of(kind: Any, where: str = "") -> Iterator[tuple[Any, str]]:
    """Yield a type as msgspec describes it, and all types within it, each with its place."""
    yield kind, where
    inner: list[tuple[Any, str]] = []
    match kind:
        case inspect.StructType():
            inner = [(field.type, f"{kind.cls.__name__}.{field.name}") for field in kind.fields]
        case inspect.UnionType():
            inner = [(one, where) for one in kind.types]
        case inspect.DictType():
            inner = [(kind.key_type, f"{where} (key)"), (kind.value_type, where)]
        case inspect.TupleType():
            inner = [(one, where) for one in kind.item_types]
        case inspect.CollectionType():
            inner = [(kind.item_type, where)]
        case inspect.Metadata():
            inner = [(kind.type, where)]
    for one, place in inner:
        yield from parts_of(one, place)


COMPOUND = (inspect.StructType, inspect.UnionType, inspect.TupleType, inspect.DictType, inspect.CollectionType,
            inspect.Metadata)  # fmt: skip


def unbounded(kind: Any) -> Iterator[str]:
    """Yield the places of numbers without bounds in a type, and of types that the other tests do not know."""
    for part, where in parts_of(kind):
        match part:
            case inspect.IntType() | inspect.FloatType():
                low, high = (part.ge, part.gt), (part.le, part.lt)
                if low == (None, None) or (high == (None, None) and where != UNSIGNED_64):
                    yield where
            case inspect.CustomType() if get_origin(part.cls) is np.ndarray or part.cls is np.ndarray:
                # Of any length: who uses its numbers bounds them all at once (`check_rows`, `places_of`, `unpacked`).
                pass
            case _ if not isinstance(part, COMPOUND) and type(part).__name__ not in NUMBERLESS:
                yield f"{where}: {type(part).__name__}"


def found_in(*kinds: Any) -> list[str]:
    return [place for kind in kinds for place in unbounded(inspect.type_info(kind))]


@pytest.mark.parametrize("served", SERVICES, ids=lambda one: one.__name__)
def test_every_number_of_a_service_has_bounds(served):
    for method in methods_of(served):
        assert not found_in(method.arguments, method.read_result.type), method


def endless(kind: Any) -> Iterator[str]:
    """Yield the places of lists, sets and mappings of any length in a type."""
    for part, where in parts_of(kind):
        if isinstance(part, inspect.DictType | inspect.CollectionType) and part.max_length is None:
            yield where


@pytest.mark.parametrize("served", SERVICES, ids=lambda one: one.__name__)
def test_every_list_of_a_service_has_a_most_length(served):
    for method in methods_of(served):
        for kind in (method.arguments, method.read_result.type):
            assert not list(endless(inspect.type_info(kind))), method


def test_every_list_of_records_has_a_most_length():
    assert not [place for kind in (MemberRecord, Remote) for place in endless(inspect.type_info(kind))]


def test_every_number_of_frames_and_records_has_bounds():
    assert not found_in(Frame, MemberRecord, Remote)


def test_a_number_without_bounds_is_found():
    class Loose(service.Service):
        @service.method
        async def take(self, number: int, several: dict[str, list[float]]) -> tuple[int, ...]:
            raise NotImplementedError

    (method,) = methods_of(Loose)
    assert found_in(method.arguments) == ["take.number", "take.several"]
    assert found_in(method.read_result.type) == [""]
    assert list(endless(inspect.type_info(method.arguments))) == ["take.several", "take.several"]
    assert list(endless(inspect.type_info(method.read_result.type))) == [""]


@pytest.mark.parametrize("left", [math.nan, math.inf, -math.inf, -0.1, 2 * MAX_LEFT_S])
def test_a_deadline_that_no_timer_takes_is_no_frame(left):
    with pytest.raises(ValueError, match="not frames of calls: Expected `float`"):
        unpack(pack([CallFrame(0, 1, "X/1.x", left, b"\x90", [])]))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1 << 63])
def test_an_attribute_out_of_range_is_no_member(value):
    body = msgspec.msgpack.encode(
        {"name": "a", "role": "r", "address": b"", "incarnation": 1, "attributes": {"k": value}}
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=MemberRecord)
