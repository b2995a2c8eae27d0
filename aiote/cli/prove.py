"""The command `aiote prove`: test on a device what the docs claim of it, and write a report.

On a machine with the device the checks run between two engines, then the tests of a checkout if there is one, then the
benchmarks. If the device is missing, no check runs. The report then says so, and the exit status is never success.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import typer

import aiote
from aiote.cli import prove_peer, prove_suites
from aiote.cli.prove_checks import CHECKS, Broken, Check, EnginePair, NotHere
from aiote.cli.prove_memory import ArrayMemory, HostMemory, gpu_memory
from aiote.cli.prove_report import Outcome, Report, machine, now
from aiote.rails.ports import read_ports
from aiote.testing import Fabric

__all__ = ["Subject", "command", "prove"]

What = Literal["efa", "verbs", "cuda", "cxi", "socket", "tcp", "sim"]
CHECK_LIMIT_S = 300.0
OPS = tuple(prove_suites.BENCHED)

Subjects = Annotated[What, typer.Argument(metavar="WHAT", help="efa, verbs, cuda, cxi; or socket, tcp, sim.")]
Rails = Annotated[str, typer.Option(metavar="NAMES", help="NICs of the first engine, with commas.")]
PeerRails = Annotated[
    str, typer.Option(metavar="NAMES", help="NICs of the second engine. Default: those of the first.")
]
Over = Annotated[str, typer.Option(metavar="PROVIDER", help="For cuda: the provider that carries the GPU's bytes.")]
Output = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.json", help="Where to write the report; a .txt is written beside it."),
]
Checkout = Annotated[
    Path | None,
    typer.Option(metavar="DIR", exists=True, file_okay=False, help="A checkout or unpacked sdist, for its tests."),
]
NoBench = Annotated[bool, typer.Option("--no-bench", help="Leave out the benchmarks.")]
NoSuites = Annotated[bool, typer.Option("--no-suites", help="Leave out the checkout's tests.")]


@dataclass(frozen=True, slots=True)
class Subject:
    """The device under test: its provider, the NICs of each side, and the memory to move."""

    what: str
    provider: str
    rails: list[str] | None
    peer_rails: list[str] | None
    memory: ArrayMemory
    missing: str = ""


def command(
    what: Subjects,
    rails: Rails = "",
    peer_rails: PeerRails = "",
    over: Over = "local",
    report: Output = None,
    checkout: Checkout = None,
    no_bench: NoBench = False,
    no_suites: NoSuites = False,
) -> None:
    """Test on a device what the docs claim of it, and write a report that can be sent back.

    Both engines are on this machine. Exits with 1 if a check fails, and with 2 if nothing could be run.
    """
    subject = _subject(what, _names(rails), _names(peer_rails), over)
    found = Report(what, subject.provider, _machine(), now())
    found.missing = subject.missing
    typer.echo(f"aiote prove {what}: provider {subject.provider}, memory of {subject.memory.name}")
    where = None if no_suites else checkout or prove_suites.checkout_here()
    for outcome in prove(subject, where, bench=not no_bench, suites=not no_suites):
        found.outcomes.append(outcome)
        typer.echo(outcome.line())
    path = report or Path(f"aiote-prove-{what}-{found.machine['host']}-{found.started.replace(':', '')}.json")
    beside = found.write(path)
    typer.echo(f"{found.conclusion()}\nwritten: {path}, {beside}")
    raise typer.Exit(found.exit_status)


def _names(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def _subject(what: str, rails: list[str] | None, peer_rails: list[str] | None, over: str) -> Subject:
    """Return the device under test. If there is none, `missing` says why."""
    if what == "cuda":
        memory = gpu_memory()
        if isinstance(memory, str):
            return Subject(what, over, rails, peer_rails or rails, HostMemory(), memory)
        return Subject(what, over, rails, peer_rails or rails, memory)
    if what == "verbs" and rails is None:
        ports = [port.name for port in read_ports() if port.up]
        if not ports:
            return Subject(what, what, None, None, HostMemory(), "this machine has no RDMA port that is up")
        # Bytes between two devices cross a wire. A single device sends to itself.
        rails, peer_rails = ports[:1], peer_rails or ports[1:2] or ports[:1]
    return Subject(what, what, rails, peer_rails or rails, HostMemory())


def prove(subject: Subject, checkout: Path | None, *, bench: bool, suites: bool) -> Iterator[Outcome]:
    """Yield the outcome of each check when it ends."""
    reason = subject.missing
    for check in CHECKS:
        outcome = Outcome(check.name, check.claim, "not run", reason) if reason else anyio.run(_one, subject, check)
        reason = reason or _absent(outcome)
        yield outcome
    gpu = subject.what == "cuda"
    for name, (claim, _) in prove_suites.SUITES.items() if suites else ():
        if (name == prove_suites.GPU_SUITE) != gpu:
            continue
        if reason:
            yield Outcome(name, claim, "not run", reason)
        else:
            yield prove_suites.suite(name, checkout, subject.provider)
    for op in OPS if bench else ():
        why = reason or ("the simulated network has no speed of its own" if subject.what == "sim" else "")
        why = why or ("aiote bench moves host memory only" if gpu else "")
        if why:
            yield Outcome(f"bench-{op}", f"figures: {op}", "not run", why)
        else:
            yield prove_suites.bench(op, subject.provider, ",".join(subject.rails or []))


def _absent(outcome: Outcome) -> str:
    """Return why no other check can run, if the first engine did not open; else an empty string."""
    return outcome.detail if outcome.status == "not run" and outcome.detail.startswith(NO_ENGINE) else ""


def _machine() -> dict[str, Any]:
    """Describe the machine from a process of its own, because a library that was probed stays known to libibverbs."""
    program = f"import json; from {machine.__module__} import machine; print(json.dumps(machine()))"
    done = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


NO_ENGINE = "no engine can be opened: "


@contextlib.asynccontextmanager
async def _world(subject: Subject) -> AsyncIterator[EnginePair]:
    """Open two engines and connect them. Raises NotHere if the first does not open."""
    async with contextlib.AsyncExitStack() as stack:
        if subject.what == "sim":
            fabric = stack.enter_context(Fabric(seed=1, rails=2))
            openings: list[AbstractAsyncContextManager[aiote.Engine]] = [fabric.open_engine(), fabric.open_engine()]
        else:
            openings = [aiote.open_engine(subject.provider, each) for each in (subject.rails, subject.peer_rails)]
        try:
            left = await stack.enter_async_context(openings[0])
        except (aiote.UsageError, aiote.FabricError) as error:
            raise NotHere(f"{NO_ENGINE}{error}") from error
        right = await stack.enter_async_context(openings[1])
        await left.connect(right.address)
        child = None
        if subject.what != "sim":
            told = json.dumps([subject.provider, subject.peer_rails])
            child = [sys.executable, "-P", "-m", prove_peer.__name__, told]
        yield EnginePair(left, right, subject.memory, child)


async def _one(subject: Subject, check: Check) -> Outcome:
    """Run one check on new engines, so that an engine that a check broke does not affect the next check."""
    started = time.monotonic()
    figures: dict[str, float] = {}

    def outcome(status: Literal["passed", "failed", "not run"], detail: str) -> Outcome:
        return Outcome(check.name, check.claim, status, detail, round(time.monotonic() - started, 3), figures)

    try:
        with anyio.fail_after(CHECK_LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that a provider was never run: the report says so
            async with _world(subject) as world:
                world.figures = figures
                return outcome("passed", await check.run(world))
    except NotHere as error:
        return outcome("not run", str(error))
    except Broken as error:
        return outcome("failed", str(error))
    except TimeoutError:
        return outcome("failed", f"did not end within {CHECK_LIMIT_S:g} s")
    except Exception as error:  # whatever it is, the report names it and the other checks run
        return outcome("failed", f"{type(error).__name__}: {error}")
