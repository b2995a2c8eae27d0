"""Which ports of RDMA devices the two sides of a comparison over verbs speak from."""

from __future__ import annotations

from aiote.bench.sides import BenchError
from aiote.config import VerbsConfig
from aiote.errors import AioteError
from aiote.rails.ports import Gid, Port, choose_gid, choose_ports, read_ports

__all__ = ["ports_of"]


def ports_of(role: str, rails: str, host: str = "", root: str = "/sys") -> list[tuple[Port, Gid]]:
    """Return the ports of one side, each with the GID that an engine would take.

    Those that `rails` names are both sides'. Without names a side has one: the port that has the address `host`; on one
    machine, which says no address, the target has the second that is up, if there is one, so that what is measured
    crosses the switch. Raises BenchError.
    """
    ports = read_ports(root)
    try:
        chosen = choose_ports(tuple(rails.split(",")) if rails else None, host, ports)
        if role == "target" and not rails and not host:
            chosen = [[port for port in ports if port.up][:2][-1]]
        return [(port, choose_gid(port, VerbsConfig().gid_index)) for port in chosen]
    except AioteError as error:
        raise BenchError(str(error)) from error
