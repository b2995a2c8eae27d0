"""The libfabric kind of rail."""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiote_native.libfabric.device import LibfabricDevice, discover
from aiote_native.libfabric.endpoint import LibfabricEndpoint
from aiote_native.system.base import StatusError

from ..errors import AioteError, FabricError, UsageError
from ..machine.addresses import nearest, node_of, unknown
from .contract import RailInfo, Traits, traits_of
from .library import FoundLibrary, load
from .shortage import require_descriptors, require_memory, require_shared_memory
from .stale_files import mark

if TYPE_CHECKING:
    from ..machine.topology import Nic, Place

__all__ = [
    "LibfabricRail",
    "choose",
    "efa_state",
    "fabric_error",
    "is_usable",
    "offered_nics",
    "source_host",
]

SPINNING_TCP = (1, 18)
"""In 1.18.0 the wait descriptor of tcp is always readable; 1.18.1 fixed it."""

ORDER = ("efa", "cxi", "verbs;ofi_rxm", "tcp", "shm")


class LibfabricRail:
    """An opened domain of libfabric."""

    def __init__(self, index: int, provider: str, node: str, domain: str, library: FoundLibrary) -> None:
        """Open the domain. Raises FabricError that names provider and rail."""
        name = domain or node or provider
        try:
            self.device = LibfabricDevice(provider, node, domain)
        except (StatusError, LookupError) as error:
            raise fabric_error(error, "open rail", name) from error
        self._attributes: dict[str, Any] = self.device.attributes
        self.index = index
        self.traits: Traits = traits_of(self.provider)
        self._library = library

    @property
    def provider(self) -> str:
        """The provider's full name, layers included."""
        return str(self._attributes["provider"])

    @property
    def name(self) -> str:
        """The NIC's name."""
        return str(self._attributes["domain"])

    @property
    def wire(self) -> str:
        attributes = self._attributes
        protocol = f"{self.provider}/{attributes['protocol']}.{attributes['protocol_version']}"
        # Each version of the library has its own layout of shared memory: 1.17 never returns from a first write to 2.5.
        if self.provider == "efa":
            protocol = f"{protocol}/{attributes['fabric']}"
        return f"{protocol}/{'.'.join(map(str, self._library.version))}" if self.traits.host_only else protocol

    @functools.cached_property
    def nic(self) -> Nic | None:
        """The NIC as sysfs describes it, read once when it is first needed; None if sysfs has no NIC of that name."""
        if self.traits.host_only:
            return None
        # A local import keeps `import aiote` fast.
        from ..machine.sysfs import read_nic

        return read_nic(self.name)

    @property
    def place(self) -> Place:
        from ..machine.topology import Place

        return self.nic.place if self.nic is not None else Place()

    @property
    def info(self) -> RailInfo:
        speed = int(self._attributes["speed"]) // 1_000_000
        return RailInfo(
            name=self.name,
            provider=self.provider,
            speed_mbps=speed or (self.nic.speed_mbps if self.nic is not None else 0),
            numa_node=self.place.numa_node,
            state="up" if self._attributes["up"] else "down",
            library=f"libfabric {self._library.version[0]}.{self._library.version[1]}",
        )

    @property
    def host(self) -> str:
        """The IP address that the rail is bound to, or an empty string."""
        return source_host(self._attributes)

    def open_endpoint(self) -> LibfabricEndpoint:
        own = mark()
        _require(require_descriptors, rail=self.name)
        _require(require_memory, rail=self.name)
        if self.traits.host_only:
            _require(require_shared_memory, own, rail=self.name)
        try:
            return LibfabricEndpoint(self.device, self.traits.waits, mark=own)
        except StatusError as error:
            if error.errno == errno.ENOMEM and error.operation == "fi_enable":
                raise self._no_room() from error
            raise fabric_error(error, "open endpoint", self.name) from error

    def _no_room(self) -> FabricError:
        return FabricError(
            errno.ENOMEM,
            f"the NIC has no queue pair left: it has {self._attributes['endpoints']} for all processes of this host, "
            "and each peer takes one; use fewer peers or processes on this NIC, or provider='socket'",
            operation="open endpoint",
            rail=self.name,
        )

    def close(self) -> None:
        self.device.close()


def fabric_error(error: Exception, operation: str, rail: str, advice: str = "") -> FabricError:
    """Convert an error of the native layer to a FabricError; `advice` follows the reason."""
    if isinstance(error, StatusError):
        text = f"{error.operation}: {error.strerror}{advice}"
        return FabricError(error.errno or 0, text, operation=operation, rail=rail)
    if isinstance(error, OSError):
        return FabricError(error.errno or 0, error.strerror or str(error), operation=operation, rail=rail)
    return FabricError(61, str(error), operation=operation, rail=rail)


def _require(look: Callable[..., None], *arguments: str, rail: str) -> None:
    """Raise FabricError if a resource that an endpoint needs is missing."""
    try:
        look(*arguments)
    except OSError as error:
        raise fabric_error(error, "open endpoint", rail) from error


def source_host(attributes: dict[str, Any]) -> str:
    """Return the IPv4 address in a sockaddr_in, or an empty string."""
    source = attributes["source"]
    if len(source) < 8 or int.from_bytes(source[:2], "little") != socket.AF_INET:
        return ""
    return socket.inet_ntoa(source[4:8])


def choose(
    provider: str, names: tuple[str, ...] | None, host: str, library: FoundLibrary
) -> list[tuple[str, str, str]]:
    """Return (provider, node, domain) of the rails to open.

    `names` are the user's (NIC names or local IP addresses); without them the rail that owns `host` is taken. Raises
    UsageError for names or a provider that are not there, and FabricError for a provider that aiote cannot use here.
    """
    offers = _offers(provider)
    if not offers and provider == "efa":
        raise FabricError(95, efa_lacks(library), operation="open rail")
    if provider == "cxi":
        raise FabricError(95, CXI_LACKS, operation="open rail")
    if not offers:
        if provider == "shm":
            # 1.17 does not offer shm if /dev/shm has no room for it.
            _require(require_shared_memory, mark(), rail=provider)
        raise UsageError(
            f"provider={provider!r}: libfabric {library.version[0]}.{library.version[1]} at {library.path} offers none "
            "of that name on this machine; `fi_info -l` lists the providers that it has"
        )
    _refuse_spinning(offers[0], library)
    if not traits_of(provider).by_address:
        chosen = [offer for offer in offers if names is None or offer["domain"] in names]
        if names is not None and len(chosen) < len(set(names)):
            raise unknown(names, [offer["domain"] for offer in offers])
        return [(provider, "", offer["domain"]) for offer in (chosen[:1] if names is None else chosen)]
    hosts = {source_host(offer): offer["domain"] for offer in offers if source_host(offer)}
    if names is None:
        return [(provider, nearest(host, list(hosts)), "")]
    return [(provider, node_of(name, hosts, names), "") for name in names]


CXI_LACKS = (
    "provider cxi binds memory to endpoints (FI_MR_ENDPOINT) and takes immediates by fi_writedata alone, which aiote "
    "does not do yet; use provider='socket'"
)


def efa_lacks(library: FoundLibrary) -> str:
    """Return why no EFA NIC can be used, and what to install. The library is open."""
    number = f"{library.version[0]}.{library.version[1]}"
    wanted = (
        "aiote needs its fabric efa-direct with one-sided operations and FI_RX_CQ_DATA, which libfabric has from 2.4 "
        "on, for NICs that write and read (p5 and later)"
    )
    return (
        f"libfabric {number} at {library.path} offers no usable EFA NIC: {wanted}; install EFA's current software, or "
        "set AIOTE_LIBFABRIC, and see `fi_info -p efa`; else use provider='socket'"
    )


def efa_state(library: str, *, here: bool) -> tuple[tuple[str, ...], str]:
    """Return the names of the usable EFA NICs, and an error if there are none. Without EFA NICs both are empty.

    `here`: the kernel has such a NIC. This opens the library, and for a moment an endpoint on each NIC.
    """
    try:
        found = load(library)
        names = tuple(str(offer["domain"]) for offer in _offers("efa"))
        if not names:
            return (), efa_lacks(found) if here or discover("efa", usable=False) else ""
        for name in names:
            _try_endpoint("efa", "", name, found)
    except (AioteError, StatusError) as error:
        return (), str(error) if here or not isinstance(error, UsageError) else ""
    return names, ""


def _try_endpoint(provider: str, node: str, domain: str, library: FoundLibrary) -> None:
    """Open an endpoint for a moment. Raises FabricError."""
    rail = LibfabricRail(0, provider, node, domain, library)
    try:
        rail.open_endpoint().close()
    finally:
        rail.close()


def is_usable(provider: str, names: tuple[str, ...] | None, host: str, library: FoundLibrary) -> bool:
    """Tell whether the NICs that `choose` would take can be used. Opens an endpoint of a scarce one for a moment."""
    try:
        for place in choose(provider, names, host, library):
            if traits_of(provider).scarce:
                _try_endpoint(*place, library)
    except (AioteError, StatusError):
        return False
    return True


def offered_nics() -> dict[str, tuple[str, ...]]:
    """Return the names of the NICs that each provider offers as rails, the best provider first.

    The library is open. A provider that is missing, or whose query fails, gets an empty tuple.
    """
    found = {}
    for provider in ORDER:
        try:
            found[provider] = tuple(dict.fromkeys(str(offer["domain"]) for offer in _offers(provider)))
        except StatusError:
            found[provider] = ()
    return found


def _offers(provider: str) -> list[dict[str, Any]]:
    """List the provider's offers: an entry for each address of each NIC."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for offer in discover(provider):
        if provider == "efa" and not (offer["fabric"] == "efa-direct" and offer["receives_for_immediates"]):
            # Without a receive for each immediate, immediates that overflow a completion queue are lost.
            continue
        if offer["provider"].partition(";")[0] == provider.partition(";")[0]:
            seen.setdefault((offer["domain"], source_host(offer)), offer)
    return list(seen.values())


def _refuse_spinning(offer: dict[str, Any], library: FoundLibrary) -> None:
    version = offer["provider_version"]
    if offer["provider"] == "net" or (
        offer["provider"] == "tcp" and library.version == SPINNING_TCP and version & 0xFFFF == 0
    ):
        raise FabricError(
            95,
            f"provider {offer['provider']} of libfabric {library.version[0]}.{library.version[1]} cannot sleep: "
            "its wait descriptor is always readable; use 1.17's tcp, or 1.18.1 or later",
            operation="open rail",
        )
