"""The network of the soak: over tcp each worker has a network namespace of its own, joined to the others by a bridge,
so that its link can be pulled or its packets to one other dropped; over shm and local all share one namespace (the
wake-up page needs that), and only the control connection can be cut.

All of it lies in a namespace that the soak enters first (`enter`), as root or with a user namespace, and goes with it.
No name and no address is used twice: a killed worker's namespace outlives it, with its link, for as long as the kernel
tries to deliver what the worker had sent, which may be minutes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from support.network.namespaces import ENVIRONMENT, PATH

INSIDE = "AIOTE_SOAK_INSIDE"
QUIETLY: dict[str, Any] = {"env": ENVIRONMENT, "capture_output": True, "text": True}
WAYS_IN = (["unshare", "-n"], ["unshare", "-Urn"])
HOSTS_A_BLOCK = 250
SHARED = ("shm", "local")
"""Providers that need one network namespace for all."""
Heal = Callable[[], None]
numbers = itertools.count(1)
"""Of the links, in this process."""


def fresh(number: int) -> str:
    """Return a link's name; another soak in the same namespace has others."""
    return f"s{os.getpid()}n{number}"


def address(number: int) -> str:
    """Return the address of a link's end."""
    return f"10.99.{number // HOSTS_A_BLOCK}.{number % HOSTS_A_BLOCK + 1}"


def enter() -> None:
    """Start this program again in a network namespace, if that can be had; else say loudly that it cannot."""
    if os.environ.get(INSIDE):
        return
    for way in WAYS_IN:
        probe = [*way, "ip", "link", "add", "probe", "type", "bridge"]
        if shutil.which(way[0], path=PATH) and subprocess.run(probe, **QUIETLY).returncode == 0:
            os.environ |= {INSIDE: "yes", "PATH": PATH}
            os.execvp(way[0], [*way, sys.executable, *sys.argv])
    print(
        "!!! NO LINK IS CUT: this user can make no network namespace (that takes root or user namespaces, "
        "unshare and ip of iproute2, and veth and bridge in the kernel)",
        flush=True,
    )


def run(*command: str) -> None:
    """Run a command of the system. Raises RuntimeError with what it said."""
    done = subprocess.run(command, **QUIETLY)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Links:
    """The workers' links. A worker is known by the number of its process."""

    def __init__(self, provider: str) -> None:
        self.inside = bool(os.environ.get(INSIDE))
        self.apart = self.inside and provider not in SHARED
        self._bridge = ""
        self._made: list[str] = []
        self._names: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._ports: dict[int, int] = {}

    def open(self) -> None:
        """Make what joins the workers. Raises RuntimeError."""
        if self.inside:
            run("ip", "link", "set", "lo", "up")
        if self.apart:
            number = next(numbers)
            self._bridge = self._new(number)
            run("ip", "link", "add", self._bridge, "type", "bridge")
            # Of its own address: from outside the workers' namespaces come the hostile peers.
            run("ip", "addr", "add", f"{address(number)}/16", "dev", self._bridge)
            run("ip", "link", "set", self._bridge, "up")

    def close(self) -> None:
        """Remove every link that was made, those of workers that have ended too, as far as they are still there."""
        lines = [f"link del {name}" for name in self._made]
        subprocess.run(["ip", "-force", "-batch", "-"], input="\n".join(lines), **QUIETLY)
        self._made.clear()

    def _new(self, number: int) -> str:
        self._made.append(fresh(number))
        return self._made[-1]

    @property
    def prefix(self) -> list[str]:
        """What a worker's command begins with."""
        return ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if self.apart else []

    def join(self, pid: int) -> str:
        """Give a new worker its link; return the address that its engine is to have, or an empty string for any."""
        if not self.apart:
            return ""
        number = next(numbers)
        name, host = self._new(number), address(number)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run("ip", "link", "set", name, "master", self._bridge, "up")
        self._in(pid, "ip", "addr", "add", f"{host}/16", "dev", "eth0")
        self._in(pid, "ip", "link", "set", "eth0", "up")
        self._names[pid], self._hosts[pid] = name, host
        return host

    def opened(self, pid: int, port: int) -> None:
        """Take note of the port that a worker's engine listens on."""
        self._ports[pid] = port

    def forget(self, pid: int) -> None:
        """Forget a worker that has ended; the kernel takes its link down with it."""
        for table in (self._names, self._hosts, self._ports):
            table.pop(pid, None)

    def pull(self, pid: int) -> Heal:
        """Pull a worker's cable. Raises RuntimeError."""
        name = self._names[pid]
        run("ip", "link", "set", name, "down")
        return lambda: run("ip", "link", "set", name, "up")

    def drop(self, pid: int, other: int) -> Heal:
        """Drop what goes between two workers, both ways; what is to be done to end that is returned."""
        rules = [[chain, flag, self._hosts[other]] for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d"))]
        for rule in rules:
            self._in(pid, "iptables", "-w", "-A", *rule, "-j", "DROP")

        def heal() -> None:
            for rule in rules:
                self._in(pid, "iptables", "-w", "-D", *rule, "-j", "DROP")

        return heal

    def silence(self, pid: int) -> Heal:
        """Drop what goes to and from a worker's control port, in the one namespace that all share."""
        rules = [["INPUT", "-p", "tcp", flag, str(self._ports[pid]), "-j", "DROP"] for flag in ("--dport", "--sport")]
        for rule in rules:
            run("iptables", "-w", "-A", *rule)

        def heal() -> None:
            for rule in rules:
                run("iptables", "-w", "-D", *rule)

        return heal

    def _in(self, pid: int, *command: str) -> None:
        run("nsenter", "-t", str(pid), "-n", *command)
