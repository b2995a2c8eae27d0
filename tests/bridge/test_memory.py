"""Memory of hosts, registered once for all who hold it, and never where something else lies by now."""

from __future__ import annotations

import mmap
import random
import sys
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S
from support.engines.slow_registration import pinning
from support.service.bridges import bridge_to, value

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


@pytest.fixture
def bridge():
    with bridge_to(kept_bytes=1 << 20) as bridge:
        yield bridge


class Device:
    type = "cpu"


class Storage:
    """The part of torch's UntypedStorage that is used; memory that is resized moves."""

    def __init__(self, nbytes: int) -> None:
        self.resize_(nbytes)

    def resize_(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)

    def data_ptr(self) -> int:
        return self.bytes.ctypes.data if self.bytes.size else 0

    def nbytes(self) -> int:
        return self.bytes.nbytes


class Tensor:
    """A stand-in for a tensor of torch, whose dtype no protocol has a name for: bfloat16."""

    device = Device()

    def __init__(self, count: int, storage: Storage | None = None, offset: int = 0, step: int = 1) -> None:
        self.storage = storage or Storage(2 * count)
        self.count, self.offset, self.step = count, offset, step

    def __getitem__(self, item: slice) -> Tensor:
        start, stop, step = item.indices(self.count)
        return Tensor(len(range(start, stop, step)), self.storage, self.offset + start, step)

    def untyped_storage(self) -> Storage:
        return self.storage

    def storage_offset(self) -> int:
        return self.offset

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.step == 1

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False


def stand_in(count: int) -> Any:
    return Tensor(count)


def real(count: int) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.bfloat16)


TENSORS = [stand_in]
try:
    import torch  # noqa: F401 - the real ones are tried where there are any
except ImportError:
    pass
else:
    TENSORS.append(real)
each_tensor = pytest.mark.parametrize("tensor", TENSORS)


def test_memory_that_is_held_twice_is_registered_once(bridge):
    array = np.zeros(1000, np.float32)
    with bridges.acquire() as second:
        first = bridge.register(array)
        with second.register(array) as other:
            assert other.shared is first.shared
            assert other.descriptor == first.descriptor
            assert first.shared.holders == 2
        assert not first.region.closed
        first.close()
        assert first.shared.region.closed
        first.close()
    for use in (lambda: first.region, lambda: first.descriptor and first.region):
        with pytest.raises(aiote.ClosedError):
            use()


def test_access_and_writability_are_registrations_of_their_own(bridge):
    array = np.zeros(1000, np.uint8)
    seen = array.view()
    seen.setflags(write=False)
    found = [bridge.register(array), bridge.register(array, "read"), bridge.register(array, "local")]
    found.append(bridge.register(seen))
    assert len({each.shared for each in found}) == 4
    assert [each.region.access for each in found] == ["read-write", "read", "local", "read-write"]
    assert not found[3].region.writable
    with pytest.raises(aiote.UsageError, match="the region is local"):
        assert found[2].descriptor
    for each in found:
        each.close()


def test_closed_registrations_are_kept_only_where_no_peer_has_a_key(bridge):
    array = np.zeros(1000, np.uint8)
    kept, ended = bridge.register(array, "local"), bridge.register(array)
    kept.close()
    ended.close()
    assert ended.shared.region.closed
    assert not kept.shared.region.closed
    with bridge.register(array, "local") as again:
        assert again.shared is kept.shared
    bridge.trim()
    assert kept.shared.region.closed


def test_kept_registrations_are_bounded(bridge):
    arrays = [np.zeros(300 << 10, np.uint8) for _ in range(5)]
    regions = []
    for array in arrays:
        with bridge.register(array, "local") as registration:
            regions.append(registration.shared.region)
    assert [region.closed for region in regions] == [True, True, False, False, False]
    with bridge.register(np.zeros(2 << 20, np.uint8), "local") as large:
        pass
    assert large.shared.region.closed
    assert [region.closed for region in regions] == [True, True, False, False, False]


@pytest.mark.parametrize("access", ["local", "read-write"])
@pytest.mark.parametrize("make", [lambda: np.zeros(1 << 16, np.uint8), lambda: stand_in(1 << 15)])
def test_memory_that_was_freed_and_allocated_again_is_never_taken_for_the_old(bridge, access, make):
    """The allocator gives the same address again and again; what is kept stays alive, so its address is not given."""
    seen: dict[int, Any] = {}
    for number in range(200):
        memory = make()
        with bridge.register(memory, access) as registration:
            address, region = registration.shared.key[0], registration.shared.region
            bytes_seen = memoryview(registration.region)
            bytes_seen[:4] = number.to_bytes(4, "little")
            mine = memory.storage.bytes if isinstance(memory, Tensor) else memory
            assert bytes(mine[:4]) == number.to_bytes(4, "little")
            bytes_seen.release()
            assert seen.get(address) is not region, "the registration of memory that is gone"
            seen[address] = region
        del memory, mine
        if number % 50 == 49:
            bridge.trim()
    if access == "read-write":
        assert len(seen) < 200, "the allocator gave no address twice: this test has not tested anything"


@each_tensor
def test_views_share_the_registration_of_their_storage(bridge, tensor):
    whole = tensor(1000)
    with bridge.register(whole) as first, bridge.register(whole[100:300]) as view, bridge.register(whole[0:0]) as empty:
        assert first.shared is view.shared is empty.shared
        assert (len(first.region), len(view.region), len(empty.region)) == (2000, 400, 0)
        memoryview(view.region)[:] = b"v" * 400
        assert bytes(memoryview(first.region)) == bytes(200) + b"v" * 400 + bytes(1400)
        assert view.descriptor != first.descriptor


@each_tensor
def test_a_views_descriptor_opens_the_view_alone(bridge, tensor):
    with bridge_to() as _, bridge.register(tensor(1000)[100:300]) as view:

        async def attach() -> int:
            async with aiote.open_engine("local") as peer:
                remote = peer.attach(view.descriptor)
                source = peer.register(b"w" * len(remote))
                await peer.write(source, remote)
                return len(remote)

        assert bridge.call(attach()) == 400
        assert bytes(memoryview(view.region)) == b"w" * 400


@each_tensor
def test_a_tensor_that_is_not_in_a_row_is_refused(bridge, tensor):
    with pytest.raises(aiote.UsageError, match=r"register what .contiguous\(\) returns"):
        bridge.register(tensor(100)[::2])


@each_tensor
def test_a_storage_that_was_resized_is_registered_anew(bridge, tensor):
    """As FSDP frees what it has gathered: the tensor lives on, its memory does not."""
    held = tensor(1000)
    with bridge.register(held, "local") as registration:
        old = registration.shared.region
    storage = held.untyped_storage()
    size = storage.nbytes()
    key = registration.shared.key
    storage.resize_(0)
    with pytest.raises(aiote.UsageError, match="the tensor has no memory"):
        bridge.register(held, "local")
    storage.resize_(size)
    with bridge.register(held, "local") as again:
        # At the same place it is as good as before, where no NIC pins pages.
        assert (again.shared.region is old) == (storage.data_ptr() == key[0])


def test_memory_that_has_moved_loses_its_place(bridge):
    """Two storages, the second of which lies where the first one was."""
    first, second = Tensor(1000), Tensor(1000)
    with bridge.register(first, "local") as registration:
        kept = registration.shared.region
    second.storage.bytes, first.storage.bytes = first.storage.bytes, second.storage.bytes
    with bridge.register(second, "local") as other:
        assert other.shared.region is not kept
        assert kept.closed
    assert not other.shared.region.closed


class Exported:
    """Memory that is shown by `__array_interface__` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__


class Packed:
    """Memory that is shown by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize(
    "show", [lambda a: a, memoryview, Exported, Packed, lambda a: a.reshape(10, 100).T], ids=lambda f: f.__name__
)
def test_every_way_to_show_memory_leads_to_one_registration(bridge, show):
    array = np.zeros(1000, np.uint8)
    with bridge.register(array) as plain, bridge.register(show(array)) as shown:
        assert shown.shared is plain.shared
        memoryview(shown.region)[3:5] = b"ab"
        assert bytes(array[3:5]) == b"ab"


@pytest.mark.parametrize("what", [None, 5, "text", np.zeros(0), np.zeros(10)[::2]], ids=repr)
def test_objects_without_memory_in_one_piece_are_refused(bridge, what):
    with pytest.raises(aiote.UsageError, match="^register: "):
        bridge.register(what)
    assert bridge.call(value(1)) == 1


def test_a_closed_registration_frees_what_it_was_of(bridge):
    memory = mmap.mmap(-1, 1 << 16)
    registration = bridge.register(memory)
    with pytest.raises(BufferError):
        memory.close()
    registration.close()
    memory.close()


def test_a_bridge_that_is_closed_lets_go_of_what_it_held(bridge):
    array = np.zeros(1000, np.uint8)
    with bridges.acquire() as second:
        held = [second.register(array), second.register(array, "local"), bridge.register(array)]
    assert held[0].shared is held[2].shared
    assert held[2].shared.holders == 1
    assert not held[2].region.closed
    with pytest.raises(aiote.ClosedError):
        assert held[0].region
    held[0].close()
    assert held[2].shared.holders == 1
    held[2].close()


def test_many_threads_that_hold_the_same_memory_share_one_registration(bridge):
    """Of each array one registration at a time, whoever comes and goes."""
    arrays = [np.zeros(100_000 + 64 * number, np.uint8) for number in range(6)]
    together = threading.Barrier(8)

    def hold(seed: int) -> None:
        rng = random.Random(seed)
        together.wait(PATIENCE_S)
        mine = []
        for _ in range(150):
            if mine and rng.random() < 0.5:
                mine.pop(rng.randrange(len(mine))).close()
            else:
                array = rng.choice(arrays)
                mine.append(bridge.register(array, rng.choice(["local", "read-write"])))
                assert mine[-1].shared.key[0] == array.ctypes.data
            assert not any(each.region.closed for each in mine)
        for each in mine:
            each.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(8)))

    async def counted() -> tuple[int, int]:
        table = bridge._thread.memory._table
        return table.in_use, table.idle_bytes

    in_use, idle_bytes = bridge.call(counted())
    assert in_use == 0
    assert idle_bytes <= 1 << 20
    # Nothing but what is kept refers to the arrays any more: a reference each of ours, and of getrefcount.
    bridge.trim()
    assert {sys.getrefcount(array) for array in arrays} == {3}


def test_memory_that_takes_long_to_pin_is_pinned_once_and_holds_up_nobody(bridge):
    array = np.zeros(1000, np.uint8)

    async def slow() -> Any:
        return pinning(bridge.engine)

    device = bridge.call(slow())
    with ThreadPoolExecutor(4) as pool:
        registering = [pool.submit(bridge.register, array) for _ in range(4)]
        assert device.begun.wait(PATIENCE_S)
        assert bridge.call(value(1)) == 1
        device.end()
        found = [each.result(PATIENCE_S) for each in registering]
    assert len({one.shared for one in found}) == 1
    assert found[0].shared.holders == 4
    for one in found:
        one.close()


def test_a_pinning_that_fails_leaves_nothing_behind(bridge):
    array = np.zeros(1000, np.uint8)

    async def slow() -> Any:
        return pinning(bridge.engine)

    device = bridge.call(slow())
    device.end(fails=True)
    with pytest.raises(aiote.FabricError):
        bridge.register(array)
    with bridge.register(array) as registration:
        assert registration.shared.holders == 1


def test_an_interrupted_registration_is_taken_back(bridge):
    array = np.zeros(1000, np.uint8)

    async def slow() -> Any:
        return pinning(bridge.engine)

    device = bridge.call(slow())
    call = bridge.submit(bridge.register_async(array))
    assert device.begun.wait(PATIENCE_S)
    call.cancel()
    device.end()
    assert futures.wait([call], PATIENCE_S).done
    assert call.cancelled()
    with bridge.register(array) as registration:
        assert registration.shared.holders == 1
