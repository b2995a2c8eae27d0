"""Registrations that are shared and kept: memory that is asked for again is not registered again.

A registration counts its holders. One that nobody holds any more is kept for a while, the least recently used going
first, or is the caller's to close. Nothing is registered, closed or awaited here.

An address may be the key because a region keeps its buffer alive and exported: while the region is in the table, no
other memory can come to lie there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .regions import Region

__all__ = ["Registrations", "SharedRegistration"]

Key = tuple[int, int, bool, str]
"""Address, length in bytes, whether it is writable, and the access that it is registered with."""


class SharedRegistration:
    """A registration in the table, how many hold it, and whose memory it is, if somebody asked to note that."""

    __slots__ = ("holders", "key", "lender", "region")

    def __init__(self, key: Key, region: Region, lender: Any) -> None:
        self.key, self.region, self.lender = key, region, lender
        self.holders = 1


class Registrations:
    """The registrations of one engine by what they are of; at most `nbytes` in `most` of them are kept unheld."""

    def __init__(self, nbytes: int, most: int) -> None:
        self._limit, self._most = nbytes, most
        self._known: dict[Key, SharedRegistration] = {}
        self._idle: OrderedDict[SharedRegistration, None] = OrderedDict()
        self.idle_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def in_use(self) -> int:
        """How many that can be found are held."""
        return len(self._known) - len(self._idle)

    def hold(self, key: Key) -> SharedRegistration | None:
        """Return the registration of some memory, with one more holder; None where there is none."""
        held = self._known.get(key)
        if held is not None:
            self._use(held)
            held.holders += 1
        return held

    def add(self, key: Key, region: Region, lender: Any = None) -> SharedRegistration:
        """Enter a registration that there was none of, with one holder."""
        held = self._known[key] = SharedRegistration(key, region, lender)
        return held

    def let_go(self, held: SharedRegistration, *, keep: bool = True) -> list[Region]:
        """Take one holder off; return the regions that the caller is to close now.

        These are its own, where it was the last and the registration is not kept, and those that make room for it.
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
        """Have nobody find a registration any more; return its region if nobody holds it, to be closed."""
        if self._known.get(held.key) is held:
            del self._known[held.key]
        return [held.region] if self._use(held) else []

    def trim(self, nbytes: int) -> list[Region]:
        """Keep at most so many bytes that nobody holds; return the regions of the others, to be closed."""
        regions = []
        while self._idle and (self.idle_bytes > nbytes or len(self._idle) > self._most):
            regions += self.forget(next(iter(self._idle)))
        return regions

    def _use(self, held: SharedRegistration) -> bool:
        """Take a registration from those that nobody holds; tell whether it was one."""
        if held not in self._idle:
            return False
        del self._idle[held]
        self.idle_bytes -= held.region.nbytes
        return True
