"""Rails over IPv6: which address an engine takes, how it is written, and transfers where there is no other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiote import UsageError
from aiote.machine import addresses as host_addresses
from aiote.machine.addresses import addresses, in_order, nearest
from aiote_native.streams.endpoints import parse
from support.engines.opening import PATIENCE_S
from support.network.namespaces import ENVIRONMENT, Network

TOKEN = "ab" * 16
HOSTS = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "::1": "lo", "2001:db8::5": "eth0", "fe80::5%eth0": "eth0"}


def test_addresses_that_nobody_may_use_yet_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [
        "fe800000000000000000000000000005 02 40 20 80     eth0",
        "20010db8000000000000000000000006 02 40 00 01     eth0",  # temporary
        "20010db8000000000000000000000005 02 40 00 80     eth0",
        "20010db8000000000000000000000007 02 40 00 c8     eth0",  # not known yet to be the only one
        "00000000000000000000000000000001 01 80 10 80       lo",
    ]
    (tmp_path / "if_inet6").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(host_addresses, "IF_INET6", tmp_path / "if_inet6")
    found = {host: name for host, name in addresses().items() if ":" in host}
    assert found == {"2001:db8::5": "eth0", "::1": "lo", "2001:db8::6": "eth0", "fe80::5%eth0": "eth0"}
    assert list(found)[-1] == "fe80::5%eth0"


def test_a_kernel_without_ipv6_has_no_such_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_addresses, "IF_INET6", tmp_path / "none")
    assert not [host for host in addresses() if ":" in host]


@pytest.mark.parametrize(
    ("host", "left_out", "rail"),
    [
        ("127.0.0.1", (), "127.0.0.1"),
        ("10.0.0.5", (), "10.0.0.5"),
        ("2001:db8::5", (), "2001:db8::5"),
        ("fe80::5%eth0", (), "fe80::5%eth0"),
        ("127.0.0.2", (), "127.0.0.1"),
        ("::1", (), "127.0.0.1"),  # two engines of one host meet, whichever loopback each of them named
        ("::1", ("127.0.0.1",), "::1"),
        ("a-name", (), "10.0.0.5"),
        ("a-name", ("10.0.0.5",), "2001:db8::5"),
        ("203.0.113.9", (), "10.0.0.5"),  # translated on its way
        ("2001:db8::9", (), "2001:db8::5"),
        ("2001:db8::9", ("2001:db8::5",), "fe80::5%eth0"),
        ("2001:db8::9", ("2001:db8::5", "fe80::5%eth0"), "10.0.0.5"),
    ],
)
def test_the_rail_is_of_the_host_s_own_version_where_there_is_one(host, left_out, rail):
    hosts = [each for each in in_order(host, HOSTS) if each not in left_out]
    assert nearest(host, hosts) == rail


@pytest.mark.parametrize(("host", "there"), [("203.0.113.9", ["127.0.0.1", "::1", "fe80::5%eth0"]), ("::9", ["::1"])])
def test_no_rail_is_taken_that_leads_nowhere(host, there):
    with pytest.raises(UsageError, match="no rail leads there"):
        nearest(host, there)


@pytest.mark.parametrize(("host", "first"), [("10.0.0.5", 4), ("2001:db8::5", 6), ("::1", 4), ("a-name", 4)])
def test_an_interface_that_is_named_is_used_in_the_host_s_version(host, first):
    found = next(each for each, name in in_order(host, HOSTS).items() if name == "eth0")
    assert (":" in found) is (first == 6)


@pytest.mark.parametrize("host", ["10.0.0.5", "::1", "fe80::5%eth0"])
def test_an_endpoint_s_address_is_read_as_it_is_written(host):
    shown = f"[{host}]" if ":" in host else host
    assert parse(f"aiote-tcp://{shown}:7/{TOKEN}".encode()) == (host.partition("%")[0], 7, bytes.fromhex(TOKEN))


@pytest.mark.parametrize(
    "host", ["::1", "[::1", "::1]", "[10.0.0.5]", "[]", "[x]", "[fe80::zz%eth0]", "a-name", "[[::1]]"]
)
def test_an_endpoint_s_address_that_is_none_is_refused(host):
    with pytest.raises(ValueError, match="is not the address of a TCP endpoint"):
        parse(f"aiote-tcp://{host}:7/{TOKEN}".encode())


ALONE = """
    import asyncio, aiote

    async def main():
        for provider in ("auto", "socket", "local"):
            for host in (None, "::1", "localhost"):
                opening = aiote.open_engine(provider, host=host), aiote.open_engine(provider, host=host)
                async with opening[0] as near, opening[1] as far:
                    memory, source = bytearray(5000), near.register(b"z" * 5000)
                    await near.connect(f"[::1]:{far.address.port}")
                    target = near.attach(far.register(memory).descriptor)
                    with far.counter(1) as counter:
                        await near.write_imm(source, target, 1)
                        await counter.wait()
                    assert memory == b"z" * 5000
                    assert near.find_peer(aiote.Address.parse(str(far.address))).connected
                    print(provider, host, str(near.address).partition(":")[2][:7])

    asyncio.run(main())
"""


@pytest.mark.needs_namespaces
def test_a_host_that_has_ipv6_loopback_alone_has_engines():
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    shell = 'ip link set lo up && ip -4 address flush dev lo && exec "$PYTHON" -P -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", *own, "--net", "sh", "-c", shell],
        env={**ENVIRONMENT, "SCRIPT": textwrap.dedent(ALONE), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    wanted = [f"{name} {host} //[::1]" for name in ("auto", "socket", "local") for host in (None, "::1", "localhost")]
    assert done.stdout.splitlines() == wanted


OWNER = """
    import asyncio, sys, aiote

    async def main():
        key = b"a secret of sixteen"
        async with aiote.open_engine("socket", host=sys.argv[1], cluster_key=key, rails=["cable0"]) as engine:
            memory = bytearray(5000)
            print(engine.address, engine.register(memory).descriptor.hex(), flush=True)
            with engine.counter(1) as counter:
                await counter.wait()
            print(memory == b"z" * 5000, flush=True)
            for peer in engine.peers:
                await peer.wait_closed()

    asyncio.run(main())
"""
WRITER = """
    import asyncio, sys, aiote

    async def main():
        key = b"a secret of sixteen"
        async with aiote.open_engine("socket", host=sys.argv[1], cluster_key=key) as engine:
            await engine.connect(sys.argv[2])
            target = engine.attach(bytes.fromhex(sys.argv[3]))
            await engine.write_imm(engine.register(b"z" * 5000), target, 1)
            await asyncio.sleep(0)

    asyncio.run(main())
"""


@pytest.mark.needs_namespaces
def test_engines_reach_each_other_over_link_local_addresses():
    with Network() as network:
        hosts = [link_local(network, side) for side in (0, 1)]
        owner = subprocess.Popen(
            [*network.enter(0), sys.executable, "-P", "-c", textwrap.dedent(OWNER), hosts[0]],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with owner:
            try:
                address, descriptor = owner.stdout.readline().split()
                assert address.startswith(f"aiote://[{hosts[0]}]:")
                script = textwrap.dedent(WRITER)
                network.run(1, sys.executable, "-P", "-c", script, hosts[1], address, descriptor)
                assert owner.stdout.readline() == "True\n"
                assert owner.wait(PATIENCE_S) == 0
            finally:
                owner.kill()


def link_local(network: Network, side: int) -> str:
    """Return the link-local address of an end of the cable, once the kernel knows that nobody else has it."""
    while True:
        said = network.run(side, "ip", "-6", "-oneline", "address", "show", "dev", "cable0", "scope", "link").decode()
        if said and "tentative" not in said:
            return f"{said.split()[3].partition('/')[0]}%cable0"
