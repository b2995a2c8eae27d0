"""Another rank's tensors, at the places that the rank itself describes.

The description may be wrong. Even then it leads only to memory of the rank that gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import aiote

from .protocol import Descriptors, Numbers

__all__ = ["Names", "Places", "RemoteTensors"]

Names = Mapping[str, int]
"""The number of each of a rank's tensors, by name, in the order of its layout."""


class Places:
    """Where a rank's tensors lie, as the rank describes it: a region's number and an offset for each tensor."""

    def __init__(self, places: Numbers, names: Names) -> None:
        self._places, self._names = places, names
        self._found: list[list[int]] | None = None

    def find(self, name: str) -> tuple[int, int]:
        """Return the number of a tensor's region, and its first byte there. Raises UsageError if others are described.

        Whether there is such a region, and such a byte in it, is for the caller to check.
        """
        if self._found is None:
            if self._places.shape != (len(self._names), 2):
                raise aiote.UsageError(f"expected the places of {len(self._names)} tensors, got {self._places.shape}")
            self._found = self._places.tolist()
        number, offset = self._found[self._names[name]]
        return number, offset


class RemoteTensors:
    """The tensors of the rank at an address, in the regions that the rank has described, for reads or for writes."""

    def __init__(
        self,
        engine: aiote.Engine,
        address: str,
        regions: Descriptors,
        places: Numbers,
        names: Names,
        access: Literal["read", "write"],
    ) -> None:
        self._engine, self._places = engine, Places(places, names)
        self.owner = aiote.Address.parse(address)
        self._regions, self._access = regions, access
        self._checked = False
        self._attached: dict[int, aiote.RemoteRegion] = {}

    def tensor(self, name: str) -> aiote.RemoteRegion:
        """Return the memory from a tensor's first byte on.

        Raises UsageError for an invalid description, and for memory of another engine than the rank's.
        """
        remote, offset = self._place(name)
        return remote[offset:]

    def part(self, name: str, first: int, nbytes: int) -> aiote.RemoteRegion:
        """Return a range of a tensor's bytes. Raises UsageError like `tensor`, and for bytes beyond the memory."""
        remote, offset = self._place(name)
        return remote[offset + first : offset + first + nbytes]

    def _place(self, name: str) -> tuple[aiote.RemoteRegion, int]:
        number, offset = self._places.find(name)
        remote = self._attached[number] if number in self._attached else self._attach(number)
        if offset > remote.nbytes:
            raise aiote.UsageError(f"{name} begins at byte {offset}, outside of the lent {remote.nbytes} bytes")
        return remote, offset

    def _attach(self, number: int) -> aiote.RemoteRegion:
        count = self._regions.ends.size
        if not self._checked:
            self._regions.check(count)
            self._checked = True
        if number >= count:
            raise aiote.UsageError(f"region {number} does not exist: {count} were lent")
        (descriptor,) = self._regions.part(number, number + 1).unpacked(1)
        owner = self._engine.find_peer(self.owner) or self.owner
        remote = self._engine.attach(descriptor, owner=owner, access=self._access)
        self._attached[number] = remote
        return remote
