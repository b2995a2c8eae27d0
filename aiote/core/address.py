"""Addresses: where an engine listens, and which engine it has to be.

`host` and `port` say where to connect. `identity` names the engine and `incarnation` one run of it. After a restart the
same place answers under another incarnation; requests to the old incarnation must then fail instead of reaching memory
that means something else now. An address with zeros in both means "any engine that answers there": good enough to find
an engine, which then tells its name.

The text form is `aiote://host:port/<identity>.<incarnation>` in hexadecimal, IPv6 in brackets. The host is kept as it
was written: two spellings of one host are two addresses, and this module never asks a resolver.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

from ..errors import UsageError
from .fields import U16, U64, FieldError, Fixed, Record, Text, unwrap, wrap

__all__ = ["ANYONE", "IDENTITY_BYTES", "Address", "name_of"]

IDENTITY_BYTES = 16
ANYONE = bytes(IDENTITY_BYTES)

_SCHEME = "aiote://"
_MAGIC = b"aioA"
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_PORT = re.compile(r"[0-9]{1,5}")
_WHO = re.compile(r"([0-9a-fA-F]{32})\.([0-9a-fA-F]{16})")
_EXPECTED = "expected aiote://host:port, or with /<32 hex digits>.<16 hex digits> behind it; IPv6 hosts go in brackets"


def name_of(key: tuple[bytes, int]) -> bytes:
    """Return the 24 bytes that name one life of an engine, from its identity and incarnation."""
    identity, incarnation = key
    return identity + incarnation.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an engine; raises UsageError if a part is malformed.

    `host` is a name, an IPv4 or a bare IPv6 address, `port` 1 to 65535, `identity` 16 bytes, `incarnation` 64 bits.
    """

    host: Annotated[str, Text(300)]
    port: Annotated[int, U16]
    identity: Annotated[bytes, Fixed(IDENTITY_BYTES)] = ANYONE
    incarnation: Annotated[int, U64] = 0

    def __post_init__(self) -> None:
        try:
            _LAYOUT.pack(self)
        except FieldError as error:
            raise UsageError(str(error)) from error
        if not _is_host(self.host):
            raise UsageError(f"Address.host: {_clip(self.host)} is no host name, IPv4 address or bare IPv6 address")
        if self.port == 0:
            raise UsageError("Address.port: 0 is outside 1 to 65535")
        if self.identity == ANYONE and self.incarnation:
            raise UsageError(
                "Address.incarnation: an incarnation needs an identity; leave both zero to accept any engine"
            )

    @property
    def is_anyone(self) -> bool:
        """Whether this means any engine that answers at the host and port."""
        return self.identity == ANYONE

    def __bytes__(self) -> bytes:
        return wrap(_MAGIC, _VERSION, _LAYOUT.pack(self))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Address:
        """Return the address that `bytes(address)` gave; raises UsageError for anything else."""
        try:
            return unwrap(_MAGIC, _VERSION, _LAYOUT, data)
        except FieldError as error:
            raise UsageError(f"these bytes are not an address: {error}; use bytes(engine.address)") from error

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}{host}:{self.port}/{self.identity.hex()}.{self.incarnation:016x}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that `text` denotes; the scheme and the part after the slash are optional.

        Raises UsageError for malformed text.
        """
        if not isinstance(text, str):
            raise UsageError(f"expected an address as text, got {type(text).__name__}: {_EXPECTED}")
        place = text.removeprefix(_SCHEME)
        if "://" in place:
            raise UsageError(f"{_clip(text)}: the scheme is not {_SCHEME}; {_EXPECTED}")
        location, slash, who = place.partition("/")
        host, port = _split(text, location)
        if not slash:
            return cls(host, port)
        match = _WHO.fullmatch(who)
        if match is None:
            raise UsageError(f"{_clip(text)}: the part after the slash is malformed; {_EXPECTED}")
        return cls(host, port, bytes.fromhex(match[1]), int(match[2], 16))


_LAYOUT = Record(Address)


def _split(text: str, location: str) -> tuple[str, int]:
    """Return the host and port of `host:port` or `[host]:port`. Errors quote `text`, the whole address."""
    if location.startswith("["):
        host, _, tail = location[1:].partition("]")
        colon, port = tail[:1], tail[1:]
        if ":" not in host:
            raise UsageError(f"{_clip(text)}: brackets are for IPv6 hosts; {_EXPECTED}")
    else:
        host, colon, port = location.rpartition(":")
        if ":" in host:
            raise UsageError(f"{_clip(text)}: an IPv6 host needs brackets; {_EXPECTED}")
    if colon != ":" or not _PORT.fullmatch(port):
        raise UsageError(f"{_clip(text)}: no port number after the host; {_EXPECTED}")
    return host, int(port)


def _is_host(host: str) -> bool:
    if ":" not in host:
        return _NAME.fullmatch(host) is not None
    bare, percent, zone = host.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return False
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return False
    return True


def _clip(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:120] + "...")
