"""The identity of this host, and the address that an engine binds."""

from __future__ import annotations

import hashlib
import os
import socket

from .config import LOOPBACK, EngineConfig

__all__ = ["bind_host", "host_identity"]


EXAMPLES = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
"""Outside addresses that are assigned to no host (RFC 5737, RFC 3849)."""


def bind_host(config: EngineConfig) -> str:
    """Return the address that the control connection listens on.

    This is the config's `host` if it is set. Otherwise it is loopback if there is no cluster key. With a cluster key it
    is the source address of this host's packets to other hosts (IPv4 if it has both), or loopback if it has none.
    """
    if config.host is not None:
        return _loopback() if config.host == "localhost" else config.host
    if config.cluster_key is None:
        return _loopback()
    for family, example in EXAMPLES:
        # Connecting a datagram socket sends no packet; it asks the routing table which address would be used.
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((example, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return _loopback()


def _loopback() -> str:
    """Return 127.0.0.1, or ::1 on a host without 127.0.0.1."""
    for family, host in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
                return host
        except OSError:
            continue
    return LOOPBACK


def host_identity() -> bytes:
    """Return 32 bytes that are equal for two engines exactly if they run on one host, with the same network namespace,
    PID namespace and shared memory.
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
        # Containers may share a network but not the shared memory.
        parts.append(str(os.stat("/dev/shm").st_dev))
    except OSError:
        parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).digest()
