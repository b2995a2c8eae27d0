"""Which host this is, and which of its addresses an engine binds."""

from __future__ import annotations

import hashlib
import os
import socket

from .config import LOOPBACK, EngineConfig

__all__ = ["bind_host", "host_identity"]


EXAMPLES = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
"""Addresses outside that nobody has (RFC 5737, RFC 3849)."""


def bind_host(config: EngineConfig) -> str:
    """Return the address that the control connection listens on.

    The configured one; without a key loopback; otherwise the one that this host sends from to others, IPv4 where it
    has both, or loopback.
    """
    if config.host is not None:
        return _loopback() if config.host == "localhost" else config.host
    if config.cluster_key is None:
        return _loopback()
    for family, example in EXAMPLES:
        # Connecting a datagram socket sends nothing; it asks the routing table which address would be used.
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((example, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return _loopback()


def _loopback() -> str:
    """Return 127.0.0.1, or ::1 on a host that has no other."""
    for family, host in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
                return host
        except OSError:
            continue
    return LOOPBACK


def host_identity() -> bytes:
    """Return 32 bytes that two engines share exactly when they run on one host, with one network and one set of process
    numbers, and see the same shared memory.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            with open(path, encoding="ascii") as file:
                parts.append(file.read().strip())
        except OSError:
            parts.append("")
    for name in ("net", "pid"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            parts.append("")
    try:
        # Containers may share a network and not the shared memory.
        parts.append(str(os.stat("/dev/shm").st_dev))
    except OSError:
        parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).digest()
