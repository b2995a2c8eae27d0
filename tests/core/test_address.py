from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.address import ANYONE, Address
from aiote.errors import UsageError

HOSTS = st.one_of(
    st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}\Z"),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"{ipaddress.IPv6Address(ip)}%eth0"),
)
SOMEONE = st.binary(min_size=16, max_size=16).filter(lambda identity: identity != ANYONE)
ADDRESSES = st.one_of(
    st.builds(Address, HOSTS, st.integers(1, 65535), SOMEONE, st.integers(0, 2**64 - 1)),
    st.builds(Address, HOSTS, st.integers(1, 65535)),
)
ENGINE = Address("node-7.example", 4000, bytes(range(16)), 0xABC)


@given(ADDRESSES)
def test_bytes_and_text_give_the_address_back(address: Address) -> None:
    assert Address.from_bytes(bytes(address)) == address
    assert Address.from_bytes(memoryview(bytearray(bytes(address)))) == address
    assert Address.parse(str(address)) == address
    assert hash(Address.parse(str(address))) == hash(address)


def test_the_text_of_an_address_names_host_port_identity_and_incarnation() -> None:
    assert str(ENGINE) == "aiote://node-7.example:4000/000102030405060708090a0b0c0d0e0f.0000000000000abc"
    assert str(Address("fe80::1%eth0", 1, b"\xff" * 16, 1)).startswith("aiote://[fe80::1%eth0]:1/ffff")


@pytest.mark.parametrize("text", ["aiote://[::1]:4000", "[::1]:4000"])
def test_a_place_alone_means_whoever_answers(text: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.identity, address.incarnation) == ("::1", 4000, bytes(16), 0)
    assert address.is_anyone
    assert not ENGINE.is_anyone


def test_another_incarnation_is_another_address() -> None:
    later = Address(ENGINE.host, ENGINE.port, ENGINE.identity, ENGINE.incarnation + 1)
    assert later != ENGINE
    assert len({later, ENGINE, Address.parse(str(ENGINE))}) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no port"),
        ("host", "no port"),
        ("host:", "no port"),
        ("host:-1", "no port"),
        ("host:٣", "no port"),  # a digit, but not an ASCII one
        ("host:123456", "no port"),
        ("host:0", "1 to 65535"),
        ("host:65536", "65535"),
        (":4000", "host"),
        ("http://host:80", "the scheme is not"),
        ("::1:4000", "brackets"),
        ("[::1]", "no port"),
        ("[::1]4000", "no port"),
        ("[127.0.0.1]:4000", "brackets are for IPv6"),
        ("[::1::2]:4000", "host"),
        ("[::1%]:4000", "host"),
        ("[::1%a]b]:4000", "no port"),
        ("ho st:4000", "host"),
        ("host\n:4000", "control"),
        ("höst:4000", "host"),
        ("host:4000/", "after the slash"),
        ("host:4000/" + "0" * 32, "after the slash"),
        ("host:4000/" + "g" * 32 + "." + "0" * 16, "after the slash"),
        ("host:4000/" + "0" * 32 + "." + "0" * 15 + "1", "needs an identity"),
        ("host:4000/" + "1" * 32 + "." + "0" * 16 + "/", "after the slash"),
        (b"host:4000", "as text"),
        ("x" * 100_000, "no port"),
    ],
)
def test_malformed_text_is_named(text: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        Address.parse(text)
    assert len(str(caught.value)) < 500


@given(st.text())
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except UsageError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "parts",
    [
        ("host", 0, b"i" * 16, 1),
        ("host", 65536, b"i" * 16, 1),
        ("host", True, b"i" * 16, 1),
        ("host", "80", b"i" * 16, 1),
        ("", 80, b"i" * 16, 1),
        ("[::1]", 80, b"i" * 16, 1),
        (b"host", 80, b"i" * 16, 1),
        ("host", 80, b"i" * 15, 1),
        ("host", 80, "i" * 16, 1),
        ("host", 80, b"i" * 16, -1),
        ("host", 80, b"i" * 16, 2**64),
    ],
)
def test_malformed_parts_are_refused(parts: Any) -> None:
    with pytest.raises(UsageError, match=r"Address\."):
        Address(*parts)


def test_every_truncation_and_extension_of_the_bytes_is_refused() -> None:
    whole = bytes(ENGINE)
    for stop in range(len(whole)):
        with pytest.raises(UsageError, match="not an address"):
            Address.from_bytes(whole[:stop])
    with pytest.raises(UsageError, match="1 bytes too many"):
        Address.from_bytes(whole + b"\0")
    with pytest.raises(UsageError, match="1 bytes too many"):
        Address.from_bytes(whole[:6] + bytes((whole[6] + 1,)) + whole[7:] + b"\0")
    with pytest.raises(UsageError, match="the format has version 2"):
        Address.from_bytes(whole[:4] + b"\x02" + whole[5:])
    with pytest.raises(UsageError, match="bytes"):
        Address.from_bytes(str(ENGINE))  # type: ignore[arg-type]


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_an_address_or_a_usage_error(noise: bytes, keep: int) -> None:
    data = bytes(ENGINE)[:keep] + noise
    try:
        address = Address.from_bytes(data)
    except UsageError:
        return
    assert bytes(address) == data
