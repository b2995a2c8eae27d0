"""Registrations that are shared and kept, so that memory that is asked for again is not registered again.

The table counts the holders of each registration. A registration without holders is kept for a while (the least
recently used goes first) or returned to the caller, which closes it. This module registers, closes and awaits nothing.

An address can be the key because a region keeps its buffer alive and exported: while the region is in the table, no
other memory can be at that address.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .regions import Region

__all__ = ["Registrations", "SharedRegistration"]

Key = tuple[int, int, bool, str]
"""Address, length in bytes, whether it is writable, and the access that it is registered with."""


class SharedRegistration:
    """A registration in the table, the number of its holders, and the lender of its memory if the caller gave it."""

    __slots__ = ("holders", "key", "lender", "region")

    def __init__(self, key: Key, region: Region, lender: Any) -> None:
        self.key, self.region, self.lender = key, region, lender
        self.holders = 1


class Registrations:
    """The registrations of one engine by their memory; keeps at most `nbytes` in `most` of them without holders."""

    def __init__(self, nbytes: int, most: int) -> None:
        self._limit, self._most = nbytes, most
        self._known: dict[Key, SharedRegistration] = {}
        self._idle: OrderedDict[SharedRegistration, None] = OrderedDict()
        self.idle_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def in_use(self) -> int:
        """The number of registrations in the table that have holders."""
        return len(self._known) - len(self._idle)

    def hold(self, key: Key) -> SharedRegistration | None:
        """Return the registration of some memory, with one more holder; None if there is none."""
        held = self._known.get(key)
        if held is not None:
            self._use_again(held)
            held.holders += 1
        return held

    def add(self, key: Key, region: Region, lender: Any = None) -> SharedRegistration:
        """Enter a new registration, with one holder."""
        held = self._known[key] = SharedRegistration(key, region, lender)
        return held

    def let_go(self, held: SharedRegistration, *, keep: bool = True) -> list[Region]:
        """Remove one holder; return the regions that the caller must close now.

        These are the region itself if the last holder left and the registration is not kept, and the regions that make
        room for it.
        """
        held.holders -= 1
        if held.holders:
            return []
        if not keep or held.region.nbytes > self._limit or self._known.get(held.key) is not held:
            return self.forget(held) or [held.region]
        self._idle[held] = None
        self.idle_bytes += held.region.nbytes
        return self.trim(self._limit)

    def forget(self, held: SharedRegistration) -> list[Region]:
        """Remove a registration from the table; return its region if it has no holders, which the caller closes."""
        if self._known.get(held.key) is held:
            del self._known[held.key]
        return [held.region] if self._use_again(held) else []

    def trim(self, nbytes: int) -> list[Region]:
        """Keep at most `nbytes` without holders; return the regions of the others, which the caller closes."""
        regions = []
        while self._idle and (self.idle_bytes > nbytes or len(self._idle) > self._most):
            regions += self.forget(next(iter(self._idle)))
        return regions

    def _use_again(self, held: SharedRegistration) -> bool:
        """Remove a registration from those without holders; return whether it was one of them."""
        if held not in self._idle:
            return False
        del self._idle[held]
        self.idle_bytes -= held.region.nbytes
        return True
