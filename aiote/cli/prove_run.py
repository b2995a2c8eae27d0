"""The parts of a run of `aiote prove`, in order: checks, benchmarks, then the tests of a checkout."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread

import aiote
from aiote.cli import prove_nccl, prove_raw, prove_suites
from aiote.cli.prove_link import link_down
from aiote.cli.prove_report import Outcome
from aiote.cli.prove_wire import FarLost, FarRefused, Greeting, ask, dial, engine_host
from aiote.testing import Fabric
from aiote.testing.contract import (
    CHECKS,
    ArrayMemory,
    Broken,
    Check,
    EnginePair,
    NotHere,
    child_command,
    joined,
    pulled_by_engine,
    pulled_in_fabric,
)

__all__ = ["BUDGET_S", "FULL_S", "PULLED", "ProofPart", "Run", "Subject", "far_machine", "parts", "rails_for"]

CHECK_LIMIT_S = 300.0
BUDGET_S, FULL_S = 480.0, 900.0
NO_ENGINE = "no pair of engines: "
MORE_ROUNDS = 5
"""How many times as many rounds a check takes with --full."""
PULLED = "pulled-rail"
WITHOUT_NAMES = {"socket": "127.0.0.1", "tcp": "127.0.0.1"}
"""The NIC of a provider's engines if none is named."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The device under test: its provider, the NICs of each side, the memory to move, and the place of the second
    engine if that is another machine.
    """

    what: str
    provider: str
    rails: list[str] | None
    peer_rails: list[str] | None
    memory: ArrayMemory
    missing: str = ""
    place: tuple[str, int] | None = None

    @property
    def greeting(self) -> Greeting:
        """The greeting of this side when it connects."""
        return Greeting(listens=False, what=self.what, key=aiote.EngineConfig().cluster_key)


@dataclass(slots=True)
class Run:
    """The time that a run may take, and the reason why no further engine would open, if there is one.

    `pull`: a rail may be pulled during transfers; between two machines by taking `interface` down. `written`: GiB/s of
    the writes that were measured, by their bytes.
    """

    subject: Subject
    full: bool = False
    reason: str = ""
    pull: bool = False
    interface: str = ""
    written: dict[int, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def limit_s(self) -> float:
        """How long the whole run may take."""
        return FULL_S if self.full else BUDGET_S

    @property
    def times(self) -> int:
        """How many times as many rounds as usual a check takes."""
        return MORE_ROUNDS if self.full else 1

    @property
    def left_s(self) -> float:
        """How much of that is left."""
        return self.limit_s - (time.monotonic() - self.started)


@dataclass(frozen=True, slots=True)
class ProofPart:
    """One part of a run: its name and claim in the report, and the function that runs it."""

    name: str
    claim: str
    act: Callable[[], Outcome]

    def run(self, run: Run) -> Outcome:
        """Run the part, or say why not. Raises FarLost if the other machine is gone."""
        reason = run.reason or ("" if run.left_s > 0 else prove_suites.OVER)
        return Outcome(self.name, self.claim, "not run", reason) if reason else self.act()


def parts(run: Run, checkout: Path | None, *, bench: bool, suites: bool) -> Iterator[ProofPart]:
    """Yield the parts of a run."""
    subject = run.subject
    for check in CHECKS:
        yield ProofPart(check.name, check.claim, partial(_check, run, check))
    for op in prove_suites.BENCHED if bench else ():
        yield ProofPart(f"bench-{op}", f"figures: {op}", partial(_bench, run, op))
    if bench:
        yield ProofPart(prove_raw.NAME, prove_raw.CLAIM, partial(prove_raw.beside, run))
    if bench and subject.what in prove_nccl.SUBJECTS:
        yield ProofPart(prove_nccl.NAME, prove_nccl.CLAIM, partial(prove_nccl.link, run))
    gpu = subject.what == "cuda"
    for name, (claim, _) in prove_suites.SUITES.items() if suites else ():
        if (name == prove_suites.GPU_SUITE) == gpu:
            yield ProofPart(name, claim, partial(_suite, run, name, checkout))


def _check(run: Run, check: Check) -> Outcome:
    if check.name == PULLED and not run.pull:
        return Outcome(check.name, check.claim, "not run", "needs --pull-rail")
    outcome = anyio.run(_one, run, check)
    if outcome.status == "not run" and outcome.detail.startswith(NO_ENGINE):
        run.reason = outcome.detail
    if outcome.status == "failed" and run.subject.place is not None:
        # An engine may notice before the connection does that the other machine is gone, and then no promise is broken.
        try:
            far_machine(run.subject)
        except (FarRefused, FarLost) as error:
            raise FarLost("the other side is gone") from error
    return outcome


def _bench(run: Run, op: str) -> Outcome:
    subject = run.subject
    reason = "the simulated network has no speed of its own" if subject.what == "sim" else ""
    reason = reason or ("aiote bench is measured by hand with --memory cuda" if subject.what == "cuda" else "")
    if reason:
        return Outcome(f"bench-{op}", f"figures: {op}", "not run", reason)
    measure = partial(prove_suites.bench, op, subject.provider, ",".join(subject.rails or []), full=run.full)
    if subject.place is None:
        outcome = measure(run.left_s)
        if op == "write":
            run.written = {int(name.partition(" ")[0]): value for name, value in outcome.figures.items()}
        return outcome

    async def apart() -> Outcome:
        assert subject.place is not None
        host, port = subject.place
        async with dial(host, port, subject.greeting) as frames:
            theirs = await ask(frames, "bench")
            shown = f"[{host}]" if ":" in host else host
            return await anyio.to_thread.run_sync(partial(measure, run.left_s, connect=f"{shown}:{theirs}"))

    return _or_lost(apart)


def _suite(run: Run, name: str, checkout: Path | None) -> Outcome:
    if run.subject.place is not None:
        claim = prove_suites.SUITES[name][0]
        return Outcome(name, claim, "not run", "the tests use one machine; run the command without --connect for them")
    return prove_suites.suite(name, checkout, run.subject.provider, run.left_s)


def far_machine(subject: Subject) -> dict[str, Any]:
    """Return the other machine's description. Raises FarRefused or FarLost."""

    async def told() -> Any:
        assert subject.place is not None
        async with dial(*subject.place, subject.greeting) as frames:
            return await ask(frames, "machine")

    found: dict[str, Any] = anyio.run(told)
    return found


def _or_lost(work: Callable[[], Any]) -> Outcome:
    """Run work that dials the other machine. Raises FarLost if that no longer listens."""
    try:
        outcome: Outcome = anyio.run(work)
    except FarRefused as error:
        raise FarLost(str(error)) from error
    return outcome


@contextlib.asynccontextmanager
async def _world(run: Run, check: Check) -> AsyncIterator[EnginePair]:
    """Open two engines, or one here and one on the other machine, and connect them. Raises NotHere if one does not
    open.
    """
    subject = run.subject
    async with contextlib.AsyncExitStack() as stack:
        if subject.place is not None:
            yield await _apart(run, stack)
            return
        fabric = stack.enter_context(Fabric(seed=1, rails=2)) if subject.what == "sim" else None
        names = [rails_for(check, subject.provider, rails) for rails in (subject.rails, subject.peer_rails)]
        left, right = [
            await _opened(stack, fabric.open_engine() if fabric else aiote.open_engine(subject.provider, rails))
            for rails in names
        ]
        pairing = joined(
            left,
            right,
            memory=subject.memory,
            child=None if fabric else child_command(subject.provider, subject.peer_rails),
            pull=pulled_in_fabric(fabric) if fabric else pulled_by_engine,
            times=run.times,
        )
        yield await stack.enter_async_context(pairing)


async def _apart(run: Run, stack: contextlib.AsyncExitStack) -> EnginePair:
    """Open an engine here, and have the other machine open the second one."""
    subject = run.subject
    assert subject.place is not None
    frames = await stack.enter_async_context(dial(*subject.place, subject.greeting))
    host = engine_host(frames.local_host)
    left = await _opened(stack, aiote.open_engine(subject.provider, subject.rails, host=host))
    address = await ask(frames, "open")
    try:
        await left.connect(address)
    except aiote.PeerError as error:
        if subject.provider != "local":
            raise
        # Two hosts, or two network namespaces, share no memory: no promise is broken.
        raise NotHere(f"{NO_ENGINE}{error}") from error
    return EnginePair(left, partial(ask, frames), address, subject.memory, run.times, link_down(run.interface))


def rails_for(check: Check, provider: str, names: list[str] | None) -> list[str] | None:
    """Return the NICs of an engine for a check: the named ones, each several times if a check needs more of them."""
    if check.rails == 1:
        return names
    if names is None and provider in WITHOUT_NAMES:
        names = [WITHOUT_NAMES[provider]]
    return names * check.rails if names is not None and len(names) < check.rails else names


async def _opened(stack: contextlib.AsyncExitStack, opening: AbstractAsyncContextManager[aiote.Engine]) -> aiote.Engine:
    try:
        return await stack.enter_async_context(opening)
    except (aiote.UsageError, aiote.FabricError) as error:
        raise NotHere(f"{NO_ENGINE}{error}") from error


async def _one(run: Run, check: Check) -> Outcome:
    """Run one check on new engines, so that an engine that a check broke does not affect the next check."""
    started = time.monotonic()
    figures: dict[str, float] = {}
    limit_s = min(CHECK_LIMIT_S, run.left_s)

    def outcome(status: Literal["passed", "failed", "not run"], detail: str) -> Outcome:
        return Outcome(check.name, check.claim, status, detail, round(time.monotonic() - started, 3), figures)

    try:
        with anyio.fail_after(limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that a provider was never run: the report says so
            async with _world(run, check) as world:
                world.figures = figures
                return outcome("passed", await check.run(world))
    except (FarLost, FarRefused) as error:
        raise FarLost(str(error)) from error
    except NotHere as error:
        return outcome("not run", str(error))
    except Broken as error:
        return outcome("failed", str(error))
    except TimeoutError:
        if limit_s < CHECK_LIMIT_S:
            return outcome("not run", prove_suites.OVER)
        return outcome("failed", f"was not over after {CHECK_LIMIT_S:g} s")
    except Exception as error:  # whatever it is, the report names it and the other checks run
        while isinstance(error, ExceptionGroup):  # of a check's tasks; its own text says nothing
            error = error.exceptions[0]
        return outcome("failed", str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}")
