"""The ports of RDMA devices that the two sides of a comparison over verbs use."""

from __future__ import annotations

from aiote.bench.sides import BenchError
from aiote.config import VerbsConfig
from aiote.errors import AioteError
from aiote.machine.ports import Gid, Port, choose_gid, choose_ports, read_ports

__all__ = ["ports_of"]


def ports_of(role: str, rails: str, host: str = "", root: str = "/sys") -> list[tuple[Port, Gid]]:
    """Return the ports of one side, each with the GID that an engine would choose.

    The ports that `rails` names serve both sides. Without names a side uses one port: the one with the address `host`.
    On one machine, where `host` is empty, the target uses the second port that is up, if there is one, so that the
    measured traffic crosses the switch. Raises BenchError.
    """
    ports = read_ports(root)
    try:
        chosen = choose_ports(tuple(rails.split(",")) if rails else None, host, ports)
        if role == "target" and not rails and not host:
            chosen = [[port for port in ports if port.up][:2][-1]]
        return [(port, choose_gid(port, VerbsConfig().gid_index)) for port in chosen]
    except AioteError as error:
        raise BenchError(str(error)) from error
