"""Which rails an engine has: those of the provider that it names, or the best that are here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import FabricError, UsageError
from .contract import Rail
from .libfabric import UNTRIED, LibfabricRail, choose, fast_provider
from .library import FoundLibrary, load
from .local import LOCAL, LocalRail, choose_local, may_make_rings
from .sim import network
from .sockets import SOCKET, SocketRail, choose_sockets

if TYPE_CHECKING:
    from .ports import Port

__all__ = ["RailRequest", "open_rails"]

AUTO = "auto"
WITHOUT_LIBRARY = ("sim", "verbs", LOCAL, SOCKET)


@dataclass(frozen=True, slots=True)
class RailRequest:
    """What an engine asks for: a provider or "auto", names of NICs or their addresses, its own address, a library.

    `verbs` are settings of that kind's devices; `threaded`: progress is made in a native thread;
    `ring_bytes`: what a ring of `local` holds; `gpu_sharing`: whether it shares GPU memory; `spare`: a socket comes
    with rails that are scarce, for peers that find none left.
    """

    provider: str
    names: tuple[str, ...] | None = None
    host: str = ""
    library: str = ""
    verbs: Mapping[str, int] = field(default_factory=dict)
    threaded: bool = False
    ring_bytes: int = 2 << 20
    gpu_sharing: bool = True
    spare: bool = False


def open_rails(request: RailRequest, rails: list[Rail]) -> tuple[FoundLibrary | None, Any]:
    """Add the rails to the list as they are opened; return the libfabric that is open, and the clock of virtual time.

    Raises FabricError, UsageError; who calls closes what was opened.
    """
    provider, found, clock = request.provider, None, None
    if provider == AUTO:
        provider, found = _best(request)
    elif provider not in WITHOUT_LIBRARY:
        found = load(request.library)
    if provider == "verbs":
        _open_ports(request, rails)
    elif provider == LOCAL:
        rails += [
            LocalRail(index, request.ring_bytes, request.gpu_sharing) for index in range(choose_local(request.names))
        ]
    elif provider == SOCKET:
        rails += [SocketRail(index, *at) for index, at in enumerate(choose_sockets(request.names, request.host))]
    elif provider == "sim":
        clock = _plug(request, rails)
    else:
        assert found is not None
        if provider.partition(";")[0] in UNTRIED:
            warnings.warn(
                f"provider={provider!r} was never run with aiote on hardware; see docs/providers.md",
                RuntimeWarning,
                stacklevel=2,
            )
        for index, place in enumerate(choose(provider, request.names, request.host, found)):
            rails.append(LibfabricRail(index, *place, found))
        if request.spare and rails[0].traits.scarce:
            rails.append(SocketRail(len(rails), *choose_sockets(None, request.host)[0]))
    if request.provider == AUTO and may_make_rings():
        # For peers on this host; the others are reached as if it were not there.
        rails.append(LocalRail(len(rails), request.ring_bytes, request.gpu_sharing))
    return found, clock


def _best(request: RailRequest) -> tuple[str, FoundLibrary | None]:
    """Return the best provider that is here, and the libfabric that was opened to find out.

    RDMA devices come first, then TCP over the kernel's sockets, which is faster than libfabric's. What was never run is
    not chosen. Raises FabricError where a libfabric was named that is not one.
    """
    found, fast = None, ""
    try:
        found = load(request.library)
        fast = fast_provider()
    except FabricError:
        if request.library:
            raise
    if _hardware(request.names):
        return "verbs", found
    return fast or SOCKET, found


def _hardware(names: tuple[str, ...] | None) -> tuple[Port, ...]:
    """Return the ports of RDMA devices that are hardware, if they have every name that is asked for."""
    if not os.path.isdir("/sys/class/infiniband"):
        return ()
    from .ports import choose_ports, hardware, read_ports

    ports = hardware(read_ports())
    try:
        return ports if choose_ports(names, "", ports) else ()
    except UsageError:
        return ()


def _open_ports(request: RailRequest, rails: list[Rail]) -> None:
    """Open some ports of RDMA devices: of all for who asks for them, else of those that are hardware."""
    # Only who wants them needs libibverbs, and `import aiote` is to stay quick.
    from .ports import choose_gid, choose_ports, read_ports
    from .verbs import VerbsRail, load_verbs

    ports = _hardware(request.names) if request.provider == AUTO else read_ports()
    chosen = choose_ports(request.names, request.host, ports)
    load_verbs()
    settings = dict(request.verbs)
    gid = settings.pop("gid_index", None)
    for index, port in enumerate(chosen):
        rails.append(VerbsRail(index, port, choose_gid(port, gid), settings))


def _plug(request: RailRequest, rails: list[Rail]) -> Any:
    """Open rails of the simulated network; return the clock that it is, where its time is virtual."""
    sim = network()
    rails += sim.plug(request.names)
    if sim.world.virtual and request.threaded:
        raise UsageError("progress='thread' knows the system's time alone: in virtual time take 'adaptive'")
    return sim.world.clock
