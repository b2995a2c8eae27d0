"""The settings of an engine, and the only reader of AIOTE_* variables.

An explicit value other than None takes precedence over the environment, and the environment over the default. A setting
`name` has the variable AIOTE_<NAME>, and a setting of `VerbsConfig` has AIOTE_VERBS_<NAME>. Only TLS contexts have no
variable.
"""

from __future__ import annotations

import ipaddress
import math
import os
import ssl
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal

from .errors import UsageError

__all__ = ["HEARTBEAT_MS", "MESSAGE_BYTES", "MESSAGE_POOL", "EngineConfig", "VerbsConfig", "variables_set"]

LOOPBACK = "127.0.0.1"
MIN_KEY_BYTES = 16
MESSAGE_BYTES = (64, 1 << 20)
MESSAGE_POOL = (2, 4096)
RING_BYTES = (128 << 10, 4 << 20)
GPU_STAGING_BYTES = (4 << 20, 64 << 20)
HEARTBEAT_MS = (10, (1 << 32) - 1)


def _as_switch(text: str) -> bool:
    """Parse on or off, true or false, 1 or 0. Raises ValueError."""
    if text.lower() not in ("1", "on", "true", "0", "off", "false"):
        raise ValueError(text)
    return text.lower() in ("1", "on", "true")


EXPECTED: dict[Callable[[str], Any], str] = {
    int: "an integer",
    float: "a number of seconds",
    bytes.fromhex: "hexadecimal digits",
    str.encode: "text",
    _as_switch: "on or off",
}


def _setting(name: str, default: Any, parse: Callable[[str], Any] = str, **options: Any) -> Any:
    """Make a field whose default is the value of its variable, if that is set and not empty."""
    variable = f"AIOTE_{name.upper()}"

    def read() -> Any:
        text = os.environ.get(variable, "")
        try:
            return parse(text) if text else default
        except ValueError:
            raise UsageError(f"{variable}={text!r}: expected {EXPECTED[parse]}") from None

    return field(default_factory=read, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsConfig:
    """Settings of rails of provider "verbs"; the numbers are those of ibv_modify_qp(3).

    gid_index: the index of the port's GID to use; without it RoCE v2 over IPv4 is preferred. pkey_index, service_level,
    traffic_class: for the fabric's partitions and its quality of service. mtu: bytes of a packet at most (0: the port's
    setting). timeout: a packet without an answer is sent again after 4.096 us * 2 ** timeout; retries: how often it is
    sent again before the connection fails, from 0 to 7. srq_depth: immediates that can arrive between two polls, from
    all peers of a port together.
    """

    gid_index: int | None = _setting("verbs_gid_index", None, int)
    pkey_index: int = _setting("verbs_pkey_index", 0, int)
    service_level: int = _setting("verbs_service_level", 0, int)
    traffic_class: int = _setting("verbs_traffic_class", 0, int)
    mtu: int = _setting("verbs_mtu", 0, int)
    timeout: int = _setting("verbs_timeout", 14, int)
    retries: int = _setting("verbs_retries", 6, int)
    srq_depth: int = _setting("verbs_srq_depth", 2048, int)

    def __post_init__(self) -> None:
        """Check all settings. Raises UsageError."""
        _fill(self)
        limits = {
            "pkey_index": (0, 65535),
            "service_level": (0, 15),
            "traffic_class": (0, 255),
            "timeout": (1, 31),
            "retries": (0, 7),
            "srq_depth": (64, 32768),
        }
        if self.gid_index is not None:
            limits["gid_index"] = (0, 255)
        _check_integers(self, limits)
        if self.mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise UsageError(f"mtu={self.mtu!r}: expected 256, 512, 1024, 2048 or 4096, or 0 for the port's own")

    @property
    def settings(self) -> dict[str, int]:
        """The settings that have a value, by their names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; times in seconds, sizes in bytes.

    cluster_key: the secret that all engines of a cluster share, at least 16 bytes; without it an engine listens on
    loopback only. host, port: where the control connection listens (port 0: any free one). identity: 16 bytes that
    identify the engine across restarts (hexadecimal in the variable); random by default. ssl_server, ssl_client: TLS
    for the control connection. progress: "adaptive" (on the event loop; by a native thread while the loop gets no
    news), "loop" (on the event loop alone) or "thread" (a native thread, pinned to the processor thread_cpu if that is
    not -1). spin_us: how long to spin after the last event before sleeping.
    message_bytes, message_pool: the largest message accepted, and how many of each peer are buffered before its sender
    waits. heartbeat_interval, heartbeat_timeout: how often peers send heartbeats (10 ms at least), and after how much
    silence a peer is lost. connect_timeout: how long connecting may take, from the first packet until transfers may
    flow, on either side. drain_timeout: how long a cancelled transfer may take to leave the NIC before its connection
    is torn down. stripe_bytes: spreading over rails makes no stripe smaller than this. largest_message: transfers are
    split into pieces of at most this size, so that a cancelled one drains quickly (0: the provider's own limit).
    ring_bytes: bytes in flight between two processes of one host, each way, before the sender waits. max_transfers:
    unfinished transfers toward one peer; beyond that, awaited verbs wait for room and `submit_` forms raise QueueFull.
    max_counters: immediates in use at once. max_mapped_bytes: bytes of shared memory of one peer mapped here at once.
    schedule: which rail gets the next stripe or page: "earliest-finish" (the rail expected to carry it first) or
    "round-robin". status_page: whether `aiote top` of the same user sees the engine. verbs: settings of rails that
    libibverbs drives. libfabric: path of libfabric.so.1. libcuda: path of libcuda.so.1, the driver of NVIDIA's GPUs,
    which is opened when GPU memory is first registered. gpu_sharing: whether processes of this host that have the
    cluster key may open allocations of registered GPU memory, and this engine theirs. gpu_staging_bytes: pinned memory
    of each rail, GPU and direction, through which rails move GPU memory that they do not reach. fallback: whether a
    `socket` rail is opened beside NICs that have few queue pairs (EFA), for peers that find none left.
    kept_receive_bytes: how much receive memory of connectors stays mapped and registered while it is unused.
    """

    cluster_key: bytes | None = _setting("cluster_key", None, str.encode, repr=False)
    host: str | None = _setting("host", None)
    port: int = _setting("port", 0, int)
    identity: bytes | None = _setting("identity", None, bytes.fromhex)
    ssl_server: ssl.SSLContext | None = None
    ssl_client: ssl.SSLContext | None = None
    progress: Literal["adaptive", "loop", "thread"] = _setting("progress", "adaptive")
    thread_cpu: int = _setting("thread_cpu", -1, int)
    spin_us: int = _setting("spin_us", 50, int)
    message_bytes: int = _setting("message_bytes", 16384, int)
    message_pool: int = _setting("message_pool", 16, int)
    heartbeat_interval: float = _setting("heartbeat_interval", 1.0, float)
    heartbeat_timeout: float = _setting("heartbeat_timeout", 3.0, float)
    connect_timeout: float = _setting("connect_timeout", 10.0, float)
    drain_timeout: float = _setting("drain_timeout", 1.0, float)
    stripe_bytes: int = _setting("stripe_bytes", 65536, int)
    largest_message: int = _setting("largest_message", 2 << 20, int)
    ring_bytes: int = _setting("ring_bytes", 2 << 20, int)
    max_transfers: int = _setting("max_transfers", 16384, int)
    max_counters: int = _setting("max_counters", 1 << 20, int)
    kept_receive_bytes: int = _setting("kept_receive_bytes", 1 << 30, int)
    max_mapped_bytes: int = _setting("max_mapped_bytes", 16 << 30, int)
    schedule: Literal["earliest-finish", "round-robin"] = _setting("schedule", "earliest-finish")
    status_page: bool = _setting("status_page", True, _as_switch)
    verbs: VerbsConfig = field(default_factory=VerbsConfig)
    libfabric: str = _setting("libfabric", "")
    libcuda: str = _setting("libcuda", "")
    gpu_sharing: bool = _setting("gpu_sharing", True, _as_switch)
    gpu_staging_bytes: int = _setting("gpu_staging_bytes", 8 << 20, int)
    fallback: bool = _setting("fallback", True, _as_switch)

    @property
    def of_rail_set(self) -> dict[str, Any]:
        """The arguments that rails and native core are opened with."""
        return {
            "library": self.libfabric,
            "cuda": self.libcuda,
            "largest": self.largest_message,
            "verbs": self.verbs.settings,
            "messages": self.message_pool,
            "ring_bytes": self.ring_bytes,
            "gpu_sharing": self.gpu_sharing,
            "gpu_staging_bytes": self.gpu_staging_bytes,
            "fallback": self.fallback,
            "spin_us": self.spin_us,
            "threaded": self.progress == "thread",
            "idle_thread": self.progress == "adaptive",
            "cpu": self.thread_cpu,
            "smallest": self.stripe_bytes,
            "counters": self.max_counters,
            "silence": self.heartbeat_timeout,
        }

    def __post_init__(self) -> None:
        """Check all settings. Raises UsageError."""
        _fill(self)
        for name in ("cluster_key", "identity"):
            if not isinstance(getattr(self, name), bytes | None):
                raise UsageError(f"{name} must be bytes, got {type(getattr(self, name)).__name__}")
        for name in ("host", "libfabric", "libcuda"):
            if not isinstance(getattr(self, name), str | None):
                raise UsageError(f"{name} must be text, got {type(getattr(self, name)).__name__}")
        for name in ("status_page", "gpu_sharing", "fallback"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.cluster_key is not None and len(self.cluster_key) < MIN_KEY_BYTES:
            raise UsageError(
                f"cluster_key has {len(self.cluster_key)} bytes: expected at least {MIN_KEY_BYTES}, drawn at random"
            )
        if self.identity is not None and len(self.identity) != 16:
            raise UsageError(f"identity has {len(self.identity)} bytes, expected 16")
        if self.progress not in ("adaptive", "loop", "thread"):
            raise UsageError(f"progress={self.progress!r}: expected 'adaptive', 'loop' or 'thread'")
        if self.schedule not in ("earliest-finish", "round-robin"):
            raise UsageError(f"schedule={self.schedule!r}: expected 'earliest-finish' or 'round-robin'")
        if self.cluster_key is None and self.host is not None and not _is_loopback(self.host):
            raise UsageError(
                f"host={self.host!r} without a cluster_key: an engine without a key listens on loopback only; "
                "set cluster_key or AIOTE_CLUSTER_KEY to the same secret on all engines"
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        limits = {
            "port": (0, 65535),
            "spin_us": (0, 1_000_000),
            "thread_cpu": (-1, 4095),
            "message_bytes": MESSAGE_BYTES,
            "message_pool": MESSAGE_POOL,
            "stripe_bytes": (1, 1 << 40),
            "largest_message": (0, 1 << 62),
            "ring_bytes": RING_BYTES,
            "gpu_staging_bytes": GPU_STAGING_BYTES,
            "max_transfers": (1, 1 << 24),
            "max_counters": (1, 1 << 28),
            "kept_receive_bytes": (0, 1 << 40),
            "max_mapped_bytes": (0, 1 << 46),
        }
        _check_integers(self, limits)
        if self.ring_bytes & (self.ring_bytes - 1):
            raise UsageError(f"ring_bytes={self.ring_bytes}: expected a power of two")
        if not isinstance(self.verbs, VerbsConfig):
            raise UsageError(f"verbs must be a VerbsConfig, got {type(self.verbs).__name__}")
        for name in ("heartbeat_interval", "heartbeat_timeout", "connect_timeout", "drain_timeout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise UsageError(f"{name}={value!r}: expected a positive number of seconds")
        if self.heartbeat_interval * 1000 < HEARTBEAT_MS[0]:
            raise UsageError(f"heartbeat_interval={self.heartbeat_interval}: expected at least 0.01 seconds")
        if self.heartbeat_interval >= self.heartbeat_timeout:
            raise UsageError(
                f"heartbeat_interval={self.heartbeat_interval} must be smaller than "
                f"heartbeat_timeout={self.heartbeat_timeout}"
            )


def _fill(settings: EngineConfig | VerbsConfig) -> None:
    """Replace None by the default, because callers pass None for options of their own that are not given."""
    for each in fields(settings):
        if getattr(settings, each.name) is None and each.default_factory is not MISSING:
            object.__setattr__(settings, each.name, each.default_factory())


def _check_integers(settings: object, limits: dict[str, tuple[int, int]]) -> None:
    for name, (least, most) in limits.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name}={value!r}: expected an integer from {least} to {most}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may resolve to any address, whatever its beginning. Only "localhost" counts as loopback without
        # resolution.
        return host == "localhost"


def variables_set() -> dict[str, str]:
    """Return the aiote variables that are set. Others read the report of them, so the value of a key is left out."""
    names = sorted(name for name in os.environ if name.startswith("AIOTE_"))
    return {name: "(not told)" if "KEY" in name else os.environ[name] for name in names}
