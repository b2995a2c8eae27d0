"""Descriptors of GPU memory from who lies, and for who has no claim to them."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from support.gpu.standin_cuda import SEGMENT, SegmentedArray, checked, driver, on_device
from support.process.open_resources import descriptors
from support.rails.rail_pair import STAGED, Side, opened
from support.rails.raw_ring import EXPORT, FORGET, FORGOTTEN, HANDLE, OPENED, Frame, RawRing, exported, raw_ring, told

BATCH = struct.Struct("<iI64Q")
"""Code, how many descriptors, and the size of each."""
REQUEST = struct.Struct("<16sQ")
SIZE = 2 * SEGMENT

Reply = Callable[[socket.socket, bytes], None]


@pytest.fixture
def side() -> Iterator[Side]:
    with opened(STAGED[0]) as rails:
        made = rails.side()
        made.register(4096)
        yield made


@contextlib.contextmanager
def giver(reply: Reply) -> Iterator[bytes]:
    """Listen as a peer that gives descriptors, answer each request by a function, and yield the name."""
    name = os.urandom(16).hex().encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name)
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                asking, _ = listener.accept()
                with asking:
                    while request := asking.recv(64):
                        reply(asking, request)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield name
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def send(to: socket.socket, sizes: list[int], given: list[int], code: int = 0, count: int | None = None) -> None:
    data = BATCH.pack(code, len(given) if count is None else count, *sizes, *[0] * (64 - len(sizes)))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
    to.sendmsg([data], rights)


def memory_fd() -> int:
    """Return a descriptor of what looks like memory and is none of a GPU's."""
    fd = os.memfd_create("lie", os.MFD_CLOEXEC)
    os.ftruncate(fd, SEGMENT + 4096)
    return fd


def segment_fd(array_: SegmentedArray, number: int) -> int:
    """Return a descriptor of a segment, as its owner's driver gives it."""
    handle, fd = ctypes.c_uint64(), ctypes.c_int()
    with on_device(0) as cuda:
        at = ctypes.c_void_p(array_.address + number * SEGMENT)
        checked(cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), at))
        checked(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), handle, 1, ctypes.c_uint64(0)))
        checked(cuda.cuMemRelease(handle))
    return fd.value


def claim(name: bytes, segments: int = 2, size: int = SIZE) -> Frame:
    data = HANDLE.pack(size, segments, os.urandom(16), name.ljust(64, b"\0"))
    return Frame(EXPORT, key=5, imm=0, length=len(data), count=1, data=data)


LIES = {
    "nothing": lambda fds: ([], [], 0, None),
    "an error": lambda fds: ([], [], 2, None),
    "a negative error": lambda fds: ([], [], -errno.EACCES, None),
    "too many": lambda fds: ([SEGMENT] * 3, [*fds, fds[0]], 0, None),
    "fewer than it says": lambda fds: ([SEGMENT] * 2, fds[:1], 0, 2),
    "none of those that it says": lambda fds: ([SEGMENT] * 2, [], 0, 2),
    "more than it says": lambda fds: ([SEGMENT], fds, 0, 1),
    "no size": lambda fds: ([0, SEGMENT], fds, 0, None),
    "sizes beyond the sum": lambda fds: ([SEGMENT, 2 * SEGMENT], fds, 0, None),
    "sizes that wrap": lambda fds: ([SEGMENT, (1 << 64) - SEGMENT], fds, 0, None),
    "more than a segment has": lambda fds: ([2 * SEGMENT, SEGMENT], fds, 0, None),
    "something else": lambda fds: ([SEGMENT] * 2, [fds[0], memory_fd()], 0, None),
}


@pytest.mark.parametrize("lie", LIES)
def test_descriptors_that_are_lies_are_refused_and_leave_nothing(side, lie):
    memory = SegmentedArray(SIZE)
    fds = [segment_fd(memory, number) for number in range(2)]

    def reply(to: socket.socket, _: bytes) -> None:
        sizes, given, code, count = LIES[lie](fds)
        send(to, sizes, given, code, count)
        for fd in set(given) - set(fds):
            os.close(fd)

    with raw_ring(side) as ring:
        during = descriptors()
        with giver(reply) as name:
            assert told(side, ring, OPENED, claim(name))[4] != 0
        assert driver().standin_open() == 0
        # What tests before this one have left to the garbage collector may go meanwhile.
        assert descriptors().items() <= during.items()
    for fd in fds:
        os.close(fd)


def test_what_is_smaller_than_it_is_said_to_be_is_refused(side):
    memory = SegmentedArray(SIZE)
    fds = [segment_fd(memory, number) for number in range(2)]
    with raw_ring(side) as ring, giver(lambda to, _: send(to, [SEGMENT] * 2, fds)) as name:
        assert told(side, ring, OPENED, claim(name, size=3 * SEGMENT))[4] != 0
        assert driver().standin_open() == 0
    for fd in fds:
        os.close(fd)


def test_segments_are_mapped_and_given_back(side):
    memory = SegmentedArray(SIZE)
    fds = [segment_fd(memory, number) for number in range(2)]
    with raw_ring(side) as ring, giver(lambda to, _: send(to, [SEGMENT] * 2, fds)) as name:
        assert told(side, ring, OPENED, claim(name))[4] == 0
        assert driver().standin_open() == 2
        assert told(side, ring, FORGOTTEN, Frame(FORGET, key=5))[6] == 5
        assert driver().standin_open() == 0
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("segments", [1 << 17, (1 << 64) - 1])
def test_so_many_segments_that_they_are_none_are_refused(side, segments):
    with raw_ring(side) as ring, giver(lambda to, _: None) as name:
        assert told(side, ring, OPENED, claim(name, segments))[4] != 0


def test_nobody_listens(side):
    with raw_ring(side) as ring:
        assert told(side, ring, OPENED, claim(b"a" * 32))[4] == -errno.ECONNREFUSED


def test_a_channel_is_shut_while_a_peer_gives_nothing(side):
    asked = threading.Event()
    with raw_ring(side) as ring, giver(lambda to, _: asked.set()) as name:
        ring.say(claim(name).encode())
        while not asked.is_set():
            side.core.progress()
        side.close_link(ring.link)
    assert driver().standin_open() == 0


def given(side: Side, ring: RawRing, memory: SegmentedArray) -> tuple[bytes, bytes]:
    """Return token and socket's name that the peer is told."""
    size, segments, token, name = exported(side, ring, side.register(memory.seen))
    assert (size, segments) == (memory.nbytes, memory.count)
    return token, name.rstrip(b"\0")


def asked_for(name: bytes, request: bytes) -> tuple[int, list[int]]:
    """Ask for descriptors, and return the code and those that came."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(b"\0" + name)
        asking.send(request)
        data, came, _, _ = socket.recv_fds(asking, BATCH.size, 64)
        return (BATCH.unpack(data)[0] if data else -errno.ECONNRESET), came


def test_descriptors_are_given_for_a_token_alone(side):
    memory = SegmentedArray(SIZE)
    with raw_ring(side) as ring:
        token, name = given(side, ring, memory)
        code, came = asked_for(name, REQUEST.pack(token, 0))
        assert (code, len(came)) == (0, 2)
        code, rest = asked_for(name, REQUEST.pack(token, 1))
        assert (code, len(rest)) == (0, 1)
        for wrong in (
            REQUEST.pack(os.urandom(16), 0),
            REQUEST.pack(token[:15] + bytes([token[15] ^ 1]), 0),
            REQUEST.pack(token, 2),
            REQUEST.pack(token, (1 << 64) - 1),
        ):
            assert asked_for(name, wrong) == (-errno.EACCES, [])
        for short in (b"x", token):
            assert asked_for(name, short) == (-errno.ECONNRESET, [])
        for fd in came + rest:
            os.close(fd)
