"""The guest's network: one switch, a cable from each of its ports sw0.. to a NIC nic0.., an RDMA device on each NIC.

Both ends of every cable are in one kernel, and a kernel hands what is for an address of its own straight to itself. To
have it cross the switch, rules are put before the table of local addresses: what one NIC's address sends to another's
goes out by that NIC. They look at what the guest sends ("iif lo") alone, so what arrives is still taken as local.
"""

from __future__ import annotations

NET = "10.77.0"


def address(nic: int) -> str:
    return f"{NET}.{nic + 1}"


def hardware(nic: int) -> str:
    return f"02:00:0a:4d:00:{nic + 1:02x}"


def cables(nics: int, mtu: int) -> list[str]:
    """Return the lines for `ip -batch`."""
    lines = [
        "link set lo up",
        "link add switch type bridge forward_delay 0",
        f"link set switch mtu {mtu} up",
        "rule add pref 1000 lookup local",
        "rule del pref 0",
    ]
    for nic in range(nics):
        lines += _cable(nic, mtu)
        lines += [
            f"neighbour replace {address(other)} lladdr {hardware(other)} dev nic{nic} nud permanent"
            for other in range(nics)
            if other != nic
        ]
    return lines


def _cable(nic: int, mtu: int) -> list[str]:
    own, table = address(nic), 1000 + nic
    return [
        f"link add nic{nic} mtu {mtu} address {hardware(nic)} type veth peer name sw{nic} mtu {mtu}",
        f"link set sw{nic} master switch up",
        f"link set nic{nic} up",
        f"address add {own}/24 dev nic{nic}",
        f"rule add pref {100 + nic} iif lo from {own} to {own} lookup local",
        f"rule add pref {200 + nic} iif lo from {own} to {NET}.0/24 lookup {table}",
        f"route add {NET}.0/24 dev nic{nic} src {own} table {table}",
    ]


def devices(nics: int, driver: str) -> list[str]:
    """Return the lines for `rdma -batch`."""
    return [f"link add {driver}{nic} type {driver} netdev nic{nic}" for nic in range(nics)]
