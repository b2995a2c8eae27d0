"""Which of several connections of two engines is kept, and which incarnation may connect."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from aiote.core.address import Address
from aiote.errors import PeerRefusedError
from aiote.links.admission import Admission
from aiote.links.connection import Attempts, Connection
from aiote.links.session import SessionOver

LOW, HIGH, OTHER = b"a" * 16, b"b" * 16, b"c" * 16


class Serving:
    """A session that serves a connection."""

    def __init__(self, *, committed: bool) -> None:
        self.committed = committed
        self.superseded = False

    def supersede(self) -> None:
        self.superseded = True


class Known:
    """A connection in the table."""

    def __init__(self, address: Address, **state: Any) -> None:
        self.address, self.reason = address, ""
        self.connected: bool = state.get("connected", False)
        self.session: Serving | None = state.get("session")
        self.attempts = Attempts(0.0)
        self.attempts.initiator = state.get("initiator", b"")

    def lose(self, reason: str) -> None:
        self.reason = reason


def at(identity: bytes, incarnation: int = 5) -> Address:
    return Address("127.0.0.1", 1, identity, incarnation)


def admission(own: bytes, *known: Known) -> Admission:
    table = {(one.address.identity, one.address.incarnation): one for one in known}
    return Admission(own, cast(dict[tuple[bytes, int], Connection], table))


def test_the_first_connection_of_a_pair_is_admitted():
    assert admission(LOW).choose(None, at(HIGH), HIGH) is None
    dialled = Known(at(HIGH))
    assert admission(LOW, dialled).choose(cast(Connection, dialled), at(HIGH), LOW) is dialled
    other = Known(at(OTHER), connected=True)
    assert admission(LOW, other).choose(None, at(HIGH), HIGH) is None


@pytest.mark.parametrize("state", [{"connected": True}, {"session": Serving(committed=True), "initiator": HIGH}])
def test_a_connection_in_use_is_kept(state):
    known = Known(at(HIGH), **state)
    with pytest.raises(SessionOver) as refused:
        admission(LOW, known).choose(None, at(HIGH), LOW)
    assert refused.value.busy
    assert known.session is None or not known.session.superseded


@pytest.mark.parametrize(("own", "peer"), [(LOW, HIGH), (HIGH, LOW)])
def test_both_sides_keep_the_connection_of_the_lower_identity(own, peer):
    """Whichever of the two is authenticated first."""
    for first, second in itertools.permutations((LOW, HIGH)):
        serving = Serving(committed=False)
        known = Known(at(peer), session=serving, initiator=first)
        if second == LOW:
            assert admission(own, known).choose(None, at(peer), second) is known
        else:
            with pytest.raises(SessionOver) as refused:
                admission(own, known).choose(None, at(peer), second)
            assert refused.value.busy
        assert serving.superseded is (second == LOW)


def test_an_engine_that_dials_gives_way_before_it_is_authenticated():
    """A dialled connection without a session counts as begun by this engine."""
    assert admission(HIGH, known := Known(at(LOW))).choose(None, at(LOW), LOW) is known
    with pytest.raises(SessionOver):
        admission(LOW, Known(at(HIGH))).choose(None, at(HIGH), HIGH)


def test_a_new_incarnation_waits_for_the_end_of_the_connected_one():
    connected = Known(at(HIGH, 5), connected=True)
    with pytest.raises(SessionOver) as later:
        admission(LOW, connected).choose(None, at(HIGH, 6), HIGH)
    assert later.value.busy
    with pytest.raises(PeerRefusedError, match="a newer incarnation"):
        admission(LOW, connected).choose(None, at(HIGH, 4), HIGH)
    connected.connected = False
    assert admission(LOW, connected).choose(None, at(HIGH, 6), HIGH) is None


def test_connections_to_earlier_incarnations_end():
    known = [Known(at(HIGH, number)) for number in (4, 5, 6)] + [Known(at(OTHER, 1))]
    admission(LOW, *known).end_earlier_incarnations(at(HIGH, 5))
    assert [bool(one.reason) for one in known] == [True, False, False, False]
