"""The shared memory of killed processes is removed: by who was connected to them, and by who comes next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from aiote.rails.stale_files import mark, remove_stale_files
from support.engines.opening import PATIENCE_S, opened, until
from support.process.open_resources import shared_files

pytestmark = pytest.mark.libfabric


async def test_a_connected_peer_removes_the_files_of_a_killed_one(child):
    killed, living = child(), child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open("shm", size=4096)
        await living.open("shm", size=4096)
        async with opened("shm") as engine:
            await engine.connect(killed.address)
            await engine.connect(living.address)
            assert shared_files(killed.pid)
            own, others = shared_files(), shared_files(living.pid)
            killed.kill()
            await until(lambda: not shared_files(killed.pid))
            assert shared_files(living.pid) == others
            assert set(shared_files()) <= set(own)
            await engine.send(living.address, b"still here")


async def test_a_ring_has_no_name(child):
    """So nobody has to remove anything, whoever is killed."""
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open("local", size=4096)
        async with opened("local") as engine:
            before = shared_files()
            await engine.connect(killed.address)
            assert (shared_files(killed.pid), shared_files()) == ([], before)
            killed.kill()
            await until(lambda: not engine.peers)
            assert (shared_files(killed.pid), shared_files()) == ([], before)


async def test_the_next_engine_removes_the_files_of_killed_ones(child):
    """Nobody of those who knew them is left."""
    killed = [child(), child()]
    with anyio.fail_after(PATIENCE_S):
        for one in killed:
            await one.open("shm", size=4096)
        await killed[0].ask("connect", address=str(killed[1].address))
        for one in killed:
            await one.stop()  # so that the first does not clean up after the second
            assert shared_files(one.pid)
        for one in killed:
            one.kill()
            await one.gone()
        async with opened("shm"):
            assert not any(shared_files(one.pid) for one in killed)


def kept(name: str) -> bool:
    """Make a file of that name, look for leftovers, and tell whether it is still there."""
    path = Path("/dev/shm") / name
    path.touch()
    try:
        remove_stale_files()
        return path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_only_what_is_certainly_a_dead_process_s_is_removed():
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    _, pid, start, namespace, _ = mark().split("-")
    dead, rest = int(ended.stdout), f"{namespace}-0123abcd"
    assert int(pid) == os.getpid()
    assert kept(f"aiote-{pid}-{start}-{rest}:0:0")
    assert kept(f"aiote-{dead}-{start}-{int(namespace) + 1}-0123abcd:0:0")  # a number of another container
    assert kept(f"aiote-{dead}-{rest}")
    assert kept(f"other-{dead}-{start}-{rest}")
    assert not kept(f"aiote-{dead}-{start}-{rest}:0:0")
    assert not kept(f"aiote-{pid}-{int(start) - 1}-{rest}:0:0")  # the number is in new use


def test_a_process_that_nobody_has_waited_for_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "print(open('/proc/self/stat').read())"], stdout=subprocess.PIPE)
    stat = child.stdout.read()
    start = int(stat.rpartition(b")")[2].split()[19])
    while Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
        pass
    namespace = mark().split("-")[3]
    assert not kept(f"aiote-{child.pid}-{start}-{namespace}-0123abcd:0:0")
    child.wait()
    child.stdout.close()
