"""How far places are from each other, and which rails a buffer would rather use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.machine.topology import Distance, Nic, Place, distance, nearest, preference

# Root complex, root port, upper port, lower port of a switch, and a switch below that.
SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
NEAR = Place(0, (*SWITCH, "0000:17:00.0", "0000:18:00.0"))
DEEPER = (*SWITCH, "0000:17:02.0", "0000:20:00.0")

elements = st.sampled_from(["pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0"])
places = st.builds(Place, st.integers(-1, 2), st.lists(elements, max_size=5).map(tuple))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Place(0, (*SWITCH, "0000:17:02.0", "0000:1b:00.0")), Distance.SWITCH),
        (Place(-1, (*SWITCH, "0000:17:02.0", "0000:1b:00.0")), Distance.SWITCH),
        (Place(0, ("pci0000:15", "0000:15:01.0", "0000:19:00.0")), Distance.ROOT),
        (Place(0, ("pci0000:15", "0000:15:02.0", "0000:19:00.0")), Distance.ROOT),
        (Place(-1, ("pci0000:15", "0000:15:02.0", "0000:19:00.0")), Distance.ROOT),
        (Place(1, ("pci0000:15", "0000:15:02.0", "0000:19:00.0")), Distance.OTHER),
        (Place(0, ("pci0000:3d", "0000:3d:01.0", "0000:3e:00.0")), Distance.NODE),
        (Place(0), Distance.NODE),
        (Place(1), Distance.OTHER),
        (Place(1, ("pci0000:97", "0000:97:01.0")), Distance.OTHER),
        (Place(-1, ("pci0000:97", "0000:97:01.0")), Distance.UNKNOWN),
        (Place(), Distance.UNKNOWN),
    ],
)
def test_distances_follow_switches_roots_and_nodes(other, expected):
    assert distance(NEAR, other) is distance(other, NEAR) is expected


def test_of_cascaded_switches_the_nearer_one_is_preferred():
    gpu = Place(0, (*DEEPER, "0000:21:00.0", "0000:22:00.0"))
    beside, above = Place(0, (*DEEPER, "0000:21:01.0", "0000:23:00.0")), NEAR
    assert distance(gpu, beside) is distance(gpu, above) is Distance.SWITCH
    assert preference(gpu, [above, beside, Place(0), beside]) == (1, 0, 2, 0)


def test_preferences_have_no_gaps_and_the_unknown_come_last():
    rails = [Place(1), Place(), Place(0), NEAR, Place()]
    assert preference(NEAR, rails) == (2, 3, 1, 0, 3)
    assert preference(Place(0), rails) == (1, 2, 0, 0, 2)
    assert preference(Place(), rails) == (0, 0, 0, 0, 0)
    assert preference(Place(0), [Place(1), Place(1)]) == (0, 0)
    assert preference(Place(0), []) == ()


@given(places, st.lists(places, max_size=6))
def test_ranks_follow_distances(place, rails):
    ranks = preference(place, rails)
    assert sorted(set(ranks)) == list(range(len(set(ranks))))
    for rank, rail in zip(ranks, rails, strict=True):
        for other_rank, other in zip(ranks, rails, strict=True):
            if distance(place, rail) < distance(place, other):
                assert rank < other_rank
    nics = [Nic(f"n{number}", "net", rail) for number, rail in enumerate(rails)]
    groups = nearest(place, nics)
    assert sorted(nic.name for group in groups for nic in group) == sorted(nic.name for nic in nics)
    assert [{ranks[int(nic.name[1:])] for nic in group} for group in groups] == [{n} for n in range(len(groups))]


@given(places, places)
def test_distance_is_the_same_both_ways(place, other):
    assert distance(place, other) is distance(other, place)
