"""Which rails two engines join, of whatever kinds their rails are and whichever of their NICs are full."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from aiote.core.control import Role
from aiote.errors import PeerRefusedError
from aiote.links.joining import FULL, pair
from aiote.rails.contract import traits_of
from aiote.rails.rail_set import RailSet

# What an engine may have open: by name, by "auto", with spare rails and without.
ENGINES = {
    "efa, fallback=False": ["efa", "efa"],
    "efa": ["efa", "efa", "socket"],
    "efa of one NIC": ["efa", "socket"],
    "auto, were EFA proven": ["efa", "socket", "local"],
    "auto, were EFA proven, fallback=False": ["efa", "local"],
    "verbs": ["verbs", "verbs"],
    "auto on RDMA NICs": ["verbs", "local"],
    "auto": ["socket", "local"],
    "socket": ["socket"],
    "local": ["local"],
    "tcp": ["tcp"],
    "shm": ["shm"],
}


class Side:
    """An engine's rails, as far as `pair` asks for them."""

    def __init__(self, kinds: list[str], host: bytes, full: bool) -> None:
        self.kinds, self.host_id = kinds, host
        rails = [SimpleNamespace(index=at, wire=kind, traits=traits_of(kind)) for at, kind in enumerate(kinds)]
        self.rail_set = SimpleNamespace(rails=rails)
        self.rail_set.spares = RailSet.spares.fget(self.rail_set)  # type: ignore[attr-defined]
        # `RailSet.reserve` lets a rail be full only where a spare one is open.
        self.full = {rail.index for rail in rails if full and rail.traits.scarce and self.rail_set.spares}

    def offer(self) -> SimpleNamespace:
        wires = [FULL if rail.index in self.full else rail.wire for rail in self.rail_set.rails]
        return SimpleNamespace(host_id=self.host_id, rails=[SimpleNamespace(wire=wire) for wire in wires])

    def pairs(self, peer: Side, role: Role) -> list[tuple[int, int]]:
        try:
            return pair(self, SimpleNamespace(name="peer"), peer.offer(), role, self.full)  # type: ignore[arg-type]
        except PeerRefusedError:
            return []


def joined(ours: list[str], theirs: list[str], *, here: bool, full: bool = False) -> list[str]:
    """Return the kinds that join two engines, ours with no endpoint left; both have to find the same."""
    left, right = Side(ours, b"a", full), Side(theirs, b"a" if here else b"b", False)
    pairs = left.pairs(right, Role.INITIATOR)
    assert right.pairs(left, Role.ACCEPTOR) == [(remote, mine) for mine, remote in pairs]
    turned = right.pairs(left, Role.INITIATOR)
    assert left.pairs(right, Role.ACCEPTOR) == [(remote, mine) for mine, remote in turned]
    assert sorted((mine, remote) for remote, mine in turned) == sorted(pairs)
    assert all(ours[mine] == theirs[remote] for mine, remote in pairs)
    return [ours[mine] for mine, _ in pairs]


def expected(ours: list[str], theirs: list[str], *, here: bool, full: bool) -> set[str]:
    """Return the same by the rules of docs/providers.md: `local` on one host, the scarce kind before its spare."""
    left = set(ours) - {"efa"} if full and "socket" in ours else set(ours)
    common = left & set(theirs)
    if "local" in common and left > {"local"} and set(theirs) > {"local"}:
        common = {"local"} if here else common - {"local"}
    return common - {"socket"} if "efa" in common else common


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_any_two_engines_find_the_same_pairs(here: bool, full: bool) -> None:
    for (one, ours), (other, theirs) in itertools.product(ENGINES.items(), repeat=2):
        found = joined(ours, theirs, here=here, full=full)
        assert set(found) == expected(ours, theirs, here=here, full=full), (one, other)


def test_hosts_whose_nics_are_scarce_use_no_spare_and_one_host_uses_its_memory() -> None:
    auto = ENGINES["auto, were EFA proven"]
    assert joined(auto, auto, here=False) == ["efa"]
    assert joined(auto, auto, here=True) == ["local"]
    assert joined(auto, auto, here=False, full=True) == ["socket"]
    assert joined(ENGINES["efa"], auto, here=True) == ["efa", "efa"]
    assert joined(auto, ENGINES["auto"], here=False) == ["socket"]
