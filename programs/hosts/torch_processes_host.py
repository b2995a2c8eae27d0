"""A transport and its processes: idle it does nothing, a forked child is told, and an exit without a close ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.distributed._transport import new_transport

from aiote.errors import UsageError
from support.process.idleness import assert_idle
from torch_host import SOON_S, Other


@pytest.fixture
def used() -> Iterator[Other]:
    """A transport that has read and written."""
    made = Other()
    view, remote = made.memory(1 << 20)[1].to_mutable_view(), made.expose("used", 1 << 20, 1)
    for _ in range(10):
        made.transport.read(view, remote)
        made.transport.write(view, remote)
    yield made
    made.close()


def test_both_sides_are_idle_when_nothing_moves(used):
    asyncio.run(assert_idle(used.transport._bridge.engine))
    used.ask("assert_idle")


@pytest.mark.parametrize("what", ["bind", "register_memory", "read"])
def test_a_forked_child_is_told_and_its_parent_goes_on(used, what):
    tensor, memory = used.memory(1000)
    remote = used.expose("forked", 1000, 2)
    calls = {
        "bind": lambda: used.transport.bind(),
        "register_memory": lambda: used.transport.register_memory(torch.zeros(10)),
        "read": lambda: used.transport.read(memory.to_mutable_view(), remote),
    }
    pid = os.fork()
    if not pid:
        status = 1
        try:
            calls[what]()
        except UsageError as error:
            status = 0 if "after a fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    used.transport.read(memory.to_mutable_view(), remote)
    assert int(tensor.sum()) == 2000


EXITING = """
import torch
from torch.distributed._transport import new_transport
a, b = new_transport("aiote", "cpu"), new_transport("aiote", "cpu")
a.connect(b.bind())
b.connect(a.bind())
source, target = a.register_memory(torch.ones(1 << 20)), b.register_memory(torch.zeros(1 << 20))
work = a.write(source.to_view(), target.to_remote_buffer(), async_op=True)
print("exits")
"""


def test_a_program_that_closes_nothing_exits():
    done = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=SOON_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exits\n", "")


ADDRESSES = ["", "aiote://x", "aiote://[::1", "aiote://1.2.3.4:99999/", "A" * 100_000]


@pytest.mark.parametrize("address", ADDRESSES, ids=range(len(ADDRESSES)))
def test_an_address_that_is_none_is_refused_and_another_may_follow(address):
    with new_transport("aiote", "cpu") as a, new_transport("aiote", "cpu") as b:
        url = f'{{"type":"aiote-endpoint","endpoint":"a","address":"{address}","version":1}}'
        with pytest.raises(ValueError, match="expected aiote://|port") as raised:
            a.connect(url.encode())
        assert len(str(raised.value)) < 1000
        assert not a.connected()
        a.connect(b.bind())
