"""A model of the rounds of a MoE group: no bytes, no barriers, every message in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

KINDS = "route", "rows", "answer"


class RoundModel:
    """Ranks that take part in a few rounds with random traffic.

    Routes have `slots` places and counts `counters`, by the round's number modulo these. Rows have one place. A rank
    ends a round when its writes have been delivered. With `surplus` one rank counts a write of one round twice.
    """

    def __init__(self, rng: random.Random, *, slots: int, counters: int, surplus: bool = False) -> None:
        self.rng, self.slots, self.counters = rng, slots, counters
        self.count, self.rounds = rng.randrange(2, 5), rng.randrange(3, 6)
        every = range(self.count)
        self.traffic = [[[rng.random() < 0.5 for _ in every] for _ in every] for _ in range(self.rounds)]
        self.routes = [[[-1 for _ in every] for _ in range(slots)] for _ in every]
        self.rows = [[-1 for _ in every] for _ in every]
        self.counts: list[dict[tuple[str, int], int]] = [{} for _ in every]
        self.in_flight: list[tuple[str, int, int, int]] = []
        self.twice = (rng.randrange(self.count), rng.choice(KINDS), rng.randrange(self.rounds - 1)) if surplus else None
        self.surplus = False
        """A write was counted twice."""
        self.wrong = False
        """A rank read what was not for it."""
        self.noticed = False
        """A rank found a count of a round whose waits were over, or a route of another round where one was due."""

    def run(self) -> None:
        """Run until a rank notices something, or all have ended their rounds."""
        alive = {rank: self.live(rank) for rank in range(self.count)}
        while alive and not self.noticed:
            if self.in_flight and self.rng.random() < 0.5:
                self.deliver(*self.in_flight.pop(self.rng.randrange(len(self.in_flight))))
            else:
                rank = self.rng.choice(list(alive))
                if next(alive[rank], "over") == "over":
                    del alive[rank]

    def live(self, rank: int) -> Iterator[None]:
        """Take part in every round, as a rank."""
        others = [other for other in range(self.count) if other != rank]
        for number in range(self.rounds):
            sends = self.traffic[number]
            self.send("route", rank, others, number)
            self.send("rows", rank, [other for other in others if sends[rank][other]], number)
            yield from self.wait(rank, "route", number, len(others))
            self.noticed |= self.is_left_over(rank, number - 1)
            if any(self.routes[rank][number % self.slots][other] != number for other in others):
                self.wrong = self.noticed = True
            owing = [other for other in others if sends[other][rank]]
            yield from self.wait(rank, "rows", number, len(owing))
            self.wrong |= any(self.rows[rank][other] != number for other in owing)
            yield
            self.send("answer", rank, owing, number)
            yield from self.wait(rank, "answer", number, sum(sends[rank][other] for other in others))
            while any(source == rank for _, source, _, _ in self.in_flight):
                yield
            self.noticed |= self.is_left_over(rank, number - 1)

    def send(self, kind: str, source: int, targets: Sequence[int], number: int) -> None:
        """Begin one write to each target."""
        self.in_flight.extend((kind, source, to, number) for to in targets)
        if self.twice == (source, kind, number) and targets:
            self.surplus = True
            self.add(kind, targets[0], number)

    def deliver(self, kind: str, source: int, to: int, number: int) -> None:
        """End a write: its bytes are in place, and it counts."""
        if kind == "route":
            self.routes[to][number % self.slots][source] = number
        elif kind == "rows":
            self.rows[to][source] = number
        self.add(kind, to, number)

    def add(self, kind: str, to: int, number: int) -> None:
        """Count one write of a round."""
        slot = kind, number % self.counters
        self.counts[to][slot] = self.counts[to].get(slot, 0) + 1

    def wait(self, rank: int, kind: str, number: int, need: int) -> Iterator[None]:
        """Wait for so many counts of a round, and take them."""
        slot = kind, number % self.counters
        while self.counts[rank].get(slot, 0) < need:
            yield
        self.counts[rank][slot] = self.counts[rank].get(slot, 0) - need

    def is_left_over(self, rank: int, number: int) -> bool:
        """Return whether anything has been counted for a round whose waits are over."""
        return any(self.counts[rank].get((kind, number % self.counters)) for kind in KINDS)
