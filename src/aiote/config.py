"""The settings of an engine, and the only reader of AIOTE_* variables.

An explicit value wins over the environment, the environment over the default.
"""

from __future__ import annotations

import ipaddress
import math
import os
import ssl
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .errors import UsageError

__all__ = ["HEARTBEAT_MS", "MESSAGE_BYTES", "MESSAGE_POOL", "EngineConfig", "VerbsConfig"]

LOOPBACK = "127.0.0.1"
MIN_KEY_BYTES = 16
MESSAGE_BYTES = (64, 1 << 20)
MESSAGE_POOL = (2, 4096)
HEARTBEAT_MS = (10, (1 << 32) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsConfig:
    """Settings of rails of provider "verbs"; the numbers are those of ibv_modify_qp(3).

    gid_index: which GID of the port to speak from (AIOTE_GID_INDEX); without it RoCE v2 over IPv4 is preferred.
    pkey_index, service_level, traffic_class: for the fabric's partitions and its quality of service. mtu: bytes of a
    packet at most (0: what the port is set to). timeout: a packet without an answer is sent again after
    4.096 us * 2 ** timeout; retries: how often before the connection fails, from 0 to 7. receives: immediates that can
    arrive between two looks, from all peers of a port together.
    """

    gid_index: int | None = None
    pkey_index: int = 0
    service_level: int = 0
    traffic_class: int = 0
    mtu: int = 0
    timeout: int = 14
    retries: int = 6
    receives: int = 2048

    def __post_init__(self) -> None:
        """Take what is not given from the environment and check everything. Raises UsageError."""
        if self.gid_index is None and os.environ.get("AIOTE_GID_INDEX"):
            object.__setattr__(self, "gid_index", _number("AIOTE_GID_INDEX", 0))
        limits = {
            "pkey_index": (0, 65535),
            "service_level": (0, 15),
            "traffic_class": (0, 255),
            "timeout": (1, 31),
            "retries": (0, 7),
            "receives": (64, 32768),
        }
        if self.gid_index is not None:
            limits["gid_index"] = (0, 255)
        _check_integers(self, limits)
        if self.mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise UsageError(f"mtu={self.mtu!r}: expected 256, 512, 1024, 2048 or 4096, or 0 for the port's own")

    @property
    def settings(self) -> dict[str, int]:
        """Those that have a value, by their names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; times in seconds, sizes in bytes.

    cluster_key: the secret that all engines of a cluster share, at least 16 bytes (AIOTE_CLUSTER_KEY); without it
    an engine listens on loopback only. host, port: where the control connection listens (AIOTE_HOST, AIOTE_PORT;
    port 0: any free one). identity: 16 bytes that name the engine over restarts; random by default. ssl_server,
    ssl_client: TLS for the control connection. progress: "adaptive" (on the event loop) or "thread" (a native
    thread, pinned to thread_processor if that is given). spin_us: how long to spin after the last thing that
    happened before sleeping (AIOTE_SPIN_US). message_bytes, message_pool: the largest message taken, and how many
    of each peer are held before its sender waits. heartbeat_interval, heartbeat_limit: how often peers tell
    that they live (10 ms at least), and after how much silence they are lost (AIOTE_HEARTBEAT_LIMIT).
    connect_timeout: how long making a connection may take, from the first packet until transfers may flow, on either
    side (AIOTE_CONNECT_TIMEOUT).
    drain_timeout: how long a cancelled transfer may take to leave the NIC before its connection is torn down.
    stripe_bytes: no stripe is made smaller than this for the sake of spreading over rails. largest_message:
    transfers are cut in pieces of at most this, so that a cancelled one has little to wait for (0: the provider's
    own limit). max_transfers: unfinished transfers toward one peer; beyond, awaited verbs wait in line and
    `submit_` forms raise QueueFull. max_counters: immediates in use at once. schedule: which rail gets the next
    stripe or page: "first-over" (the one that will have carried it first) or "in-turn" (one after the other).
    verbs: settings of rails that libibverbs drives. library: path of libfabric.so.1 (AIOTE_LIBFABRIC).
    """

    cluster_key: bytes | None = field(default=None, repr=False)
    host: str | None = None
    port: int | None = None
    identity: bytes | None = None
    ssl_server: ssl.SSLContext | None = None
    ssl_client: ssl.SSLContext | None = None
    progress: Literal["adaptive", "thread"] = "adaptive"
    thread_processor: int | None = None
    spin_us: int | None = None
    message_bytes: int = 16384
    message_pool: int = 16
    heartbeat_interval: float = 1.0
    heartbeat_limit: float = field(default_factory=lambda: _seconds("AIOTE_HEARTBEAT_LIMIT", 3.0))
    connect_timeout: float = field(default_factory=lambda: _seconds("AIOTE_CONNECT_TIMEOUT", 10.0))
    drain_timeout: float = 1.0
    stripe_bytes: int = 65536
    largest_message: int = 2 << 20
    max_transfers: int = 16384
    max_counters: int = 1 << 20
    schedule: Literal["first-over", "in-turn"] = "first-over"
    verbs: VerbsConfig = field(default_factory=VerbsConfig)
    library: str | None = None

    @property
    def of_fabric(self) -> dict[str, Any]:
        """What rails and native core are opened with."""
        return {
            "library": self.library or "",
            "largest": self.largest_message,
            "verbs": self.verbs.settings,
            "messages": self.message_pool,
            "spin_us": self.spin_us,
            "threaded": self.progress == "thread",
            "processor": self.thread_processor,
            "smallest": self.stripe_bytes,
            "counters": self.max_counters,
        }

    def __post_init__(self) -> None:
        """Take what is not given from the environment and check everything. Raises UsageError."""
        self._fill("cluster_key", self._key())
        self._fill("host", os.environ.get("AIOTE_HOST") or None)
        self._fill("port", _number("AIOTE_PORT", 0))
        self._fill("spin_us", _number("AIOTE_SPIN_US", 50))
        self._fill("library", os.environ.get("AIOTE_LIBFABRIC", ""))
        self._fill("thread_processor", -1)
        for name in ("cluster_key", "identity"):
            if not isinstance(getattr(self, name), bytes | None):
                raise UsageError(f"{name} must be bytes, got {type(getattr(self, name)).__name__}")
        if self.cluster_key is not None and len(self.cluster_key) < MIN_KEY_BYTES:
            raise UsageError(
                f"cluster_key has {len(self.cluster_key)} bytes; at least {MIN_KEY_BYTES} are needed, drawn at random"
            )
        if self.identity is not None and len(self.identity) != 16:
            raise UsageError(f"identity has {len(self.identity)} bytes, expected 16")
        if self.progress not in ("adaptive", "thread"):
            raise UsageError(f"progress={self.progress!r}: expected 'adaptive' or 'thread'")
        if self.schedule not in ("first-over", "in-turn"):
            raise UsageError(f"schedule={self.schedule!r}: expected 'first-over' or 'in-turn'")
        if self.cluster_key is None and self.host is not None and not _is_loopback(self.host):
            raise UsageError(
                f"host={self.host!r} without a cluster_key: an engine without a key listens on loopback only; "
                "set cluster_key or AIOTE_CLUSTER_KEY to the same secret on all engines"
            )
        self._check_numbers()

    def _key(self) -> bytes | None:
        text = os.environ.get("AIOTE_CLUSTER_KEY", "")
        return text.encode() if text else None

    def _fill(self, name: str, value: object) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        limits = {
            "port": (0, 65535),
            "spin_us": (0, 1_000_000),
            "thread_processor": (-1, 4095),
            "message_bytes": MESSAGE_BYTES,
            "message_pool": MESSAGE_POOL,
            "stripe_bytes": (1, 1 << 40),
            "largest_message": (0, 1 << 62),
            "max_transfers": (1, 1 << 24),
            "max_counters": (1, 1 << 28),
        }
        _check_integers(self, limits)
        if not isinstance(self.verbs, VerbsConfig):
            raise UsageError(f"verbs must be a VerbsConfig, got {type(self.verbs).__name__}")
        for name in ("heartbeat_interval", "heartbeat_limit", "connect_timeout", "drain_timeout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise UsageError(f"{name}={value!r}: expected a positive number of seconds")
        if self.heartbeat_interval * 1000 < HEARTBEAT_MS[0]:
            raise UsageError(f"heartbeat_interval={self.heartbeat_interval}: expected at least 0.01 seconds")
        if self.heartbeat_interval >= self.heartbeat_limit:
            raise UsageError(
                f"heartbeat_interval={self.heartbeat_interval} must be smaller than "
                f"heartbeat_limit={self.heartbeat_limit}"
            )


def _check_integers(settings: object, limits: dict[str, tuple[int, int]]) -> None:
    for name, (least, most) in limits.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name}={value!r}: expected an integer from {least} to {most}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may resolve to anything, however it begins; this one is taken for 127.0.0.1 without asking.
        return host == "localhost"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r}: expected an integer") from None


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UsageError(f"{name}={text!r}: expected a number of seconds") from None
