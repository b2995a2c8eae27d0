"""The leases that another engine has granted to this one, seen from the holder's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .core.leases import Revocations

if TYPE_CHECKING:
    from .transfer import Transfer

__all__ = ["HeldLeases"]


class HeldLeases:
    """The leases that one peer granted to us: which are void, and what is under way through the others."""

    def __init__(self) -> None:
        self._void = Revocations()
        self._under_way: dict[int, set[Transfer]] = {}
        self._idle: dict[int, Callable[[], object]] = {}

    def begin(self, transfer: Transfer, lease: int) -> bool:
        """Take note of a transfer that starts; False where the lease is void."""
        if lease in self._void:
            return False
        self._under_way.setdefault(lease, set()).add(transfer)
        return True

    def end(self, transfer: Transfer, lease: int) -> None:
        """Take note that a transfer is over."""
        transfers = self._under_way.get(lease)
        if transfers is None:
            return
        transfers.discard(transfer)
        if not transfers:
            del self._under_way[lease]
            answer = self._idle.pop(lease, None)
            if answer is not None:
                answer()

    def revoke(self, low: int, high: int, lease: int, answer: Callable[[], object]) -> None:
        """Void a range of leases and cancel what is under way through them; answer when `lease` has nothing left."""
        self._void.add(low, high)
        if lease in self._under_way:
            self._idle[lease] = answer
        elif lease:
            answer()
        for number in [number for number in self._under_way if number in self._void]:
            for transfer in tuple(self._under_way.get(number, ())):
                transfer.revoke()
