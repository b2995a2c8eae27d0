"""The TCP congestion control in force, and a network namespace with another one.

BBR paces its packets, which halves the bandwidth of loopback; comparisons over tcp are better made under reno.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

__all__ = ["NamespaceError", "congestion_control", "enter_namespace"]

SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1


class NamespaceError(Exception):
    """A namespace cannot be made here; the text says why and what to do."""


def congestion_control() -> str:
    """Return the name of the congestion control of new connections, or "unknown" if the kernel does not report it."""
    try:
        return SETTING.read_text().strip()
    except OSError:
        return "unknown"


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def enter_namespace(name: str = "reno") -> None:
    """Move this process, and its future children, to a network namespace with that congestion control.

    The namespace has only a loopback interface. Root makes it directly, other users in a user namespace of their own;
    the process must have one thread. Raises NamespaceError.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        try:
            _unshare(CLONE_NEWNET)
        except PermissionError:
            _unshare(CLONE_NEWUSER | CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _raise_loopback()
        SETTING.write_text(name)
    except OSError as error:
        raise NamespaceError(
            f"cannot make a network namespace with {name}: {error}; run as root, allow user namespaces, or omit --reno"
        ) from error
