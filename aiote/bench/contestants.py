"""The contestants of a comparison, and how to start the two processes of each: here, or one on another machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiote.bench.devices import ports_of
from aiote.bench.perftest import available
from aiote.bench.remote import TargetMachine
from aiote.bench.sides import BenchError, LocalSide, Pair, eventfds
from aiote.bench.work import MEMORIES

__all__ = [
    "OWN",
    "Contestant",
    "Setting",
    "aiote_worker",
    "perftest",
    "processors",
    "raw_worker",
    "start",
    "worker_command",
]

OWN = ("verbs", "local", "socket")
"""Providers that need no libfabric."""
ELSEWHERE = {"local": "shm", "socket": "tcp"}
"""What moves bytes by the same means as our own rails, by the names that other libraries' workers take."""

# The program is beside this file in an installed package, and in the build folder of an editable one.
RAW = Path(str(files("aiote.bench").joinpath("aiote-bench-raw")))


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all contestants of a comparison share. `library` is a path of libfabric.so.1, "" for the
    default; the providers in OWN take none. `memory` is one of MEMORIES. `gpu_sharing` is the engines' setting; None:
    the default.
    """

    provider: str
    library: str = ""
    mode: str = "spin"
    loop: str = "asyncio"
    progress: str = "adaptive"
    rails: str = ""
    arena: int = 64 << 20
    memory: str = "host"
    gpu_sharing: bool | None = None

    @property
    def over_tcp(self) -> bool:
        """Whether TCP carries the bytes, as far as the provider is known."""
        return self.provider not in ("shm", "verbs", "local")

    def memory_of(self, role: str) -> str:
        """Return the kind of memory of the initiator or of the target: host or cuda."""
        initiator, target = MEMORIES[self.memory]
        return target if role == "target" else initiator


@dataclass(frozen=True, slots=True)
class Contestant:
    """`kind` is aiote, raw, or other; others have a command of their own, and name the providers that they support."""

    name: str
    kind: str
    command: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()

    def takes_part(self, setting: Setting) -> bool:
        """Return whether it supports a setting.

        With default settings it runs over its shm or tcp beside local or socket; the other modes have rows for these.
        """
        aliases = ELSEWHERE if setting.mode == "default" else {}
        return not self.providers or aliases.get(setting.provider, setting.provider) in self.providers

    @classmethod
    def other(cls, told: dict[str, Any]) -> Contestant:
        """Return a peer's worker as bench/install_peers.py tells of it. Raises KeyError, TypeError."""
        command = (told["python"], told["worker"], *told.get("args", ()))
        return cls(told["name"], "other", command, tuple(told["providers"]))

    @classmethod
    def others(cls, path: Path) -> list[Contestant]:
        """Read the peers' workers, one JSON object a line. Raises BenchError for anything else."""
        found = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                found.append(cls.other(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f"{path}, line {number}: not a worker: {error}") from error
        return found


def perftest(rails: str) -> list[Contestant]:
    """Return linux-rdma's perftest as a contestant over verbs, if it is installed."""
    if not available():
        return []
    command = (sys.executable, "-P", "-m", "aiote.bench.perftest", f"--rails={rails}")
    return [Contestant("perftest", "other", command, ("verbs",))]


def aiote_worker(role: str, setting: Setting, host: str = "") -> list[str]:
    """Return the command of a side of aiote's pair."""
    command = [sys.executable, "-P", "-m", "aiote.bench.worker", "--role", role, "--loop", setting.loop]
    command += ["--progress", setting.progress]
    if (memory := setting.memory_of(role)) != "host":
        command += ["--memory", memory]
    if setting.gpu_sharing is not None:
        command += ["--gpu-sharing", "on" if setting.gpu_sharing else "off"]
    if host:
        command += ["--host", host]
    return command


def raw_worker(role: str, setting: Setting, host: str = "") -> list[str]:
    """Return the command of a side of the pair in C. Raises BenchError if the program was not built."""
    if not RAW.exists():
        raise BenchError(f"the baseline {RAW.name} is missing; it is built with the package, so install aiote again")
    command = [str(RAW), "--role", role]
    if host:
        command += ["--host", host]
    return command


def worker_command(contestant: Contestant, role: str, setting: Setting, processor: int, host: str = "") -> list[str]:
    """Return the command of one side. Raises BenchError if the contestant does not support the setting."""
    if contestant.kind != "aiote" and setting.memory != "host":
        raise BenchError(f"{contestant.name}: only aiote's own loops can move GPU memory; use --memory host")
    provider, mode = setting.provider, setting.mode
    if contestant.kind == "other":
        command = [*contestant.command, "--role", role]
        # Other libraries have no default but to poll, or sleep in either mode.
        provider, mode = ELSEWHERE.get(provider, provider), "spin" if mode == "default" else mode
    else:
        make = aiote_worker if contestant.kind == "aiote" else raw_worker
        command = make(role, setting, host)
        if setting.library:
            command += ["--library", setting.library]
        if rails := _rails(contestant.kind, role, setting, host):
            command += ["--rails", rails]
    command += ["--provider", provider, "--mode", mode]
    return [*command, "--arena", str(setting.arena), "--cpu", str(processor)]


def _rails(kind: str, role: str, setting: Setting, host: str) -> str:
    if setting.provider != "verbs":
        return setting.rails
    # The raw loops cannot look up ports. They are given the port and the GID that an engine would choose.
    ports = ports_of(role, setting.rails, host)
    return ",".join(port.name if kind == "aiote" else f"{port.device}:{port.number}:{gid.index}" for port, gid in ports)


def processors() -> tuple[int, int]:
    """Return the processors of initiator and target, different ones if there are two."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[1 if len(usable) > 1 else 0]


@contextlib.contextmanager
def start(contestant: Contestant, setting: Setting, machine: TargetMachine | None = None) -> Iterator[Pair]:
    """Start both sides of a contestant and connect them. The target runs on `machine` if given, else on this one."""
    # A program with default settings is pinned to no processor.
    here, there = processors() if setting.mode != "default" else (-1, -1)
    with contextlib.ExitStack() as stack:
        needs_eventfds = contestant.kind == "raw" and setting.provider in ("shm", "local") and setting.mode != "spin"
        ours: Sequence[str] = ()
        theirs: Sequence[str] = ()
        fds: Sequence[int] = ()
        if needs_eventfds:
            fds = own, other = stack.enter_context(eventfds())
            ours = ("--own-eventfd", str(own), "--peer-eventfd", str(other))
            theirs = ("--own-eventfd", str(other), "--peer-eventfd", str(own))
        host = machine.local_host if machine is not None else ""
        initiator = LocalSide(
            f"{contestant.name} initiator",
            [*worker_command(contestant, "initiator", setting, here, host), *ours],
            fds=fds,
        )
        stack.callback(initiator.close)
        if machine is not None:
            if contestant.kind == "raw" and setting.provider == "local":
                raise BenchError("local is between processes of one machine; with --connect measure socket")
            target = machine.spawn(contestant.name, contestant.kind, setting)
            stack.callback(target.close)
            yield _meet_peer(Pair(contestant.name, target, initiator))
            return
        side = LocalSide(
            f"{contestant.name} target",
            [*worker_command(contestant, "target", setting, there), *theirs],
            fds=fds,
        )
        stack.callback(side.close)
        pair = Pair(contestant.name, side, initiator, (initiator, side) if contestant.kind == "other" else ())
        stack.callback(pair.go_on)
        yield _meet_peer(pair)


def _meet_peer(pair: Pair) -> Pair:
    pair.meet()
    return pair
