"""Frames that wait for their peer to take messages, and how much of its share they are."""

from __future__ import annotations

from ..aio import EventLoop, Signal
from .frames import End, Frame, pack
from .memory import Budget, Share

__all__ = ["Unsent"]

CROWDED_BYTES = 4 << 20
"""Streams go on when fewer bytes of frames wait for their peer."""


class Unsent:
    """The frames of one link that are not sent yet.

    `ends` are the slots of calls whose ends are among them: the peer cannot know that it may use them again.
    """

    def __init__(self, loop: EventLoop, budget: Budget, share: Share) -> None:
        self.ends: set[int] = set()
        self._budget, self._share = budget, share
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._nbytes = 0
        self._drained = Signal(loop)

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame, nbytes: int) -> None:
        """Have a frame wait, of at most so many bytes. Raises BlockingIOError where the peer's share is used up."""
        self._budget.wait(self._share, nbytes)
        self._frames.append(frame)
        self._sizes.append(nbytes)
        self._nbytes += nbytes

    def batch(self, limit: int) -> tuple[bytes, int]:
        """Return a message of at most so many bytes, unless one frame has more, and how many frames it is."""
        count, total = 1, self._sizes[0]
        while count < len(self._frames) and total + self._sizes[count] <= limit:
            total += self._sizes[count]
            count += 1
        return pack(self._frames[:count]), count

    def sent(self, count: int) -> None:
        """Record that the first frames were sent."""
        nbytes = sum(self._sizes[:count])
        self._nbytes -= nbytes
        self._budget.over(self._share, nbytes)
        for frame in self._frames[:count]:
            if isinstance(frame, End):
                self.ends.discard(frame.slot)
        del self._frames[:count], self._sizes[:count]
        if not self.crowded:
            self._drained.set()

    @property
    def crowded(self) -> bool:
        """Whether much waits for the peer already."""
        return self._nbytes >= CROWDED_BYTES

    async def uncrowded(self) -> None:
        """Wait while it is crowded."""
        while self.crowded:
            await self._drained.wait()

    def close(self) -> None:
        """Drop all."""
        self.sent(len(self._frames))
