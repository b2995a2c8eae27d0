"""Schedules in which much is forgotten, and much of that is cancelled: see `world`.

In a mean schedule a cancelled transfer seldom shares its immediate with counts that a provider has dropped while their
recovery is under way. Here it often does: all transfers have one value, completions of the own posts are read long
before what has come, and cancelling is as frequent as dying.
"""

from __future__ import annotations

from support.failover.parts import Side
from support.failover.world import World


def world_of(seed: int) -> World:
    """Return the schedule of a number: every fourth is one of these."""
    return ForgetfulWorld(seed) if seed % 4 == 3 else World(seed)


class ForgetfulWorld(World):
    """One such schedule."""

    def __init__(self, seed: int, fault: str = "") -> None:
        super().__init__(seed, fault)
        self.forgets = True
        self.sides = [Side(index, self.channels, self.limit, self.rng, True) for index in (0, 1)]
        self.values = 1
        self.transfers_left = self.rng.randrange(4, 25)
        self.cancels_left = self.rng.choice((2, 5, 12))
        self.deaths_left = self.rng.choice((3, 5, 8, 12))

    def read(self, side: Side | None = None) -> bool:
        """Read one entry of a completion queue: of what came, seldom."""
        side = side or self.sides[int(self.rng.random() * 2)]
        own = [at for at, (_, _, post) in enumerate(side.completions) if post is not None]
        if self.ending or not own or self.rng.random() < 0.1:
            return super().read(side)
        self.complete(side, *side.completions.pop(self.rng.choice(own)))
        return True

    def tick(self) -> bool:
        """Let time pass, and cancel as often."""
        return self.cancel() or super().tick()
