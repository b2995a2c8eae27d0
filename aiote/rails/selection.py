"""The choice of an engine's rails: those of the provider that it names, or the best that this machine has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import FabricError, UsageError
from .contract import NEVER_RUN, Rail, is_proven
from .libfabric import LibfabricRail, choose, is_usable
from .library import FoundLibrary, load
from .local import LOCAL, LocalRail, choose_local, may_make_rings
from .sim import network
from .sockets import SOCKET, SocketRail, choose_sockets

if TYPE_CHECKING:
    from ..machine.ports import Port

__all__ = ["RailRequest", "open_rails"]

AUTO = "auto"
WITHOUT_LIBRARY = ("sim", "verbs", LOCAL, SOCKET)
PREFERENCE = ("efa", "verbs", "verbs;ofi_rxm")
"""The providers of RDMA NICs in the order in which "auto" tries them."""


@dataclass(frozen=True, slots=True)
class RailRequest:
    """The request of an engine: a provider or "auto", names of NICs or their addresses, its own address, a library.

    `verbs` are settings of verbs devices; `threaded`: a native thread makes progress; `ring_bytes`: the size of a
    `local` ring; `gpu_sharing`: whether `local` shares GPU memory; `gpu_staging_bytes`: pinned memory of a rail for
    each GPU and direction; `fallback`: a socket rail is added to scarce rails, for peers that find no endpoint left.
    """

    provider: str
    names: tuple[str, ...] | None = None
    host: str = ""
    library: str = ""
    verbs: Mapping[str, int] = field(default_factory=dict)
    threaded: bool = False
    ring_bytes: int = 2 << 20
    gpu_sharing: bool = True
    gpu_staging_bytes: int = 8 << 20
    fallback: bool = False


def open_rails(request: RailRequest, rails: list[Rail]) -> tuple[FoundLibrary | None, Any]:
    """Append each rail to the list when it is opened; return the open libfabric, and the clock of virtual time.

    Raises FabricError and UsageError; the caller then closes the rails in the list.
    """
    provider, found, clock = request.provider, None, None
    if provider == AUTO:
        provider, found = _best(request)
    elif provider not in WITHOUT_LIBRARY:
        found = load(request.library)
    if provider == "verbs":
        _open_ports(request, rails)
    elif provider == LOCAL:
        rails += [_local_rail(request, index) for index in range(choose_local(request.names))]
    elif provider == SOCKET:
        found_here = choose_sockets(request.names, request.host)
        rails += [SocketRail(index, *at, request.gpu_staging_bytes) for index, at in enumerate(found_here)]
    elif provider == "sim":
        clock = _plug(request, rails)
    else:
        assert found is not None
        places = choose(provider, request.names, request.host, found)
        if not is_proven(provider):
            warnings.warn(f"provider={provider!r} {NEVER_RUN}; see docs/providers.md", RuntimeWarning, stacklevel=2)
        for index, place in enumerate(places):
            rails.append(LibfabricRail(index, *place, found))
        if request.fallback and rails[0].traits.scarce:
            rails.append(SocketRail(len(rails), *choose_sockets(None, request.host)[0], request.gpu_staging_bytes))
    if request.provider == AUTO and may_make_rings():
        # For peers on this host. It does not affect peers on other hosts.
        rails.append(_local_rail(request, len(rails)))
    return found, clock


def _local_rail(request: RailRequest, index: int) -> LocalRail:
    return LocalRail(index, request.ring_bytes, request.gpu_sharing, request.gpu_staging_bytes)


def _best(request: RailRequest) -> tuple[str, FoundLibrary | None]:
    """Return the best provider that is here, and the libfabric that was opened to determine it.

    RDMA devices come first, then TCP over the kernel's sockets, which is faster than libfabric's. Only kinds in
    `PROVEN` are chosen. Raises FabricError if the named libfabric cannot be opened.
    """
    found = None
    try:
        found = load(request.library)
    except FabricError:
        if request.library:
            raise
    for provider in filter(is_proven, PREFERENCE):
        if provider == "verbs":
            usable = bool(_hardware(request.names))
        else:
            usable = found is not None and is_usable(provider, request.names, request.host, found)
        if usable:
            return provider, found
    return SOCKET, found


def _hardware(names: tuple[str, ...] | None) -> tuple[Port, ...]:
    """Return the ports of hardware RDMA devices if they have every requested name, else an empty tuple."""
    if not os.path.isdir("/sys/class/infiniband"):
        return ()
    from ..machine.ports import choose_ports, hardware, read_ports

    ports = hardware(read_ports())
    try:
        return ports if choose_ports(names, "", ports) else ()
    except UsageError:
        return ()


def _open_ports(request: RailRequest, rails: list[Rail]) -> None:
    """Open ports of RDMA devices. With "auto" only hardware ports are candidates, otherwise all ports."""
    # A local import, because only these rails need libibverbs, and because it keeps `import aiote` fast.
    from ..machine.ports import choose_gid, choose_ports, read_ports
    from .verbs import VerbsRail, load_verbs

    ports = _hardware(request.names) if request.provider == AUTO else read_ports()
    chosen = choose_ports(request.names, request.host, ports)
    load_verbs()
    settings = dict(request.verbs)
    gid = settings.pop("gid_index", None)
    for index, port in enumerate(chosen):
        rails.append(VerbsRail(index, port, choose_gid(port, gid), settings))


def _plug(request: RailRequest, rails: list[Rail]) -> Any:
    """Open rails of the simulated network; return its clock if its time is virtual."""
    sim = network()
    rails += sim.plug(request.names)
    if sim.world.virtual and request.threaded:
        raise UsageError("progress='thread' uses the system's clock and does not work in virtual time: use 'adaptive'")
    return sim.world.clock
