"""The rail that `aiote prove --pull-rail` loses between two machines: a network interface is taken down, and up again.

A process of its own does both. It takes the interface up when its standard input ends, so however the run ends, by
Ctrl-C, by a signal or by a crash, the interface comes up again. It ignores the signals that end the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio

import aiote
from aiote.machine.addresses import addresses, node_of
from aiote.machine.ports import choose_ports, read_ports
from aiote.rails.contract import traits_of
from aiote.testing.contract import EnginePair, NotHere, RailPull

__all__ = ["interface_of", "link_down", "to_pull"]

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1
IFREQ = "16sH22x"
"""netdevice(7): the name, then a union that begins with the flags."""
NET_ADMIN = 1 << 12
"""CAP_NET_ADMIN, capabilities(7)."""
LONGEST_S = 150.0
"""How long the interface stays down if nobody ends that: longer than the check waits."""
DOWN = b"down\n"


def to_pull(provider: str, rails: list[str], place: tuple[str, int]) -> str:
    """Return the interface of the last rail. Raises UsageError unless this process may and should take it down."""
    if len(rails) < 2:
        raise aiote.UsageError("--pull-rail needs two rails on each machine: name them with --rails")
    *others, interface = [interface_of(provider, name) for name in rails]
    if not interface:
        raise aiote.UsageError(f"--pull-rail: no interface carries rail {rails[-1]}; pull its cable by hand")
    said = f"--pull-rail takes the interface {interface} of rail {rails[-1]} down"
    if interface in others or interface == "lo":
        raise aiote.UsageError(f"{said}, which another rail needs; name a last rail with an interface of its own")
    if interface in (_toward(place), addresses().get(aiote.EngineConfig().host or "")):
        raise aiote.UsageError(f"{said}, which carries the connection to the other machine; name another rail last")
    if interface in _with_gateway():
        raise aiote.UsageError(f"{said}, and its routes through a gateway would not come back; name another rail last")
    if not _may_administer():
        raise aiote.UsageError(f"{said} and up again, which needs root (CAP_NET_ADMIN)")
    return interface


def interface_of(provider: str, rail: str) -> str:
    """Return the interface that carries a rail; an empty string if taking one down would not lose it."""
    if provider == "verbs":
        (port,) = choose_ports((rail,), "", read_ports())
        return port.nets[0] if port.ethernet and port.nets else ""
    if not traits_of(provider).by_address:
        return ""
    hosts = addresses()
    return hosts[node_of(rail, hosts, (rail,))]


def _toward(place: tuple[str, int]) -> str:
    """Return the interface that packets to a place leave through; an empty string if there is no route."""
    with contextlib.suppress(OSError):
        kind, _, _, _, there = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # a datagram socket: this sends no packet
            return addresses().get(probe.getsockname()[0], "")
    return ""


def _with_gateway(root: Path = Path("/proc/net")) -> set[str]:
    """Return the interfaces with routes through a gateway, which the kernel forgets when the interface goes down."""
    found = set()
    for line in _lines(root / "route")[1:]:
        name, _, gateway, *_ = line.split()
        if int(gateway, 16):
            found.add(name)
    for line in _lines(root / "ipv6_route"):
        fields = line.split()
        if int(fields[4], 16):
            found.add(fields[9])
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _may_administer() -> bool:
    held = [line.split()[1] for line in _lines(Path("/proc/self/status")) if line.startswith("CapEff:")]
    return bool(held and int(held[0], 16) & NET_ADMIN)


def link_down(interface: str) -> RailPull | None:
    """Return the pull that takes an interface down and up again; None without an interface."""
    if not interface:
        return None

    @contextlib.asynccontextmanager
    async def pulled(_pair: EnginePair) -> AsyncIterator[str]:
        command = [sys.executable, "-P", "-m", __name__, interface]
        # In a session of its own, Ctrl-C at the terminal does not reach it.
        process = await anyio.open_process(command, stderr=None, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = b"the process that does it ended at once"
            with contextlib.suppress(anyio.EndOfStream):
                said = await process.stdout.receive()
            if said != DOWN:
                raise NotHere(f"the interface could not be taken down: {said.decode(errors='replace').strip()}")
            yield "the interface of a rail was taken down, and up again"
        finally:
            with anyio.CancelScope(shield=True):
                await process.stdin.aclose()
                await process.wait()
                await process.aclose()

    return pulled


@contextlib.contextmanager
def _taken_down(interface: str) -> Iterator[None]:
    """Take an interface down, and up again at the end. IPv6 addresses stay meanwhile. Raises OSError."""
    kept = Path("/proc/sys/net/ipv6/conf") / interface / "keep_addr_on_down"
    before = "".join(_lines(kept))
    try:
        if before:
            with contextlib.suppress(OSError):
                kept.write_text("1")
        _switch(interface, up=False)
        yield
    finally:
        _switch(interface, up=True)
        if before:
            with contextlib.suppress(OSError):
                kept.write_text(before)


def _switch(interface: str, *, up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack(IFREQ, interface.encode(), 0)
        _, flags = struct.unpack(IFREQ, fcntl.ioctl(asked, SIOCGIFFLAGS, request))
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack(IFREQ, interface.encode(), flags))


def main(interface: str) -> None:
    """Keep an interface down until standard input ends, or for LONGEST_S."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with _taken_down(interface):
            sys.stdout.buffer.write(DOWN)
            sys.stdout.buffer.flush()
            select.select([sys.stdin], [], [], LONGEST_S)
    except OSError as error:
        print(error.strerror or error)


if __name__ == "__main__":
    main(sys.argv[1])
