"""Which of this machine's IPv4 addresses a rail is bound to."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct

from ..errors import UsageError

__all__ = ["addresses", "nearest", "node_of", "unknown"]

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
"""netdevice(7): a name of 16 bytes, then a union of 24, of which a sockaddr_in is the first 16."""


def addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine, each with its interface's name."""
    for count in (64, 1024, 16384):
        room = array.array("B", bytes(count * IFREQ_BYTES))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            request = struct.pack("iP", len(room), room.buffer_info()[0])
            used = struct.unpack("iP", fcntl.ioctl(asker, SIOCGIFCONF, request))[0]
        if used < len(room):
            break
    found = {}
    for at in range(0, used, IFREQ_BYTES):
        entry = bytes(room[at : at + IFREQ_BYTES])
        found[socket.inet_ntoa(entry[20:24])] = entry[:16].split(b"\0")[0].decode(errors="replace")
    return found


def nearest(host: str, hosts: list[str]) -> str:
    """Return the rail for a host that need not be one that the provider lists, as 127.0.0.2, ::1 or a name.

    A loopback address gets a loopback rail where there is one: no NIC that others reach. Raises UsageError where the
    host is an address for others, and loopback is all that there is: who connected would write to itself.
    """
    if host in hosts:
        return host
    inside = [other for other in hosts if _is_loopback(other)]
    outside = [other for other in hosts if other not in inside]
    if hosts and not outside and _is_outside(host):
        raise UsageError(
            f"host={host!r}: no rail leads there; this machine has none but loopback ({', '.join(inside)}). Is the NIC "
            "up, and has it an IPv4 address? Or name the rail: rails=[...]"
        )
    return next(iter(inside + outside if _is_loopback(host) else outside + inside), "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_outside(host: str) -> bool:
    """Tell whether it is an address that others can reach; of a name nothing is known."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def node_of(name: str, hosts: dict[str, str], names: tuple[str, ...]) -> str:
    for node, domain in hosts.items():
        if name in (node, domain):
            return node
    raise unknown(names, [f"{domain} ({node})" for node, domain in hosts.items()])


def unknown(names: tuple[str, ...], present: list[str]) -> UsageError:
    return UsageError(
        f"rails={list(names)}: not all of them are here; this provider has {', '.join(sorted(set(present)))}"
    )
