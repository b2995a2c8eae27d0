"""The IP addresses of this machine, and the choice of the one that a rail is bound to."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from ..errors import UsageError

__all__ = ["addresses", "in_order", "nearest", "node_of", "unknown"]

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
"""netdevice(7): a name of 16 bytes, then a union of 24 bytes. A sockaddr_in takes the first 16 bytes of the union."""


IF_INET6 = Path("/proc/net/if_inet6")
"""A line for each IPv6 address: 32 digits, then index, prefix, scope and flags in hexadecimal, and the interface."""
UNUSABLE = 0x40 | 0x08  # IFA_F_TENTATIVE, IFA_F_DADFAILED: the kernel does not send from it, or not yet
FLEETING = 0x20 | 0x01  # IFA_F_DEPRECATED, IFA_F_TEMPORARY: the kernel will remove it


def addresses() -> dict[str, str]:
    """Return the addresses of this machine, each with its interface's name; IPv4 first.

    Among IPv6 addresses, permanent ones come before those that the kernel will remove. Link-local ones come last and
    include their interface ("fe80::1%eth0"), because they cannot be reached without it.
    """
    return {**_of_version_4(), **_of_version_6()}


def _of_version_6() -> dict[str, str]:
    try:
        lines = IF_INET6.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}  # the kernel has no IPv6
    found = []
    for digits, _, _, _, flags, name in (line.split(maxsplit=5) for line in lines):
        if not int(flags, 16) & UNUSABLE:
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            text = f"{address}%{name}" if address.is_link_local else str(address)
            found.append((address.is_link_local, bool(int(flags, 16) & FLEETING), text, name))
    # The sort is stable: within a kind the kernel's order is kept.
    return {text: name for _, _, text, name in sorted(found, key=lambda one: one[:2])}


def _of_version_4() -> dict[str, str]:
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


def in_order(host: str, hosts: dict[str, str]) -> dict[str, str]:
    """Return the addresses, those of the same IP version as an engine's host first.

    For loopback and for names the version is 4, so that two engines of one host, or of one name, use the same version.
    """
    first = 4 if _is_loopback(host) else _version(host)
    return dict(sorted(hosts.items(), key=lambda item: _version(item[0]) != first))


def nearest(host: str, hosts: list[str]) -> str:
    """Return the rail for a host that the provider need not list, such as 127.0.0.2 or a name; "" if there is none.

    A loopback address gets a loopback rail if there is one, never a NIC that others reach. Raises UsageError if other
    machines can reach the host's address but every rail is loopback: a peer that connected would write to itself.
    """
    if host in hosts and host != "::1":
        return host
    inside = [other for other in hosts if _is_loopback(other)]
    outside = [other for other in hosts if other not in inside]
    if _is_outside(host):
        # The network may translate addresses, but it does not route link-local ones.
        outside = [other for other in outside if _version(other) == _version(host)] or [
            other for other in outside if "%" not in other
        ]
        if hosts and not outside:
            raise UsageError(
                f"host={host!r}: no rail leads there; this machine has only loopback ({', '.join(inside)}). Check that "
                "the NIC is up and has an address, or name the rail: rails=[...]"
            )
    return next(iter(inside + outside if _is_loopback(host) else outside + inside), "")


def _version(host: str) -> int:
    """Return the IP version of an address; 4 for a name."""
    return 6 if ":" in host else 4


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_outside(host: str) -> bool:
    """Tell whether this is an address that other machines can reach; False for a name, because it is not resolved."""
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
        f"rails={list(names)}: some do not exist here; this provider has {', '.join(sorted(set(present)))}"
    )
