"""Memory of GPUs by DMA-BUF: what its owner's driver is asked, what a NIC is told, and what is said where it cannot be.

No machine of the tests has both a GPU and a NIC that reaches it. Here the drivers are libraries of one function, and
the NIC that takes a DMA-BUF is one that writes down what it was given; soft-RoCE, which refuses, is asked for real.
"""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import aiote
from aiote.errors import FabricError, UsageError
from aiote.rails import dmabuf
from aiote.rails.dmabuf import DmaBuf, exported
from aiote_native.buffers import acquire
from aiote_native.provider import NativeDevice, Registration
from aiote_native.status import StatusError
from aiote_native.workrequests import LocalMemory
from leftovers import descriptors

PAGE = os.sysconf("SC_PAGE_SIZE")
DRIVERS = {
    "cuda": """
        int cuMemGetHandleForAddressRange(int *fd, uint64_t start, size_t size, int kind, unsigned long long flags) {
            if (start == 0x666000) return 801;
            *fd = memfd_create("gpu", 0);
            dprintf(*fd, "%llx %zx %d %llu", (unsigned long long)start, size, kind, flags);
            return 0;
        }""",
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


@pytest.fixture(params=["cuda", "rocm"])
def device(request, tmp_path, monkeypatch):
    """A driver of one function, which writes what it was asked into the buffer that it gives."""
    source = tmp_path / "driver.c"
    source.write_text(HEADERS + DRIVERS[request.param])
    library = tmp_path / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(dmabuf, f"{request.param.upper()}_LIBRARY", str(library))
    return request.param


@pytest.mark.parametrize(
    ("start", "length"), [(0x10_0000, PAGE), (0x10_0140, 1), (0x10_0FFF, 2), (0x20_0100, 3 * PAGE)]
)
def test_a_driver_is_asked_for_the_memory_as_it_wants_it(device, start, length):
    before = descriptors()
    with exported(device, start, length) as found:
        said = Path(f"/proc/self/fd/{found.fd}").read_text().split()
    if device == "cuda":
        # Whole pages around the memory, as that call wants them.
        first, size = int(said[0], 16), int(said[1], 16)
        assert first % PAGE == size % PAGE == 0
        assert first <= start < first + PAGE
        assert start + length <= first + size < start + length + PAGE
        assert found.offset == start - first
        assert said[2:] == ["1", "0"]
    else:
        assert said == [f"{start:x}", f"{length:x}"]
        assert found.offset == 0x140
    assert descriptors() == before


def test_a_driver_that_refuses_is_an_error_and_leaves_no_descriptor(device):
    before = descriptors()
    with pytest.raises(FabricError, match=r"returned (801|4096)") as told, exported(device, 0x66_6000, PAGE):
        pass
    assert told.value.errno == errno.EOPNOTSUPP
    assert descriptors() == before


@pytest.mark.parametrize("device", ["cuda", "rocm"])
@pytest.mark.parametrize("library", ["/nowhere/driver.so", "libc.so.6"])
def test_a_missing_or_too_old_driver_is_an_error(device, library, monkeypatch):
    monkeypatch.setattr(dmabuf, f"{device.upper()}_LIBRARY", library)
    with pytest.raises(FabricError, match=r"driver\.so|undefined symbol"), exported(device, 4096, 1):
        pass


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
        self.closed = 0

    def register_dmabuf(self, fd, offset, length, address, writable=True, access=3):
        os.fstat(fd)
        self.told.append((offset, length, address, writable, access))
        if self.fails:
            raise StatusError(-self.fails, "register")
        return Noted(self)


class Noted(Registration):
    def __init__(self, nic: Noting) -> None:
        self.nic = nic

    def close(self) -> None:
        self.nic.closed += 1


@pytest.mark.parametrize("readonly", [False, True])
def test_every_nic_is_told_offset_length_and_access(device, readonly):
    nics = [Noting(), Noting()]
    array = OfGpu(readonly=readonly)
    with exported(device, array.address, array.length) as found:
        memory = LocalMemory(acquire(array), list(nics), 3, found.fd, found.offset)
    for nic in nics:
        assert nic.told == [(found.offset, 8192, array.address, not readonly, 3)]
    memory.close()
    assert [nic.closed for nic in nics] == [1, 1]


def test_a_registration_is_undone_where_one_nic_of_several_refuses():
    nics = [Noting(), Noting(errno.EINVAL)]
    with open("/dev/null") as file, pytest.raises(StatusError):
        LocalMemory(acquire(OfGpu()), list(nics), 3, file.fileno(), 0)
    assert [nic.closed for nic in nics] == [1, 0]


@pytest.mark.parametrize("provider", ["tcp", "shm"])
@pytest.mark.libfabric
async def test_a_rail_that_reaches_host_memory_alone_says_so(provider):
    async with aiote.open_engine(provider) as engine:
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
        assert told.value.errno in (errno.EOPNOTSUPP, errno.EINVAL)
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
