"""Remove the names and addresses of hosts, devices and users from the report of `aiote prove`.

A report can be published as it is, so every text of libraries, tools and the system goes through `without_names`.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["hidden_setting", "names_here", "private", "without_names"]

PCI = re.compile(r"\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)
MAC = re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE)
GUID = re.compile(r"\b(?:0x[0-9a-f]{16}|[0-9a-f]{4}(?::[0-9a-f]{4}){3}(?!:))\b", re.IGNORECASE)
IPV4 = re.compile(r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*[0-9a-f:](?![\w:])", re.IGNORECASE)
BY_PLACE = re.compile(r"\b([a-z]{2,4})(?:P[0-9a-f]+)?p[0-9]+s[0-9]+\w*")
"""Devices that udev names by their PCI address: enp3s0f0, rocep24s0, rdmap16s27."""
BY_NUMBER = re.compile(r"\b([a-z]{2,4})x[0-9a-f]{12,16}\b")
"""Devices that udev names by their MAC address or GUID."""
HOME = re.compile(r"/(?:home|Users)/[^/\s:'\"]+")
PLACES = ("HOST", "ADDR", "IFACE", "NODE", "HOSTNAME", "DOMAIN", "DEVICE")
"""Parts of variables' names whose values are places."""
COMMON = {"root", "localhost", "local", "user", "host", "/usr", "/usr/local", ""}
"""Names that identify nobody."""


def names_here(more: Iterable[str] = ()) -> list[str]:
    """Return the names of this host and of its user, the longest first, with `more` names."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], sys.prefix, *more}
    with contextlib.suppress(OSError, KeyError, ImportError):
        found.add(getpass.getuser())
    with contextlib.suppress(OSError, RuntimeError):
        found.add(str(Path.home()) if str(Path.home()) not in ("/", "/root") else "")
    return sorted(found - COMMON, key=len, reverse=True)


def hidden_setting(name: str, value: str) -> str:
    """Return a variable's value, or a text in its stead if the value is a key or a place."""
    return "(not told)" if "KEY" in name or any(place in name for place in PLACES) else value


def without_names(text: str, names: Iterable[str]) -> str:
    """Replace names of hosts and users, and the addresses of hosts, devices and engines."""
    for name in names:
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", "<name>", text)
    for pattern in (PCI, MAC):
        text = pattern.sub("<address>", text)
    text = IPV6.sub(_if_address, IPV4.sub(_if_address, text))
    text = BY_NUMBER.sub(r"\1<address>", BY_PLACE.sub(r"\1<address>", GUID.sub("<address>", text)))
    return HOME.sub("/home/<name>", text)


def _if_address(found: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return "<address>"


def private(value: Any, names: Iterable[str]) -> Any:
    """Return plain data in which no text has such a name; keys of dicts stay."""
    if isinstance(value, str):
        return without_names(value, names)
    if isinstance(value, dict):
        return {key: private(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [private(each, names) for each in value]
    return value
