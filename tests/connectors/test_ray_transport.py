"""aiote.connectors.ray without Ray and torch: what it does with what Ray asks, over a real engine.

Stand-ins have what the connector uses of the two; the real ones are in programs/hosts.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiote
from support.connectors.tensors import Tensor, tensor
from support.engines.opening import PATIENCE_S
from support.process.interrupts import Interrupts
from support.service.bridges import Stubborn, Work, aside, bridge_to, memory_elsewhere, value

UINT8 = np.dtype(np.uint8)


@dataclass
class Metadata:
    tensor_meta: list[Any]
    tensor_device: str | None


class Fetch:
    def __init__(self, obj_id: str, tensors: Any) -> None:
        self.obj_id, self.tensors = obj_id, tensors


class TransportError(Exception):
    """Ray's."""


class Lent:
    """Memory that keeps the array it was made of, as torch's storages do; a view of NumPy keeps only its base."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__


def stand_ins() -> dict[str, ModuleType]:
    """What the connector imports of its hosts."""
    contents: dict[str, dict[str, Any]] = {
        "torch": {
            "Tensor": Tensor,
            "dtype": np.dtype,
            "empty": lambda shape, dtype: np.empty(shape, dtype).view(Tensor),
            "from_numpy": lambda array: np.asarray(Lent(array)).view(Tensor),
        },
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


def nothing_left(transport: Any) -> None:
    """Check that every fetch has ended, and that another one comes."""
    for _ in range(100):
        # What was interrupted may be garbage by now, and is ended by that; and who waits for a fetch is woken before
        # its callbacks run.
        gc.collect()
        transport.bridge.call(value(1))
        if not transport._calls and not transport.bridge._thread.calls_of(transport.bridge):
            return
    raise AssertionError(transport._calls)


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
    metadata = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", descriptors)
    with pytest.raises(TransportError, match="the fetch of a failed"):
        aside(transport.recv_multiple_tensors, "a", metadata, None)
    nothing_left(transport)
    nothing = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
    assert len(aside(transport.recv_multiple_tensors, "a", nothing, None)) == 1


def test_an_abort_before_the_fetch_ends_the_next_one_alone(transport, ray):
    nothing = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
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
    nothing = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
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
    nothing_left(transport)


def test_large_tensors_are_fetched_into_memory_that_nobody_has(transport, ray):
    nbytes = 3 << 20
    with memory_elsewhere("local", nbytes) as (descriptor, theirs, _):
        metadata = ray.AioteTransportMetadata([((3, nbytes // 3), UINT8)], "cpu", [descriptor])

        def fetch(mark: int) -> Any:
            theirs[:] = mark
            (found,) = aside(transport.recv_multiple_tensors, str(mark), metadata, None)
            assert found.shape == (3, nbytes // 3)
            assert found.min() == found.max() == mark
            return found

        first = fetch(1)
        address, held = first.data_ptr(), first[1:, 5:]
        del first
        # A view keeps its memory from the next fetch.
        second = fetch(2)
        assert second.data_ptr() != address
        assert held.min() == held.max() == 1
        regions = transport.bridge.engine.statistics().regions
        del held
        gc.collect()
        third = fetch(3)
        assert third.data_ptr() == address
        assert second.min() == second.max() == 2
        assert transport.bridge.engine.statistics().regions == regions


def test_memory_of_a_fetch_that_was_given_up_is_free_once_the_fetch_has_ended(transport, ray, monkeypatch):
    nbytes, stubborn = 1 << 20, Stubborn()
    monkeypatch.setattr(transport, "_read_one", lambda *_: stubborn.run())
    metadata = ray.AioteTransportMetadata([((nbytes,), UINT8)], "cpu", [b"x"])
    fetch = aside(transport.fetch_multiple_tensors, "a", metadata, None)
    address = fetch.tensors[0].data_ptr()
    stubborn.until(stubborn.begun)
    del fetch
    stubborn.until(stubborn.cancelled)
    gc.collect()
    during = transport.memory.borrow(nbytes)[0]
    assert during.ctypes.data != address
    stubborn.may_end.set()
    nothing_left(transport)
    gc.collect()
    assert transport.memory.borrow(nbytes)[0].ctypes.data == address


def test_a_callback_that_would_wait_for_a_fetch_is_refused(transport, ray, monkeypatch):
    never = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b"x"])
    nothing = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
    reading, may_read = transport._read, threading.Event()

    async def read(bridge: Any, tensors: Any, descriptors: list[bytes], again: bool) -> None:
        # The callback is added before this ends: one of what has ended runs on its caller's thread.
        while descriptors != [b"x"] and not may_read.is_set():
            await ray.anyio.sleep(0.001)
        await (ray.anyio.sleep_forever() if descriptors == [b"x"] else reading(bridge, tensors, descriptors, again))

    monkeypatch.setattr(transport, "_read", read)
    other, told = aside(transport.fetch_multiple_tensors, "other", never, None), ray.futures.Future()

    def callback(_: object) -> None:
        try:
            told.set_result(transport.wait_fetch_complete(other))
        except BaseException as error:
            told.set_exception(error)

    aside(transport.fetch_multiple_tensors, "a", nothing, None).call.add_done_callback(callback)
    may_read.set()
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


def interrupted_everywhere(function: Callable[[], object], after: Callable[[int], None]) -> int:
    """Interrupt a call at each of its steps, as a signal handler can, and check each time; return how many it has."""

    def tried(at: int) -> bool:
        steps = Interrupts(at)
        try:
            with steps.armed():
                function()
        except KeyboardInterrupt:
            pass
        after(at)
        return steps.happened

    return next(at for at in itertools.count() if not aside(tried, at))


@pytest.mark.parametrize("how", ["recv", "fetch and wait"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_fetch_that_is_interrupted_at_any_step_is_over(transport, ray, monkeypatch, how):
    metadata = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
    works: list[Work] = []

    def fetch() -> None:
        works.append(work := Work())
        monkeypatch.setattr(transport, "_read", lambda *_, **__: work.run())
        if how == "recv":
            transport.recv_multiple_tensors("a", metadata, None)
        else:
            transport.wait_fetch_complete(transport.fetch_multiple_tensors("a", metadata, None))

    def after(at: int) -> None:
        at_once = works[-1].begun, works[-1].ended
        nothing_left(transport)
        if how == "recv":
            assert at_once in ((False, False), (True, True)), f"at step {at} it goes on"
            assert (works[-1].begun, works[-1].ended) == at_once, f"at step {at} it begins later"
        else:
            # What was begun and not waited for ends when its request is dropped, which the interruption did.
            assert works[-1].ended or not works[-1].begun, f"at step {at} it goes on"

    assert interrupted_everywhere(fetch, after) > 20


@pytest.mark.filterwarnings("ignore:.*was garbage-collected without close:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_object_whose_registration_is_interrupted_is_registered_whole_or_not(transport):
    before = registered(transport)

    def register() -> None:
        transport.extract_tensor_transport_metadata("a", [tensor(100), tensor(0), tensor(200)])

    def after(at: int) -> None:
        assert transport.registrations in (0, 2), f"at step {at}"
        transport.garbage_collect("a", None, [])
        for _ in range(100):
            # One that was interrupted before it was returned is dropped, and ended on the bridge's thread.
            nothing_left(transport)
            if registered(transport) == before:
                return
        raise AssertionError(f"at step {at}: {registered(transport)} registrations, expected {before}")

    assert interrupted_everywhere(register, after) > 20


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_what_is_interrupted_when_it_ends_can_be_ended_again(transport, ray, monkeypatch):
    before = registered(transport)

    def prepare() -> None:
        transport.extract_tensor_transport_metadata("a", [tensor(100), tensor(200)])

    def collect() -> None:
        transport.garbage_collect("a", None, [])

    def after(at: int) -> None:
        collect()
        assert (transport.registrations, registered(transport)) == (0, before), f"at step {at}"
        prepare()

    aside(prepare)
    assert interrupted_everywhere(collect, after) > 5
    aside(collect)


def test_an_abort_that_is_interrupted_can_be_made_again(transport, ray, monkeypatch):
    async def never(*_: Any, **__: Any) -> None:
        await ray.anyio.sleep_forever()

    monkeypatch.setattr(transport, "_read", never)
    metadata = ray.AioteTransportMetadata([((10,), UINT8)], "cpu", [b""])
    fetches = [aside(transport.fetch_multiple_tensors, "a", metadata, None)]

    def abort() -> None:
        transport.abort_transport("a", None)

    def after(at: int) -> None:
        # The first may have ended it.
        abort()
        with pytest.raises(TransportError, match="was aborted"):
            transport.wait_fetch_complete(fetches[-1], PATIENCE_S)
        nothing_left(transport)
        transport._aborted.clear()
        fetches.append(transport.fetch_multiple_tensors("a", metadata, None))

    assert interrupted_everywhere(abort, after) > 5
    aside(abort)
