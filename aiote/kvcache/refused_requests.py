"""The requests of which one decode rank's part was refused: those of the other ranks are still to come, and to be
told why.

Kept for as long as a part would be waited for, and of the last ones only: what is forgotten costs its other ranks that
wait. A rank that was told comes again only with another request, which may have the same name.
"""

from __future__ import annotations

import anyio

__all__ = ["RefusedRequests"]

MOST = 1024
Name = tuple[bytes, int]


class RefusedRequests:
    """Why, when, and which ranks were told, by the request's name and round; for `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._known: dict[Name, tuple[str, float, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: Name, reason: str, told: set[int]) -> None:
        """Take note that these ranks were told; the first reason stays."""
        now = anyio.current_time()
        first, _, before = self._known.pop(name, (reason, now, set()))
        self._known[name] = first, now, before | told
        while len(self._known) > MOST or now - next(iter(self._known.values()))[1] > self._keep_s:
            del self._known[next(iter(self._known))]

    def take(self, name: Name, rank: int) -> str:
        """Return why a rank's part is refused, "" where it is not: nothing was, or it was told before."""
        reason, when, told = self._known.get(name, ("", 0.0, set()))
        if not reason or anyio.current_time() - when > self._keep_s or rank in told:
            self._known.pop(name, None)
            return ""
        return reason
