"""Two network namespaces that a cable joins (a veth pair), to be cut in several ways.

They are held by two processes that wait on a pipe, so they end with the tests, however those end. Root makes them as it
is, anybody else within a user namespace. `missing` says what keeps this machine from making them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time

import anyio
import anyio.to_thread

TOOLS = ("ip", "iptables", "nsenter", "unshare")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
CABLE = "cable0"
HOSTS = ("10.199.7.1", "10.199.7.2")
# iptables' lock lies where only root may write; within namespaces of our own nobody competes for it.
ENVIRONMENT = {**os.environ, "PATH": PATH, "XTABLES_LOCKFILE": os.devnull}


@functools.cache
def missing() -> str:
    """Say what this machine lacks; an empty string where nothing."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (make system installs iproute2 and iptables)"
    try:
        with Network() as network:
            for side in (0, 1):
                network.run(side, "iptables", "-A", "INPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        return f"no network namespaces with iptables: {said or error}"
    return ""


class Network:
    """Side 0 and side 1, each with a loopback of its own, and between them the cable. Making it blocks."""

    def __init__(self) -> None:
        self._user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            self._hold("unshare", *(["--user", "--map-root-user"] if self._user else []), "--net")
            self._hold(*self.enter(0), "unshare", "--net")
            far = str(self._holders[1].pid)
            self.run(0, "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", far)
            for side, host in enumerate(HOSTS):
                self.run(side, "ip", "link", "set", "lo", "up")
                self.run(side, "ip", "address", "add", f"{host}/24", "dev", CABLE)
                self.run(side, "ip", "link", "set", CABLE, "up")
            # The kernel calls a link running up to a second later, and libfabric lists no NIC before.
            while not self._runs():
                time.sleep(0.01)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both namespaces; processes in them keep theirs until they end."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            for end in (holder.stdin, holder.stdout):
                end.close()
        self._holders.clear()

    def _hold(self, *command: str) -> None:
        """Start a process that holds a namespace, and wait until it is in it."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo; exec cat >/dev/null"],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with holder.stderr:
            self._holders.append(holder)
            if holder.stdout.readline() != b"\n":
                raise subprocess.CalledProcessError(1, command, stderr=holder.stderr.read())

    def enter(self, side: int) -> list[str]:
        """Return what a command begins with that runs on a side."""
        return ["nsenter", "--target", str(self._holders[side].pid), *self._user, "--net"]

    def run(self, side: int, *command: str) -> bytes:
        """Run a command on a side and return what it says. Raises CalledProcessError."""
        return subprocess.run([*self.enter(side), *command], env=ENVIRONMENT, check=True, capture_output=True).stdout

    def _runs(self) -> bool:
        return all(b"state UP" in self.run(side, "ip", "-oneline", "link", "show", "dev", CABLE) for side in (0, 1))

    async def tell(self, side: int, *command: str) -> None:
        """Run a command on a side, without holding up the loop."""
        await anyio.run_process([*self.enter(side), *command], env=ENVIRONMENT)

    async def pull(self) -> None:
        """Take the cable out."""
        await self.tell(0, "ip", "link", "set", CABLE, "down")

    async def refuse(self, *target: str, ports: tuple[int, ...] = (), but: tuple[int, ...] = ()) -> None:
        """Have what comes over the cable go to an iptables target, on both sides: all of it, or that from and to some
        ports, or all but that.
        """
        either = [(way, str(port)) for port in ports or but for way in ("--sport", "--dport")]
        some = [["-p", "tcp", way, port] for way, port in either]
        rules = [[*match, "-j", "ACCEPT"] for match in some] if but else []
        rules += [[*match, "-j", *target] for match in (some if ports else [["-p", "tcp"]])]
        for side in (0, 1):
            for rule in rules:
                await self.tell(side, "iptables", "-A", "INPUT", "-i", CABLE, *rule)

    async def heal(self) -> None:
        """Put the cable in and drop all rules."""
        for side in (0, 1):
            await self.tell(side, "iptables", "-F")
        await self.tell(0, "ip", "link", "set", CABLE, "up")
        while not await anyio.to_thread.run_sync(self._runs):
            await anyio.sleep(0.01)
