"""Two network namespaces that cables join (veth pairs), to be cut in several ways and made slow.

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
"""The two ends of the first cable; those of cable i are in 10.199.(7 + i)."""
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


@functools.cache
def missing_netem() -> str:
    """Say what keeps this machine from losing and delaying packets; an empty string where nothing."""
    absent = [tool for tool in (*TOOLS, "tc") if tool != "iptables" and shutil.which(tool, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (make system installs iproute2)"
    try:
        with Network() as network:
            network.run(0, "tc", "qdisc", "add", "dev", CABLE, "root", "netem", "loss", "1%")
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        return f"no network namespaces with netem: {said or error}"
    return ""


def end_of(cable: int, side: int) -> str:
    """Return the address of one end of a cable."""
    return f"10.199.{7 + cable}.{1 + side}"


class Network:
    """Side 0 and side 1, each with a loopback of its own, and between them the cables. Making it blocks."""

    def __init__(self, cables: int = 1) -> None:
        self.cables = [f"cable{i}" for i in range(cables)]
        self._ruled = False
        self._user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            self._hold("unshare", *(["--user", "--map-root-user"] if self._user else []), "--net")
            self._hold(*self.enter(0), "unshare", "--net")
            far = str(self._holders[1].pid)
            self._ip(0, [f"link add {cable} type veth peer name {cable} netns {far}" for cable in self.cables])
            for side in (0, 1):
                lines = [f"address add {end_of(i, side)}/24 dev {cable}" for i, cable in enumerate(self.cables)]
                self._ip(side, lines + [f"link set {name} up" for name in ("lo", *self.cables)])
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

    def _ip(self, side: int, lines: list[str]) -> None:
        """Have one process do many commands of `ip`."""
        command = [*self.enter(side), "ip", "-batch", "-"]
        subprocess.run(command, env=ENVIRONMENT, input="\n".join(lines).encode(), check=True, capture_output=True)

    def _runs(self) -> bool:
        states = [self.run(side, "ip", "-oneline", "link", "show", "type", "veth") for side in (0, 1)]
        return all(state.count(b"state UP") == len(self.cables) for state in states)

    async def tell(self, side: int, *command: str) -> None:
        """Run a command on a side, without holding up the loop."""
        await anyio.run_process([*self.enter(side), *command], env=ENVIRONMENT)

    async def pull(self, cable: str = CABLE) -> None:
        """Take a cable out."""
        await self.tell(0, "ip", "link", "set", cable, "down")

    async def limit(self, cable: str, mbit: int) -> None:
        """Let so many Mbit/s through a cable each way (a token bucket), or, for 0, whatever it takes."""
        for side in (0, 1):
            if mbit:
                rate = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                await self.tell(side, "tc", "qdisc", "replace", "dev", cable, "root", *rate)
            else:
                await anyio.run_process(
                    [*self.enter(side), "tc", "qdisc", "del", "dev", cable, "root"], env=ENVIRONMENT, check=False
                )

    async def disturb(self, cable: str, *netem: str) -> None:
        """Have netem lose, delay or reorder what goes over a cable, each way."""
        for side in (0, 1):
            await self.tell(side, "tc", "qdisc", "replace", "dev", cable, "root", "netem", *netem)

    async def refuse(
        self, *target: str, ports: tuple[int, ...] = (), but: tuple[int, ...] = (), cable: str = CABLE
    ) -> None:
        """Have what comes over a cable go to an iptables target, on both sides: all of it, or that from and to some
        ports, or all but that.
        """
        self._ruled = True
        either = [(way, str(port)) for port in ports or but for way in ("--sport", "--dport")]
        some = [["-p", "tcp", way, port] for way, port in either]
        rules = [[*match, "-j", "ACCEPT"] for match in some] if but else []
        rules += [[*match, "-j", *target] for match in (some if ports else [["-p", "tcp"]])]
        for side in (0, 1):
            for rule in rules:
                await self.tell(side, "iptables", "-A", "INPUT", "-i", cable, *rule)

    async def heal(self) -> None:
        """Put the cables in and drop all rules."""
        if self._ruled:
            for side in (0, 1):
                await self.tell(side, "iptables", "-F")
            self._ruled = False
        for cable in self.cables:
            await self.tell(0, "ip", "link", "set", cable, "up")
        while not await anyio.to_thread.run_sync(self._runs):
            await anyio.sleep(0.01)
