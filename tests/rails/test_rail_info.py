"""A rail says where its NIC is, and how fast, where the provider does not."""

from __future__ import annotations

import pytest

from aiote.machine import sysfs
from aiote.machine.topology import Nic, Place
from support.rails.rail_pair import Rails


def test_a_rail_is_matched_with_its_nic(rails: Rails, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def read_nic(domain: str) -> Nic:
        asked.append(domain)
        return Nic(domain, "net", Place(1, ("pci0000:00", "0000:00:03.0")), 40_000)

    monkeypatch.setattr(sysfs, "read_nic", read_nic)
    (rail,) = rails.side().rail_set.rails
    assert asked == [], "opening asks nobody"
    first, second = rail.info, rail.info
    assert first == second
    if rail.traits.host_only or rail.provider == "sim":
        assert (asked, first.numa_node, rail.place) == ([], -1, Place())
        return
    assert asked == [rail.name]
    assert (first.numa_node, rail.place.address) == (1, "0000:00:03.0")
    assert first.speed_mbps == (getattr(rail.device, "attributes", {}).get("speed", 0) // 1_000_000 or 40_000)


def test_a_rail_without_a_nic_knows_nothing(rails: Rails, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysfs, "read_nic", lambda _domain: None)
    (rail,) = rails.side().rail_set.rails
    assert (rail.info.numa_node, rail.place) == (-1, Place())
    if rail.provider != "sim":
        assert rail.info.speed_mbps == getattr(rail.device, "attributes", {}).get("speed", 0) // 1_000_000
