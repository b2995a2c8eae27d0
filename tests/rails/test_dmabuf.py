"""Memory of GPUs by DMA-BUF: what its owner's driver is asked, what a NIC is told, and what is said where it cannot be.

No machine of the tests has both a GPU and a NIC that reaches it. Here the drivers are libraries of one function, and
the NIC that takes a DMA-BUF is one that writes down what it was given; soft-RoCE, which refuses, is asked for real.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import aiote
from aiote.errors import FabricError, UsageError
from aiote.rails import dmabuf, gpu_memory
from aiote.rails.contract import Traits
from aiote.rails.dmabuf import DmaBuf, export_dmabuf
from aiote.rails.gpu_memory import register_gpu
from aiote_native.cuda.driver import load
from aiote_native.engine.provider import NativeDevice, NicRegistration
from aiote_native.requests.operations import LocalMemory
from aiote_native.system.base import StatusError
from aiote_native.system.buffers import acquire
from support.engines.opening import opened
from support.gpu.driver_calls import OF_NICS
from support.gpu.standin_cuda import driver, failing, gpu_copy, standin_path
from support.process.open_resources import descriptors

PAGE = os.sysconf("SC_PAGE_SIZE")
DRIVERS = {
    "rocm": """
        int hsa_amd_portable_export_dmabuf(const void *start, size_t size, int *fd, uint64_t *offset) {
            if (start == (void *)0x666000) return 4096;
            *fd = memfd_create("gpu", 0);
            *offset = 0x140;
            dprintf(*fd, "%llx %zx", (unsigned long long)start, size);
            return 0;
        }""",
}
HEADERS = "#define _GNU_SOURCE\n#include <stdint.h>\n#include <stdio.h>\n#include <sys/mman.h>\n"


@pytest.fixture(params=["rocm"])
def device(request, tmp_path, monkeypatch):
    """A driver of one function, which writes what it was asked into the buffer that it gives."""
    source = tmp_path / "driver.c"
    source.write_text(HEADERS + DRIVERS[request.param])
    library = tmp_path / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(dmabuf, f"{request.param.upper()}_LIBRARY", str(library))
    return request.param


@pytest.fixture(autouse=True)
def collected() -> None:
    """Collect what earlier tests left: a collection within this one would close descriptors of theirs."""
    gc.collect()


@pytest.mark.parametrize(
    ("start", "length"), [(0x10_0000, PAGE), (0x10_0140, 1), (0x10_0FFF, 2), (0x20_0100, 3 * PAGE)]
)
def test_a_driver_is_asked_for_the_memory_as_it_wants_it(device, start, length):
    before = descriptors()
    with export_dmabuf(device, start, length) as found:
        said = Path(f"/proc/self/fd/{found.fd}").read_text().split()
    assert said == [f"{start:x}", f"{length:x}"]
    assert found.offset == 0x140
    assert descriptors() == before


def test_a_driver_that_refuses_is_an_error_and_leaves_no_descriptor(device):
    before = descriptors()
    with pytest.raises(FabricError, match="returned 4096") as told, export_dmabuf(device, 0x66_6000, PAGE):
        pass
    assert told.value.errno == errno.EOPNOTSUPP
    assert descriptors() == before


@pytest.mark.parametrize("device", ["rocm"])
@pytest.mark.parametrize("library", ["/nowhere/driver.so", "libc.so.6"])
def test_a_missing_or_too_old_driver_is_an_error(device, library, monkeypatch):
    monkeypatch.setattr(dmabuf, f"{device.upper()}_LIBRARY", library)
    with pytest.raises(FabricError, match=r"driver\.so|undefined symbol"), export_dmabuf(device, 4096, 1):
        pass


@pytest.fixture
def standin() -> None:
    """The stand-in for CUDA's driver, which this process loads once."""
    driver()
    load(standin_path())


@pytest.mark.parametrize(("at", "length"), [(0, PAGE), (0x140, 1), (0xFFF, 2), (PAGE + 0x100, 3 * PAGE)])
@pytest.mark.parametrize("number", [0, 1])
def test_cuda_is_asked_for_whole_pages_in_the_memorys_own_context(standin, at, length, number):
    """The stand-in refuses parts of pages, and a context of another device or none: here none is current."""
    memory = gpu_copy(np.arange(8 * PAGE, dtype=np.uint64).view(np.uint8), number)
    before = descriptors()
    with export_dmabuf("cuda", memory.address + at, length) as found:
        assert found.offset == at % PAGE
    assert descriptors() == before


@pytest.mark.parametrize("call", [OF_NICS[0], "cuCtxPushCurrent_v2"])
def test_an_error_of_cudas_is_told_by_its_name(standin, call):
    memory, before = gpu_copy(np.zeros(PAGE, np.uint8)), descriptors()
    with (
        failing(call, 0, 201),
        pytest.raises(FabricError, match="CUDA_ERROR_INVALID_CONTEXT: invalid device context") as told,
        export_dmabuf("cuda", memory.address, PAGE),
    ):
        pass
    assert told.value.errno == errno.EOPNOTSUPP
    assert descriptors() == before


@dataclass
class OfGpu:
    """An array that says that it is in a GPU's memory; nobody touches it."""

    address: int = 0x10_0140
    length: int = 8192
    readonly: bool = False

    @property
    def __cuda_array_interface__(self):
        return {"shape": (self.length,), "typestr": "|u1", "data": (self.address, self.readonly), "version": 3}


class Noting(NativeDevice):
    """A NIC that takes DMA-BUFs, or fails with an error number."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.told: list[tuple[object, ...]] = []
        self.flushed: list[int] = []
        self.closed = 0

    def register_dmabuf(self, fd, offset, length, address, writable=True, access=3):
        os.fstat(fd)
        self.told.append((offset, length, address, writable, access))
        if self.fails:
            raise StatusError(-self.fails, "register")
        return Noted(self)


class Noted(NicRegistration):
    def __init__(self, nic: Noting) -> None:
        self.nic = nic

    def flush_behind(self, address: int) -> None:
        self.nic.flushed.append(address)

    def close(self) -> None:
        self.nic.closed += 1


@dataclass
class NicRail:
    """A rail with such a NIC, or with one that knows no GPU."""

    name: str
    device: NativeDevice
    dmabuf: bool = True
    provider: str = "verbs"

    @property
    def traits(self) -> Traits:
        return Traits(dmabuf=self.dmabuf)


class Peering(Noting):
    """A NIC that takes addresses of a GPU."""

    def register(self, address, length, writable=True, access=3):
        self.told.append((address, length))
        return Noted(self)


def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "PEER_MODULES", ())


def test_each_nic_has_its_own_way_and_those_without_are_left_out(standin, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PEER_MODULES", (Path("/proc/self/status"),))
    lent = gpu_copy(np.zeros(PAGE, np.uint8))
    by_dmabuf, by_module, deaf = Noting(), Peering(-errno.EINVAL), Noting()
    rails = [NicRail("a", by_dmabuf), NicRail("b", by_module), NicRail("c", deaf, dmabuf=False, provider="sim")]
    memory, reach = register_gpu(rails, acquire(lent), 3)
    assert {name: found.way for name, found in reach.items()} == {"a": "dmabuf", "b": "peermem", "c": "none"}
    assert "dmabuf: " in reach["b"].reason
    assert "Invalid argument" in reach["b"].reason
    assert "sim reaches host memory only" in reach["c"].reason
    assert (by_module.told[-1], deaf.told) == ((lent.address, PAGE), [])
    assert memory.keys[2] == ((1 << 64) - 1, 0)
    memory.close()
    assert (by_dmabuf.closed, by_module.closed) == (1, 1)


@contextlib.contextmanager
def ordering(how: int, options: int = 0) -> Iterator[None]:
    """Have the driver say of its devices how far NICs' writes are in order, and whether it flushes them."""
    driver().standin_ordering(how, options)
    try:
        yield
    finally:
        driver().standin_ordering(100, 0)


@pytest.mark.parametrize("how", [100, 200])
def test_a_device_that_orders_writes_of_nics_flushes_nothing(standin, how):
    lent, nic, synchronous = gpu_copy(np.zeros(PAGE, np.uint8)), Noting(), driver().standin_synchronous()
    with ordering(how):
        memory, reach = register_gpu([NicRail("a", nic)], acquire(lent), 3)
    assert (reach["a"].way, nic.flushed, "flush" in reach["a"].reason) == ("dmabuf", [], False)
    assert driver().standin_synchronous() == synchronous + 1  # copies to it end before their calls do
    memory.close()


def test_memory_whose_copies_cannot_be_made_synchronous_is_registered_all_the_same(standin):
    """As segments are: each transfer waits for its caller's stream."""
    lent, nic, synchronous = gpu_copy(np.zeros(PAGE, np.uint8)), Noting(), driver().standin_synchronous()
    with failing(OF_NICS[2]):
        memory, reach = register_gpu([NicRail("a", nic)], acquire(lent), 3)
        assert not driver().standin_fails()
    assert (reach["a"].way, driver().standin_synchronous()) == ("dmabuf", synchronous)
    memory.close()


def test_a_device_that_does_not_is_flushed_before_anything_is_counted(standin):
    lent, nic = gpu_copy(np.zeros(PAGE, np.uint8), 1), Noting()
    with ordering(0, 1):
        memory, reach = register_gpu([NicRail("a", nic)], acquire(lent), 3)
    assert (reach["a"].way, nic.flushed) == ("dmabuf", [lent.address])
    assert "what arrives is flushed to the GPU before it is counted" in reach["a"].reason
    memory.close()


@pytest.mark.parametrize("call", ["", OF_NICS[1]])
def test_memory_that_can_be_neither_ordered_nor_flushed_is_left_to_other_rails(standin, monkeypatch, call):
    no_module(monkeypatch)
    lent, nic = gpu_copy(np.zeros(PAGE, np.uint8)), Noting()
    expected = "CUDA_ERROR_OUT_OF_MEMORY" if call else "cuda:0 neither orders nor flushes them"
    with ordering(0), failing(call or "none"), pytest.raises(FabricError, match=expected):
        register_gpu([NicRail("a", nic)], acquire(lent), 3)
    assert nic.closed == 1


def test_where_no_nic_has_a_way_the_first_error_is_raised_and_nothing_is_left(standin, monkeypatch):
    no_module(monkeypatch)
    lent, before = gpu_copy(np.zeros(PAGE, np.uint8)), descriptors()
    rails = [NicRail("a", Peering(-errno.EINVAL)), NicRail("b", Peering(-errno.EOPNOTSUPP))]
    with pytest.raises(FabricError, match="Invalid argument"):
        register_gpu(rails, acquire(lent), 3)
    assert descriptors() == before


def test_what_was_registered_is_undone_where_another_nic_breaks(standin, monkeypatch):
    class Breaking(Noting):
        def register_dmabuf(self, fd, offset, length, address, writable=True, access=3):
            raise MemoryError

    sound = Noting()
    with pytest.raises(MemoryError):
        register_gpu([NicRail("a", sound), NicRail("b", Breaking())], acquire(gpu_copy(np.zeros(PAGE, np.uint8))), 3)
    assert sound.closed == 1


@pytest.mark.parametrize("readonly", [False, True])
def test_every_nic_is_told_offset_length_and_access(device, readonly):
    nics = [Noting(), Noting()]
    array = OfGpu(readonly=readonly)
    with export_dmabuf(device, array.address, array.length) as found:
        memory = LocalMemory(acquire(array), list(nics), 3, fd=found.fd, offset=found.offset)
    for nic in nics:
        assert nic.told == [(found.offset, 8192, array.address, not readonly, 3)]
    memory.close()
    assert [nic.closed for nic in nics] == [1, 1]


def test_a_registration_is_undone_where_one_nic_of_several_refuses():
    nics = [Noting(), Noting(errno.EINVAL)]
    with open("/dev/null") as file, pytest.raises(StatusError):
        LocalMemory(acquire(OfGpu()), list(nics), 3, fd=file.fileno())
    assert [nic.closed for nic in nics] == [1, 0]


@pytest.mark.parametrize("provider", ["tcp", "shm", "sim"])
@pytest.mark.libfabric
async def test_a_rail_that_reaches_host_memory_alone_says_so(provider):
    async with opened(provider) as engine:
        with pytest.raises(
            UsageError, match=rf"'cuda' cannot be registered with {provider}\S*, which reach host memory"
        ):
            engine.register(OfGpu())


@pytest.mark.needs_rdma
async def test_a_nic_in_software_refuses_and_nothing_is_left(monkeypatch):
    """With a DMA-BUF of the kernel's own (udmabuf), registered by the real library."""
    before = descriptors()
    monkeypatch.setitem(dmabuf.EXPORTERS, "cuda", lambda address, length: DmaBuf(of_the_kernel(length), 0))
    async with aiote.open_engine("verbs") as engine:
        inside = descriptors()
        with pytest.raises(FabricError, match="register memory") as told:
            engine.register(OfGpu(length=4 * PAGE))
        # Where there is no driver, nobody is asked for the memory's context.
        assert told.value.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
        assert descriptors() == inside
        assert len(engine.register(np.zeros(PAGE, np.uint8))) == PAGE
        held = replace(OfGpu(), length=2 * PAGE)
        with pytest.raises(FabricError):
            engine.register(held)
    assert descriptors() == before


def of_the_kernel(length: int) -> int:
    """Return a DMA-BUF of a memfd's pages; where the kernel has no udmabuf, a descriptor that is none."""
    import fcntl
    import struct

    memory = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, length)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        with open("/dev/udmabuf", "rb") as device:
            # struct udmabuf_create: memfd, flags, offset, size; UDMABUF_CREATE is _IOW('u', 0x42, 24 bytes).
            made = fcntl.ioctl(device, 0x40187542, bytearray(struct.pack("=IIQQ", memory, 1, 0, length)))
    except OSError:
        return memory
    os.close(memory)
    return made
