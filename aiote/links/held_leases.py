"""The leases that another engine has granted to this one, seen from the holder's side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..core.lease_numbers import Revocations
from ..rails import Flight

__all__ = ["HeldLeases"]


class HeldLeases:
    """The leases that one peer granted to us: which are void, and which requests are in flight through each.

    Each lease that was used has one flight until it is void, so requests may start through it without asking here.
    """

    def __init__(self) -> None:
        self._revocations = Revocations()
        self._flights: dict[int, Flight] = {}
        self._answers: dict[int, Callable[[], object]] = {}

    def flight(self, lease: int) -> Flight | None:
        """Return the flight of a lease, with the requests in flight through it; None if the lease is void."""
        if lease in self._revocations:
            return None
        found = self._flights.get(lease)
        if found is None:
            found = self._flights[lease] = Flight()
        return found

    def is_void(self, lease: int) -> bool:
        """Whether the peer has revoked it."""
        return lease in self._revocations

    def revoke(self, low: int, high: int, lease: int, answer: Callable[[], object]) -> None:
        """Void a range of leases and cancel the requests in flight through them.

        Calls `answer` once no request through `lease` is in flight; never if `lease` is 0.
        """
        self._revocations.add(low, high)
        if self._flights.get(lease):
            self._answers[lease] = answer
        elif lease:
            answer()
        for number in [number for number in self._flights if number in self._revocations]:
            flight = self._flights[number]
            flight.shut, flight.changed = True, partial(self._answer_if_idle, number, flight)
            for transfer in flight:
                transfer.revoke()
            self._answer_if_idle(number, flight)

    def _answer_if_idle(self, number: int, flight: Flight, _failed: object = None) -> None:
        """Forget a void lease, and answer, once no request is in flight through it."""
        if not flight and self._flights.get(number) is flight:
            del self._flights[number]
            answer = self._answers.pop(number, None)
            if answer is not None:
                answer()
