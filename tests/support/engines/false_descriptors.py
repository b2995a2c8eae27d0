"""Descriptors that nobody may believe: each is wrong in one way, and made of one that is right."""

from __future__ import annotations

from dataclasses import replace

import aiote
from aiote.core.descriptor import RegionDescriptor

WRONG = {
    "another engine's": "is not memory of",
    "an earlier life's": "has incarnation .* ask for a new descriptor",
    "too short": "is too short: expected at least",
    "shut": "may not be (written|read): its owner registered it with other access",
}
"""In which ways a descriptor is wrong, and what the error says of it."""


def claimed(how: str, own: bytes, owner: aiote.Address, other: aiote.Address) -> bytes:
    """Return a descriptor that a peer gives, by `how` it is wrong; `own` is a right one."""
    found = RegionDescriptor.from_bytes(own)
    if how == "another engine's":
        return bytes(replace(found, owner=other))
    if how == "an earlier life's":
        return bytes(replace(found, owner=replace(owner, incarnation=owner.incarnation - 1)))
    if how == "too short":
        return bytes(found.slice(0, found.length - 1))
    assert how == "shut"
    return bytes(replace(found, writable=False, readable=False))
