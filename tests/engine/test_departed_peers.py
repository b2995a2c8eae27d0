"""What lost peers leave, and what a peer's offer costs: bounded, and told."""

from __future__ import annotations

import pytest

import aiote
from aiote.rails import pools_fit
from aiote.transfers import inbox
from support.engines.opening import each_provider, opened, until


@pytest.mark.anyio
@each_provider
async def test_messages_of_lost_peers_are_bounded(provider, monkeypatch):
    """They are kept of the last peers, in order, and the statistics tell of them and of the others."""
    monkeypatch.setattr(inbox, "MAX_DEPARTED", 3)
    async with opened(provider) as right:
        for number in range(5):
            async with opened(provider) as left:
                for half in (0, 1):
                    await left.send(right.address, b"%d" % (2 * number + half))
                expected = 2 * min(number, 3) + 2
                await until(lambda expected=expected: right.statistics().inbox == expected)
            await until(lambda: not right.peers)
            assert right.statistics().inbox == 2 * min(number + 1, 3)
            assert right.statistics().dropped == 2 * max(0, number - 2)
        assert [int((await right.recv()).data) for _ in range(6)] == list(range(4, 10))
        assert right.statistics().inbox == 0


@pytest.mark.anyio
async def test_bytes_of_lost_peers_are_bounded(monkeypatch):
    monkeypatch.setattr(inbox, "DEPARTED_BYTES", 2500)
    async with opened("socket") as right:
        for number in range(4):
            async with opened("socket") as left:
                await left.send(right.address, b"%d" % number * 1000)
                await until(lambda: len(right.peers) == 1 and right._runtime.core.inbox == 1)
            await until(lambda: not right.peers)
        assert (right.statistics().inbox, right.statistics().dropped) == (2, 2)
        assert [(await right.recv()).data[:1] for _ in range(2)] == [b"2", b"3"]


@pytest.mark.parametrize(
    ("own", "offered", "fits"),
    [
        ((16, 16384), (16, 16384), True),
        ((16, 16384), (4096, 16384), True),
        ((16, 16384), (64, 1 << 20), True),
        ((16, 16384), (4096, 1 << 20), False),
        ((4096, 16384), (16, 1 << 20), False),
        ((4096, 1 << 20), (4096, 1 << 20), True),
    ],
)
def test_offered_pools_fit_up_to_the_limit_or_our_own_size(own, offered, fits):
    """Our own numbers may ask for more than a peer's."""
    assert pools_fit(*own, *offered) is fits


@pytest.mark.anyio
async def test_an_offer_over_the_limit_is_refused():
    async with opened("socket") as left, opened("socket", message_pool=4096, message_bytes=1 << 20) as right:
        with pytest.raises(aiote.PeerError, match="pool of 4096 messages of 1048576 bytes, which takes over 134217728"):
            await left.connect(right.address)
        assert right.peers == ()
