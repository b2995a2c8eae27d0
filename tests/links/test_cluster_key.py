"""The cluster key: who may connect, who may not, and what an engine without one shows of itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_provider, opened, until

pytestmark = pytest.mark.libfabric

KEY = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"
NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""


def listening() -> set[str]:
    """Return the local addresses (hexadecimal, as the kernel writes them) on which this process listens for TCP."""
    found = set()
    ours = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                found.add(fields[1].rpartition(":")[0])
    return found


def loopback(address: str) -> bool:
    """Tell whether an address of `listening` is one of 127.0.0.0/8 or ::1; its words are little-endian."""
    return address[-2:] == "7F" if len(address) == 8 else address == "0" * 24 + "01000000"


async def talk(left: aiote.Engine, right: aiote.Engine) -> None:
    """Have a message and a write pass, one in each direction."""
    memory = bytearray(b"here")
    await left.send(right.address, b"hello")
    message = await right.recv()
    assert message.data == b"hello"
    there = left.register(bytearray(4))
    await right.write(right.register(memory), right.attach(there.descriptor))
    await left.read(left.attach(right.register(memory).descriptor), there)


async def refusal(left: aiote.Engine, right: aiote.Engine) -> tuple[str, str]:
    """Have `left` connect in vain; return its error and what `right` told its listeners."""
    told: list[aiote.Event] = []
    stop = right.listen_events(told.append)
    with pytest.raises(aiote.PeerError) as caught:
        await left.connect(right.address)
    await until(lambda: told)
    stop()
    assert left.peers == right.peers == ()
    assert [event.name for event in told] == ["connection.refused"]
    assert str(right.address) in str(caught.value)
    return caught.value.reason, str(told[0].details["reason"])


@pytest.mark.anyio
@each_provider
async def test_the_same_key_connects(provider):
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, cluster_key=KEY, host="127.0.0.1") as left:
            async with opened(provider, cluster_key=KEY, host="127.0.0.1") as right:
                await left.connect(right.address)
                await talk(left, right)


async def test_the_key_of_the_environment_counts_unless_one_is_given(monkeypatch):
    async with opened("tcp", cluster_key=KEY, host="127.0.0.1") as left:
        monkeypatch.setenv("AIOTE_CLUSTER_KEY", KEY.decode())
        async with opened("tcp", host="127.0.0.1") as right:
            await left.connect(right.address)
        monkeypatch.setenv("AIOTE_CLUSTER_KEY", OTHER.decode())
        async with opened("tcp", host="127.0.0.1") as right:
            assert "keys differ" in (await refusal(left, right))[0]
        async with opened("tcp", cluster_key=KEY, host="127.0.0.1") as right:  # what is given wins
            await left.connect(right.address)


@pytest.mark.anyio
@each_provider
async def test_another_key_is_refused_on_both_sides_and_at_once(provider):
    with anyio.fail_after(PATIENCE_S):
        async with (
            opened(provider, cluster_key=KEY, host="127.0.0.1", connect_timeout=NEVER_S) as left,
            opened(provider, cluster_key=OTHER, host="127.0.0.1", connect_timeout=NEVER_S) as right,
        ):
            for one, other in ((left, right), (right, left)):
                at_initiator, at_acceptor = await refusal(one, other)
                assert "it refused: the cluster keys differ; give both sides the same" in at_initiator
                assert "this engine refused it: the cluster keys differ; give both sides the same" in at_acceptor
            # A refusal spoils nothing: whoever has the key is welcome.
            async with opened(provider, cluster_key=OTHER, host="127.0.0.1") as third:
                await talk(third, right)


@pytest.mark.parametrize(
    ("left_key", "right_key", "said"),
    [
        (None, KEY, "the acceptor has a cluster key and the initiator has none"),
        (KEY, None, "the initiator has a cluster key and the acceptor has none"),
    ],
    ids=["a key is required", "a key is unexpected"],
)
async def test_a_key_on_one_side_only_is_refused(left_key, right_key, said):
    with anyio.fail_after(PATIENCE_S):
        async with (
            opened("tcp", cluster_key=left_key, host="127.0.0.1", connect_timeout=NEVER_S) as left,
            opened("tcp", cluster_key=right_key, host="127.0.0.1", connect_timeout=NEVER_S) as right,
        ):
            for reason in await refusal(left, right):
                assert said in reason


async def test_what_waits_for_a_refused_peer_fails():
    """Nothing hangs: a transfer that was submitted before the refusal is over with it."""
    with anyio.fail_after(PATIENCE_S):
        async with (
            opened("tcp", cluster_key=KEY, host="127.0.0.1", connect_timeout=NEVER_S) as left,
            opened("tcp", cluster_key=OTHER, host="127.0.0.1", connect_timeout=NEVER_S) as right,
        ):
            remote = left.attach(right.register(bytearray(64)).descriptor)
            transfers = [
                left.submit_write(left.register(bytearray(64)), remote),
                left.submit_read(remote, left.register(bytearray(64))),
                left.submit_write_imm(None, right.address, 5),
                left.submit_send(right.address, b"x"),
            ]
            for transfer in transfers:
                with pytest.raises(aiote.PeerError, match="cluster keys differ"):
                    await transfer
            assert right.counter(5).value == 0


def test_the_key_shows_nowhere():
    assert "0123456789" not in repr(aiote.EngineConfig(cluster_key=KEY))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.2", "10.1.2.3", "::", "example.org", "127.evil.example.org"])
async def test_a_host_that_others_reach_needs_a_key(host):
    with pytest.raises(aiote.UsageError, match=f"{re.escape(host)}.*without a cluster_key.*AIOTE_CLUSTER_KEY"):
        opened("tcp", host=host)


async def test_a_host_of_the_environment_needs_a_key_as_well(monkeypatch):
    monkeypatch.setenv("AIOTE_HOST", "0.0.0.0")
    with pytest.raises(aiote.UsageError, match="without a cluster_key"):
        aiote.open_engine("tcp")


@each_provider
@pytest.mark.verbs_once("host")
@pytest.mark.parametrize("host", [None, "localhost", "127.0.0.1", "127.0.0.2", "::1"])
async def test_without_a_key_an_engine_listens_on_loopback_only(host, provider):
    """Neither its control port nor an endpoint of a rail, which appears with a connection."""
    async with opened(provider, host=host) as left, opened(provider, host=host) as right:
        await left.connect(right.address)
        await talk(left, right)
        found = listening()
    assert found
    assert [address for address in found if not loopback(address)] == []


async def test_with_a_key_another_local_address_works():
    async with (
        opened("tcp", cluster_key=KEY, host="127.0.0.2") as left,
        opened("tcp", cluster_key=KEY, host="127.0.0.3") as right,
    ):
        assert (left.address.host, right.address.host) == ("127.0.0.2", "127.0.0.3")
        assert {"0200007F", "0300007F"} <= listening()
        peer = await left.connect(f"127.0.0.3:{right.address.port}")
        assert peer.address == right.address
        await talk(left, right)
