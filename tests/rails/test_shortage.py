"""A system that is out of something while an endpoint of a provider opens: an error that names it, and no crash.

In processes of their own, because what is missing there has ended the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.engines.opening import PATIENCE_S, run_script
from support.network.namespaces import PATH

pytestmark = [pytest.mark.libfabric, pytest.mark.blocking_allowed("runs processes, and no engine of its own")]
each_library = pytest.mark.parametrize("provider", ["local", "socket", "shm", "tcp"])

WITHOUT = """
    import asyncio, os, resource, sys, aiote

    async def main(provider, lack, left):
        async with aiote.open_engine(provider) as engine:
            (rail,) = engine._runtime.rail_set.rails
            limit = getattr(resource, lack)
            before = resource.getrlimit(limit)
            for number in left:
                held = spend(lack, limit, int(number))
                try:
                    rail.open_endpoint().close()
                    said = "opened"
                except aiote.FabricError as error:
                    said = f"{error.operation} on {error.rail}: {os.strerror(error.errno)}"
                finally:
                    resource.setrlimit(limit, before)
                    for descriptor in held:
                        os.close(descriptor)
                print(number, said)
            rail.open_endpoint().close()
            print("well again")

    def spend(lack, limit, left):
        held = []
        if lack == "RLIMIT_NOFILE":
            resource.setrlimit(limit, (100, resource.getrlimit(limit)[1]))
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                for _ in range(left):
                    os.close(held.pop())
            return held
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE") if lack == "RLIMIT_AS" else 0
        resource.setrlimit(limit, (used + left, resource.getrlimit(limit)[1]))
        return held

    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""
LACKS = {
    "RLIMIT_NOFILE": ("Too many open files", range(17)),
    "RLIMIT_AS": ("Cannot allocate memory", [0, 100 << 10, 1 << 20, 8 << 20, 1 << 28]),
    "RLIMIT_FSIZE": ("File too large", [0, 1 << 16, 1 << 22, 1 << 25]),
}


@each_library
@pytest.mark.parametrize("lack", LACKS)
def test_an_endpoint_that_lacks_something_is_refused_and_the_process_lives(provider, lack):
    reason, left = LACKS[lack]
    done = run_script(WITHOUT, provider, lack, *map(str, left))
    *said, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "well again"), done.stderr
    assert [line.partition(" ")[0] for line in said] == [str(number) for number in left]
    # Where it needs nothing of the kind, it opens.
    assert {line.partition(" ")[2].rpartition(": ")[2] for line in said} <= {reason, "opened"}
    if provider == "shm" or lack == "RLIMIT_NOFILE":
        assert said[0].endswith(reason)
    assert said[-1].endswith("opened")


OPENS = """
    import asyncio, aiote

    async def main():
        async with aiote.open_engine("local") as one, aiote.open_engine("local") as two:
            await one.connect(two.address)
        try:
            async with aiote.open_engine("shm") as one, aiote.open_engine("shm") as two:
                await one.connect(two.address)
        except aiote.AioteError as error:
            print(error)

    asyncio.run(main())
"""


THREADLESS = """
    import asyncio, sys, threading, aiote
    from aiote import bridge
    from aiote.aio import in_thread

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def main(provider):
        begin, threading.Thread.start = threading.Thread.start, refuse
        try:
            bridge.acquire(provider)
        except RuntimeError as error:
            print("bridge:", error)
        assert await in_thread(lambda: threading.current_thread() is threading.main_thread())
        async with aiote.open_engine(provider) as one, aiote.open_engine(provider) as two:
            memory = bytearray(1 << 20)
            await one.write(await one.register_async(b"x" * len(memory)), one.attach(two.register(memory).descriptor))
            assert set(memory) == {ord("x")}
        print("written")
        threading.Thread.start = begin

    asyncio.run(main(sys.argv[1]))
"""


@each_library
def test_a_process_that_may_have_no_more_threads_goes_on(provider):
    """As under the limit of processes (ulimit -u), which does not count root's."""
    done = run_script(THREADLESS, provider)
    assert (done.returncode, done.stdout) == (0, "bridge: can't start new thread\nwritten\n"), done.stderr


@pytest.mark.needs_namespaces
@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "Read-only file system"),
        ("mount -t tmpfs -o ro tmpfs /dev && mount --bind /dev {spare}", "No such file or directory"),
        (
            "mount -t tmpfs -o size=40m tmpfs /dev/shm && head -c 30m /dev/zero >/dev/shm/other",
            "No space left on device",
        ),
    ],
    ids=["read-only", "absent", "full"],
)
def test_shm_without_a_place_for_its_files_is_refused_and_local_works(tmp_path: Path, made: str, says: str):
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    shell = f'{made.format(spare=tmp_path)} && exec {sys.executable} -P -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", *own, "--mount", "sh", "-c", shell],
        env={**os.environ, "PATH": PATH, "SCRIPT": textwrap.dedent(OPENS)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"/dev/shm: {says}" in done.stdout
