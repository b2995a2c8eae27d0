"""Which host this is, and which of its addresses an engine binds."""

from __future__ import annotations

import hashlib
import os
import socket

from .config import LOOPBACK, EngineConfig

__all__ = ["bind_host", "host_identity"]


def bind_host(config: EngineConfig) -> str:
    """Return the address that the control connection listens on.

    The configured one; without a key loopback; otherwise the address that the host's own name resolves to, or loopback.
    """
    if config.host is not None:
        return LOOPBACK if config.host == "localhost" else config.host
    if config.cluster_key is None:
        return LOOPBACK
    # Connecting a datagram socket sends nothing; it asks the routing table which address would be used (RFC
    # 5737's example net).
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
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
