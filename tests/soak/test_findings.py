"""A soak tells its own errors from violations, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

import aiote
from support import ROOT, TESTS
from support.engines.opening import PATIENCE_S
from support.network.namespaces import PATH
from support.process.open_resources import SHARED_MEMORY

FOLDER = ROOT / "programs" / "soak"
VIOLATED, FAILED_ITSELF = 1, 2


@pytest.fixture
def module(monkeypatch) -> Iterator[Callable[[str], object]]:
    """Import a module of the soak."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(FOLDER) in (getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


@pytest.fixture
def verdict(module):
    return module("findings").Verdict("make soak")


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        work()
    return caught.value


def test_an_error_is_aiote_s_where_it_is_of_its_kinds_or_came_out_of_its_code(module):
    of_aiote = module("findings").of_aiote
    assert of_aiote(aiote.ClosedError("the engine is closed"))
    assert of_aiote(raised(lambda: aiote.Address.parse(7)))
    assert not of_aiote(raised(lambda: {}["a word that nobody has said"]))
    assert not of_aiote(RuntimeError("ip link add: File exists"))
    both = ExceptionGroup("both", [KeyError("x"), ExceptionGroup("", [aiote.ClosedError("closed")])])
    assert of_aiote(both)
    assert not of_aiote(ExceptionGroup("own", [KeyError("x")]))


def test_the_first_finding_decides(module, verdict, capsys):
    assert (verdict.status, verdict.ended.is_set()) == (0, False)
    verdict.unexpected(RuntimeError("ip link add: File exists"), "in a mishap")
    verdict.violation("a child process is left")
    assert (verdict.status, verdict.violations, verdict.ended.is_set()) == (FAILED_ITSELF, [], True)
    said = capsys.readouterr().out
    assert "THE SOAK ITSELF FAILED: in a mishap: RuntimeError" in said
    assert "VIOLATION" not in said
    other = module("findings").Verdict("make soak")
    other.unexpected(aiote.ClosedError("the engine is closed"), "in a mishap")
    other.failure("then a command failed")
    assert other.status == VIOLATED
    assert len(other.violations) == 1


@pytest.mark.parametrize(("turns", "status"), [([], 0), ([0, 0], 0), ([0, 2], 2), ([2, 1, 0], 1), ([1], 1)])
def test_a_violation_stands_whatever_became_of_other_turns(module, turns, status):
    assert module("findings").status_of(turns) == status


def test_a_rail_s_run_and_a_schedule_tell_them_apart(module, monkeypatch):
    rails, failover = module("cut_rails"), module("failover_schedules")
    assert rails.status_of(AssertionError("3 counts of 2")) == rails.status_of(TimeoutError()) == VIOLATED
    assert rails.status_of(OSError("no connection to cut")) == FAILED_ITSELF
    for error, status in ((failover.Broken("a byte landed late"), VIOLATED), (KeyError("x"), FAILED_ITSELF)):

        class World:
            def __init__(self, seed):
                pass

            def run(self, error=error):
                raise error

        monkeypatch.setattr(failover, "world_of", World)
        _tally, broken = failover.play(range(4, 5))
        assert [found for found, _ in broken] == [status]
        assert broken[0][1].startswith("world_of(4).run(): ")


@pytest.mark.parametrize(
    ("ends", "violations", "failures"),
    [
        ("exit 3", 0, ["did not start: it ended with status 3"]),
        ("kill -SEGV $$", 1, []),
        ("echo {; exit 0", 0, ["JSONDecodeError"]),
    ],
)
def test_a_process_that_does_not_start_is_a_failure_and_a_crash_a_violation(
    module, verdict, ends, violations, failures
):
    members = module("members")

    async def start() -> None:
        member = await members.Member.start(["sh", "-c", ends], ("1", "local", "1", "peer"), "asyncio", verdict)
        with pytest.raises(members.GoneError):
            await member.greeted
        await member.kill()

    asyncio.run(start())
    assert len(verdict.violations) == violations
    assert len(verdict.failures) == len(failures)
    assert all(text in told for text, told in zip(failures, verdict.failures, strict=True))


@pytest.mark.needs_namespaces
def test_no_name_is_used_twice():
    """While the namespaces of the run before are still there, for killed workers' sockets hold them for minutes."""
    text = """
        import subprocess, sys
        sys.path[:0] = sys.argv[1:]
        from network import Links

        def holder():
            process = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1)
            process.stdout.readline()
            return process

        kept = []
        for provider in ("tcp", "tcp", "socket"):
            links = Links(provider)
            links.open()
            for _ in range(2):
                kept.append(holder())
                print(links.join(kept[-1].pid))
                links.forget(kept[-1].pid)
        other = Links("tcp")
        other.open()
        other.close()
        names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
        print("\\n".join(line.split(":")[1].strip() for line in names.splitlines()))
        for process in kept:
            process.communicate()
    """
    way = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    done = subprocess.run(
        [*way, sys.executable, "-P", "-c", textwrap.dedent(text), str(FOLDER), str(TESTS)],
        env={**os.environ, "AIOTE_SOAK_INSIDE": "yes", "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    hosts = [line for line in lines if line.startswith("10.99.")]
    made = [line for line in lines if line.startswith("s") and line not in hosts]
    assert len(set(hosts)) == len(hosts) == 6
    assert len(set(made)) == len(made) == 6 + 3


def on(loop: str, main: Callable[..., object], *args: object) -> None:
    """Run a coroutine function on an event loop, as a worker does."""
    options = {"use_uvloop": loop == "uvloop"} if loop != "trio" else {}
    anyio.run(main, *args, backend="trio" if loop == "trio" else "asyncio", backend_options=options)


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])


@LOOPS
def test_what_is_stuck_is_told_with_where_it_stands(module, loop):
    tasks_of, watchdog = module("tasks").tasks_of, module("watchdog").Watchdog

    async def main() -> None:
        found, told = [], anyio.Event()

        def violation(text: str) -> None:
            found.append(text)
            told.set()

        async def stuck() -> None:
            await dog.over("what never comes", anyio.sleep_forever())

        async with tasks_of(loop) as tasks:
            dog = watchdog(tasks, 0.0, violation)
            looking = [tasks.start(dog.run()), tasks.start(stuck())]
            with anyio.fail_after(PATIENCE_S):
                await told.wait()
            await module("tasks").end(tasks, looking)
            assert all(task.cancelled() for task in looking)
        assert len(found) == 1
        assert found[0].startswith("stuck for 0.0 s: what never comes\n")
        assert "in test_what_is_stuck_is_told_with_where_it_stands.<locals>.main.<locals>.stuck" in found[0]
        assert "sleep_forever" in found[0]
        # The test itself, which waits to be told.
        assert "in Event.wait" in found[0].partition("other tasks:")[2]

    on(loop, main)


@LOOPS
def test_an_await_is_cancelled_in_every_way(module, loop):
    tasks_of = module("tasks").tasks_of

    async def main() -> None:
        ended = []

        async def wait() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.append(way)

        async with tasks_of(loop) as tasks:
            ways = [way for way in tasks.ways if way != "transfer.cancel"]
            for way in ways:
                task = tasks.start(tasks.await_by(way, wait(), 0.01))
                await tasks.begun(task)
                if way == tasks.from_outside:
                    task.cancel()
                with anyio.fail_after(PATIENCE_S):
                    await tasks.wait({task})
                assert task.cancelled() == (way == tasks.from_outside)
                assert task.cancelled() or isinstance(task.exception(), TimeoutError | None)
        assert ended == ways

    on(loop, main)


@LOOPS
def test_an_error_that_nobody_asks_for_is_told(module, loop, monkeypatch):
    tasks_of, told = module("tasks").tasks_of, []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: told.append(error))

    async def fail() -> None:
        raise KeyError("x")

    async def main() -> None:
        if loop != "trio":
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
        async with tasks_of(loop) as tasks:
            for looks in (True, False):
                task = tasks.start(fail())
                await tasks.wait({task})
                if looks:
                    assert isinstance(task.exception(), KeyError)
                del task
                gc.collect()
                assert len(told) == (not looks)

    on(loop, main)


class Running:
    """A soak in a process of its own, and all that it started, known by a mark in their environment."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.mark = f"AIOTE_SOAK_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / "soak.py"), "--seconds", "600", "--seed", "1", *arguments],
            env=os.environ | {"AIOTE_SOAK_INSIDE": "", name: value} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def family(self) -> list[int]:
        """Return the processes that carry the mark, the soak's own left out."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                marked = self.mark.encode() in path.read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if marked and int(path.parent.name) != self.process.pid:
                found.append(int(path.parent.name))
        return found

    def workers(self) -> list[int]:
        """Wait until there are workers with engines, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := [pid for pid in self.family() if left([pid])]:
                return found
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(f"no workers: {self.said()}")

    def said(self) -> str:
        return self.process.communicate(timeout=PATIENCE_S)[0]


@contextmanager
def soaking(*arguments: str, **environment: str) -> Iterator[Running]:
    """Run a soak that would go on for long, and see that it leaves no process and no shared file."""
    running = Running(*arguments, **environment)
    try:
        yield running
        assert not running.family()
    finally:
        running.process.kill()
        running.process.wait()
        running.process.stdout.close()


def left(pids: list[int]) -> list[str]:
    return [path.name for pid in pids for path in SHARED_MEMORY.glob(f"aiote-{pid}-*")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number):
    with soaking("--provider", "shm") as running:
        workers = running.workers()
        # As a terminal does it, to the whole group.
        os.killpg(running.process.pid, number)
        said = running.said()
        assert running.process.returncode == 128 + number, said
        assert f"interrupted by {number.name}" in said
        assert "Traceback" not in said
        assert not left(workers)


def test_a_worker_that_ends_by_itself_is_a_violation():
    with soaking("--provider", "shm") as running:
        workers = running.workers()
        for pid in workers:  # all of them, for the soak may be about to kill the one or the other
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSEGV)
        said = running.said()
        assert running.process.returncode == VIOLATED, said
        assert "VIOLATION: process" in said
        assert "ended by itself, with status -11" in said
        assert "THE SOAK ITSELF" not in said
        assert not left(workers)


@pytest.mark.needs_namespaces
def test_a_command_of_the_system_that_fails_is_the_soak_s_own_error(tmp_path):
    program = tmp_path / "ip"
    real = shutil.which("ip", path=PATH)
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *veth*) echo "RTNETLINK answers: File exists" >&2; exit 2;; esac\nexec {real} "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with soaking("--provider", "socket", PATH=f"{tmp_path}:{PATH}") as running:
        said = running.said()
        assert running.process.returncode == FAILED_ITSELF, said
        assert "File exists" in said
        assert "THE SOAK ITSELF FAILED" in said
        assert "VIOLATION" not in said
        assert "processes were left" not in said
