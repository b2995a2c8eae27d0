"""The command `aiote prove`: test on a device what the docs claim of it, and write a report.

The checks run between two engines: both on this machine, or one on another machine that listens. Then come benchmarks,
then the tests of a checkout if there is one. If the device is missing, no check runs. The report then says so, and the
exit status is never success.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

import aiote
from aiote.cli import prove_link, prove_listen, prove_suites, prove_wire
from aiote.cli.prove_report import Outcome, Report, boot, machine, now
from aiote.cli.prove_run import PULLED, Run, Subject, far_machine, parts
from aiote.cli.prove_wire import FarLost, FarRefused
from aiote.machine.ports import read_ports
from aiote.rails.libfabric import efa_state
from aiote.testing.contract import HostMemory, gpu_memory

__all__ = ["command", "prove"]

What = Literal["efa", "verbs", "cuda", "cxi", "local", "socket", "tcp", "sim"]
INTERRUPTED = 130

Subjects = Annotated[What, typer.Argument(metavar="WHAT", help="efa, verbs, cuda, cxi; or local, socket, tcp, sim.")]
Rails = Annotated[str, typer.Option(metavar="NAMES", help="NICs of the first engine, with commas.")]
PeerRails = Annotated[
    str, typer.Option(metavar="NAMES", help="NICs of the second engine. Default: those of the first.")
]
Over = Annotated[str, typer.Option(metavar="PROVIDER", help="For cuda: the provider that carries the GPU's bytes.")]
Output = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.json", help="Where to write; a .txt goes beside.")
]
Checkout = Annotated[
    Path | None,
    typer.Option(metavar="DIR", exists=True, file_okay=False, help="A checkout or unpacked sdist, for its tests."),
]
NoBench = Annotated[bool, typer.Option("--no-bench", help="Leave out the benchmarks.")]
NoSuites = Annotated[bool, typer.Option("--no-suites", help="Leave out the checkout's tests.")]
Full = Annotated[bool, typer.Option("--full", help="More rounds and runs: 15 minutes at most, not 8.")]
PullRail = Annotated[
    bool,
    typer.Option(
        "--pull-rail",
        help="Lose a rail during writes. With --connect, take the interface of the last one of --rails down and up.",
    ),
]
Listen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Be the second engine, for the machine that connects. Ctrl-C ends it.")
]
Connect = Annotated[str, typer.Option(metavar="HOST:PORT", help="The machine that listens; it has the second engine.")]


def command(
    what: Subjects,
    rails: Rails = "",
    peer_rails: PeerRails = "",
    over: Over = "local",
    report: Output = None,
    checkout: Checkout = None,
    no_bench: NoBench = False,
    no_suites: NoSuites = False,
    full: Full = False,
    pull_rail: PullRail = False,
    listen: Listen = "",
    connect: Connect = "",
) -> None:
    """Test on a device what the docs claim of it, and write a report that can be published as it is.

    Both engines are on this machine, unless another one listens. The report has no name and no address of a host, a
    device or a user. Exits with 1 if a check fails, with 2 if nothing could be run or the run ended early, and with 130
    after Ctrl-C.
    """
    subject = _subject(what, _names(rails), _names(peer_rails), over)
    interface = ""
    if listen or connect:
        place = _place(what, listen, connect)
        if listen and pull_rail:
            _fail("--pull-rail is for the machine that connects; there an interface is taken down")
        if listen:
            _listen(subject, place)
        subject = replace(subject, place=place)
        interface = _pulled(subject) if pull_rail and not subject.missing else ""
    found = Report(
        what, subject.provider, _machine(), now(), subject.memory.name, missing=subject.missing, names=_named(connect)
    )
    run = Run(subject, full, subject.missing, pull=pull_rail, interface=interface)
    found.limit_s = run.limit_s
    if connect:
        found.far = _greeted(subject)
    typer.echo(f"aiote prove {what}: provider {subject.provider}, memory of {subject.memory.name}")
    where = None if no_suites else checkout or prove_suites.checkout_here()
    prove(run, found, where, typer.echo, bench=not no_bench, suites=not no_suites)
    path = report or Path(f"aiote-prove-{what}-{found.started.replace(':', '')}.json")
    beside = found.write(path)
    typer.echo(f"{found.conclusion()}\nwritten: {path}, {beside}")
    raise typer.Exit(INTERRUPTED if found.partial.startswith("interrupted") else found.exit_status)


def prove(
    run: Run, found: Report, checkout: Path | None, tell: Callable[[str], object], *, bench: bool, suites: bool
) -> None:
    """Run all parts, put their outcomes into the report, and call `tell` with a line for each.

    After Ctrl-C, or once the other machine is gone, the report is partial, and all other parts are "not run".
    """
    ahead = list(parts(run, checkout, bench=bench, suites=suites))
    for number, part in enumerate(ahead, 1):
        title = (
            f"[{number}/{len(ahead)}] {part.name}: {part.claim}; at most {max(run.left_s, 0) / 60:.1f} minutes are left"
        )
        try:
            with Console(stderr=True).status(title):
                outcome = part.run(run)
            found.outcomes.append(outcome)
            tell(outcome.line())
        except (KeyboardInterrupt, FarLost) as error:
            lost = "the other machine was lost" if isinstance(error, FarLost) else "interrupted"
            run.reason = found.partial = f"{lost} during {part.name}"
            if len(found.outcomes) < number:
                found.outcomes.append(Outcome(part.name, part.claim, "not run", found.partial))
                tell(found.outcomes[-1].line())


def _fail(text: str) -> NoReturn:
    typer.echo(f"aiote: {text}", err=True)
    raise typer.Exit(2)


def _place(what: str, listen: str, connect: str) -> tuple[str, int]:
    """Check the options of two machines, and return where to listen or to connect."""
    if listen and connect:
        _fail("--listen is for one machine and --connect for the other")
    if what == "sim":
        _fail("the simulated network lies in one process; prove another rail over two machines")
    try:
        host, port = prove_wire.place(listen or connect)
        if listen and aiote.EngineConfig().cluster_key is None:
            # An engine without a key listens on loopback only, so it would not be reached from another machine.
            aiote.EngineConfig(host=host)
    except aiote.UsageError as error:
        _fail(str(error))
    return host, port


def _pulled(subject: Subject) -> str:
    """Return the interface that is taken down for --pull-rail, and say so; exit with 2 if that would not be right."""
    assert subject.place is not None
    try:
        interface = prove_link.to_pull(subject.provider, subject.rails or [], subject.place)
    except aiote.UsageError as error:
        _fail(str(error))
    typer.echo(f"--pull-rail takes the interface {interface} down during the check {PULLED}, and up again afterwards")
    return interface


def _listen(subject: Subject, place: tuple[str, int]) -> NoReturn:
    """Be the second engine until interrupted."""
    if subject.missing:
        _fail(subject.missing)
    try:
        prove_listen.listen(subject, place, _machine(), typer.echo)
    except OSError as error:
        _fail(f"cannot listen there: {error}")
    raise typer.Exit(INTERRUPTED)


def _greeted(subject: Subject) -> dict[str, Any]:
    """Return the other machine's description; exit with 2 and one sentence if it does not fit."""
    try:
        told = far_machine(subject)
    except (FarRefused, FarLost) as error:
        _fail(str(error))
    return {"host": "the same" if told.pop("boot") == boot() else "another", **told}


def _named(connect: str) -> list[str]:
    """Return the other machine's name as it was given, which the report must not have."""
    return [prove_wire.place(connect)[0]] if connect else []


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
    # An endpoint shows more than the list of NICs: an old driver has no descriptor to sleep on.
    lacks = efa_state(aiote.EngineConfig().libfabric, here=False)[1] if what == "efa" else ""
    return Subject(what, what, rails, peer_rails or rails, HostMemory(), lacks)


def _machine() -> dict[str, Any]:
    """Describe the machine from a process of its own, because a library that was probed stays known to libibverbs."""
    program = f"import json; from {machine.__module__} import machine; print(json.dumps(machine()))"
    done = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
