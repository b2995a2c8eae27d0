"""aiote.connectors.ray without Ray and torch: what it does with what Ray asks, over a real engine.

Stand-ins have what the connector uses of the two; the real ones are in tests/hosts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import aiote
from bridges import aside, bridge_to
from engines import PATIENCE_S
from tensors import Tensor, tensor


@dataclass
class Metadata:
    tensor_meta: list[Any]
    tensor_device: str | None


class Fetch:
    def __init__(self, obj_id: str, tensors: Any) -> None:
        self.obj_id, self.tensors = obj_id, tensors


class TransportError(Exception):
    """Ray's."""


def stand_ins() -> dict[str, ModuleType]:
    """What the connector imports of its hosts."""
    contents: dict[str, dict[str, Any]] = {
        "torch": {"Tensor": Tensor},
        "ray": {},
        "ray.exceptions": {"RayDirectTransportError": TransportError},
        "ray.experimental": {"register_tensor_transport": lambda *_: None},
        "ray.experimental.rdt": {},
        "ray.experimental.rdt.tensor_transport_manager": {
            "CommunicatorMetadata": type("CommunicatorMetadata", (), {}),
            "FetchRequest": Fetch,
            "TensorTransportManager": object,
            "TensorTransportMetadata": Metadata,
        },
        "ray.experimental.rdt.util": {
            "create_empty_tensors_from_metadata": lambda found: [tensor(shape[0]) for shape, _ in found.tensor_meta],
            "transport_manager_info": {},
        },
    }
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
    return made


@pytest.fixture
def ray(monkeypatch) -> Iterator[Any]:
    """The connector's module, as it is with stand-ins for its hosts."""
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "aiote.connectors.ray", raising=False)
    yield importlib.import_module("aiote.connectors.ray")
    sys.modules.pop("aiote.connectors.ray", None)


@pytest.fixture
def transport(ray) -> Iterator[Any]:
    with bridge_to() as bridge:
        made = ray.AioteTensorTransport()
        yield made
        if made._bridge is not None:
            aside(made._bridge.close)
        assert not bridge.closed


def registered(transport: Any) -> int:
    """How many registrations the engine has."""
    return len(transport.bridge._thread.memory._table)


def test_registrations_are_none_after_garbage_collection(transport):
    before = registered(transport)
    found = aside(transport.extract_tensor_transport_metadata, "a", [tensor(100), tensor(0), tensor(200)])
    assert [bool(one) for one in found.descriptors] == [True, False, True]
    assert (transport.registrations, registered(transport)) == (2, before + 2)
    for _ in range(2):
        aside(transport.garbage_collect, "a", found, [])
        assert (transport.registrations, registered(transport)) == (0, before)


def test_an_object_that_is_made_again_keeps_its_registrations(transport):
    first = aside(transport.extract_tensor_transport_metadata, "a", [tensor(100)])
    assert aside(transport.extract_tensor_transport_metadata, "a", [tensor(100)]) is first
    assert transport.registrations == 1
    aside(transport.garbage_collect, "a", first, [])


def test_an_object_of_which_one_tensor_is_refused_leaves_nothing_registered(transport):
    before = registered(transport)
    refused = tensor(10)
    refused.numel = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        aside(transport.extract_tensor_transport_metadata, "a", [tensor(100), refused])
    assert (transport.registrations, registered(transport)) == (0, before)


@pytest.mark.parametrize("descriptors", [[b"junk"], [b"\xff" * 200], [b"a", b"b"], []], ids=range(4))
def test_a_malformed_descriptor_fails_its_fetch_and_no_other(transport, ray, descriptors):
    metadata = ray.AioteMetadata([((10,), "uint8")], "cpu", descriptors)
    with pytest.raises(TransportError, match="the fetch of a failed"):
        aside(transport.recv_multiple_tensors, "a", metadata, None)
    assert transport._calls == {}
    nothing = ray.AioteMetadata([((10,), "uint8")], "cpu", [b""])
    assert len(aside(transport.recv_multiple_tensors, "a", nothing, None)) == 1


def test_an_abort_before_the_fetch_ends_the_next_one_alone(transport, ray):
    nothing = ray.AioteMetadata([((10,), "uint8")], "cpu", [b""])
    aside(transport.abort_transport, "a", None)
    with pytest.raises(TransportError, match="aborted before it began"):
        aside(transport.recv_multiple_tensors, "a", nothing, None)
    assert len(aside(transport.recv_multiple_tensors, "a", nothing, None)) == 1


def test_aborts_that_nobody_fetches_after_are_forgotten(transport, ray):
    for number in range(ray.MAX_ABORTED + 5):
        transport.abort_transport(str(number), None)
    assert len(transport._aborted) == ray.MAX_ABORTED


@pytest.mark.parametrize("how", ["abort_transport", "dropped"])
def test_a_fetch_that_is_given_up_ends(transport, ray, monkeypatch, how):
    async def never(*_: Any, **__: Any) -> None:
        await ray.anyio.sleep_forever()

    monkeypatch.setattr(transport, "_read", never)
    nothing = ray.AioteMetadata([((10,), "uint8")], "cpu", [b""])
    fetch = aside(transport.fetch_multiple_tensors, "a", nothing, None)
    call = fetch.call
    if how == "abort_transport":
        with pytest.raises(TimeoutError, match="was not fetched within 0 s"):
            aside(transport.wait_fetch_complete, fetch, 0)
        aside(transport.abort_transport, "a", None)
        with pytest.raises(TransportError, match="was aborted"):
            aside(transport.wait_fetch_complete, fetch, 20)
    else:
        del fetch
    with pytest.raises(ray.futures.CancelledError):
        aside(call.result, 20)
    assert transport._calls == {}


def test_a_callback_that_would_wait_for_a_fetch_is_refused(transport, ray, monkeypatch):
    never = ray.AioteMetadata([((10,), "uint8")], "cpu", [b"x"])
    nothing = ray.AioteMetadata([((10,), "uint8")], "cpu", [b""])
    reading = transport._read

    async def read(bridge: Any, tensors: Any, descriptors: list[bytes], again: bool) -> None:
        await (ray.anyio.sleep_forever() if descriptors == [b"x"] else reading(bridge, tensors, descriptors, again))

    monkeypatch.setattr(transport, "_read", read)
    other, told = aside(transport.fetch_multiple_tensors, "other", never, None), ray.futures.Future()

    def callback(_: object) -> None:
        try:
            told.set_result(transport.wait_fetch_complete(other))
        except BaseException as error:
            told.set_exception(error)

    aside(transport.fetch_multiple_tensors, "a", nothing, None).call.add_done_callback(callback)
    with pytest.raises(aiote.UsageError, match="the bridge's own thread"):
        told.result(PATIENCE_S)
    aside(transport.abort_transport, "other", None)


def test_a_refused_tensor_is_named_with_what_to_do(transport):
    two = tensor(12).reshape(3, 4).T
    two.stride = lambda: (1, 4)
    with pytest.raises(ValueError, match=r"tensor 1, of shape \(4, 3\), has strides \(1, 4\): return \.contiguous\(\)"):
        aside(transport.extract_tensor_transport_metadata, "a", [tensor(3), two])
    elsewhere = tensor(3)
    elsewhere.device = SimpleNamespace(type="cuda")
    with pytest.raises(ValueError, match=r"tensor 0 is on .*: return \.cpu\(\)"):
        aside(transport.extract_tensor_transport_metadata, "a", [elsewhere])
