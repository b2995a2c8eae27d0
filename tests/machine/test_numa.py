"""Which node memory is on: as the kernel says, and -1 wherever it does not."""

from __future__ import annotations

import ctypes
import mmap
import platform

import pytest

from aiote.machine import numa
from aiote.machine.numa import memory_node
from aiote.machine.sysfs import read_topology

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory():
    """Return eight pages that nobody has touched, and their address."""
    pages = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    word = ctypes.c_char.from_buffer(pages)
    address = ctypes.addressof(word)
    yield pages, address
    del word
    pages.close()


def known() -> bool:
    """Tell whether this kernel tells anything: one without NUMA, or a sandbox, need not."""
    return memory_node(id(object)) >= 0


def test_touched_memory_is_on_a_node_of_this_machine(memory):
    if not known():
        pytest.skip("this kernel does not say where memory is")
    pages, address = memory
    pages[:] = b"x" * len(pages)
    nodes = {node.number for node in read_topology().nodes}
    for length in (1, 2, PAGE, 8 * PAGE):
        assert memory_node(address, length) in nodes
    assert memory_node(address + PAGE - 1) in nodes


def test_untouched_memory_is_nowhere_until_it_is_touched(memory):
    pages, address = memory
    if not known() or numa._nodes([address], *numa.NUMBERS[platform.machine()]) == [-1]:
        pytest.skip("this kernel does not say where memory is")
    assert memory_node(address, 8 * PAGE) == -1
    pages[3 * PAGE] = 1
    assert memory_node(address, 8 * PAGE) >= -1
    assert memory_node(address + 3 * PAGE) >= 0
    assert memory_node(address) == -1, "asking has not touched it"


@pytest.mark.parametrize(
    ("address", "length"),
    [
        (0, 1),
        (-1, 1),
        (1, 1),
        (4096, 0),
        (4096, -5),
        ((1 << 64) - 1, 1),
        ((1 << 64) - 1, 2),
        (1 << 64, 1),
        (1 << 80, 9),
    ],
)
def test_an_impossible_address_is_on_no_node(address, length):
    assert memory_node(address, length) == -1


def test_memory_that_is_not_mapped_is_on_no_node(memory):
    # Beyond what the kernel gives to processes.
    assert memory_node((1 << 63) + memory[1]) == -1


def test_memory_of_an_unknown_machine_is_on_no_node(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert memory_node(id(object)) == -1


def answering(monkeypatch, answers):
    """Replace the system call: `answers` by number return its result, and may fill in arguments."""

    def syscall(number, *arguments):
        return answers[number.value](*arguments)

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(numa, "_syscall", lambda: syscall)


def test_most_pages_decide(monkeypatch):
    def move_pages(_process, count, addresses, nodes, status, _flags):
        assert nodes is None
        asked.extend(addresses)
        status[:] = [-2, 1, 0, 1][: count.value] + [1] * (count.value - 4)
        return 0

    asked: list[int] = []
    answering(monkeypatch, {239: move_pages})
    assert memory_node(4096, 1 << 20) == 1
    assert (len(asked), asked[0], asked[-1]) == (numa.SAMPLES, 4096, 4096 + (1 << 20) - 1)


@pytest.mark.parametrize(("result", "node"), [(0, 3), (-1, -1)])
def test_get_mempolicy_is_asked_where_move_pages_is_forbidden(monkeypatch, result, node):
    def get_mempolicy(mode, mask, _most, address, flags):
        assert (mask, address.value, flags.value) == (None, 4096, 3)
        mode._obj.value = 3
        return result

    answering(monkeypatch, {239: lambda *_: -1, 236: get_mempolicy})
    assert memory_node(4096) == node
