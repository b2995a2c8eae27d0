"""Keep the frames that wait until their peer takes messages, and charge their bytes to the peer's share."""

from __future__ import annotations

from ..aio import Condition, EventLoop
from .frames import End, Frame, pack
from .memory import Budget, Share

__all__ = ["Unsent"]

CROWDED_BYTES = 4 << 20
"""Streams pause while at least this many bytes of frames wait for their peer."""


class Unsent:
    """The frames of one link that are not sent yet.

    `ends` holds the slots whose End is among these frames: the peer cannot know yet that it may use them again.
    """

    def __init__(self, loop: EventLoop, budget: Budget, share: Share) -> None:
        self.ends: set[int] = set()
        self._budget, self._share = budget, share
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._nbytes = 0
        self._drained = Condition(loop)

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame, nbytes: int) -> None:
        """Queue a frame of at most `nbytes` bytes. Raises BlockingIOError if the peer's share is used up."""
        self._budget.wait(self._share, nbytes)
        self._frames.append(frame)
        self._sizes.append(nbytes)
        self._nbytes += nbytes

    def batch(self, limit: int) -> tuple[bytes, int]:
        """Return a message of the first frames, and the number of these frames.

        The message has at most `limit` bytes, unless its first frame alone is longer.
        """
        count, total = 1, self._sizes[0]
        while count < len(self._frames) and total + self._sizes[count] <= limit:
            total += self._sizes[count]
            count += 1
        return pack(self._frames[:count]), count

    def record_sent(self, count: int) -> None:
        """Record that the first `count` frames were sent."""
        nbytes = sum(self._sizes[:count])
        self._nbytes -= nbytes
        self._budget.over(self._share, nbytes)
        for frame in self._frames[:count]:
            if isinstance(frame, End):
                self.ends.discard(frame.slot)
        del self._frames[:count], self._sizes[:count]
        if not self.is_crowded:
            self._drained.wake_all()

    @property
    def is_crowded(self) -> bool:
        """Whether at least CROWDED_BYTES of frames wait for the peer."""
        return self._nbytes >= CROWDED_BYTES

    async def wait_uncrowded(self) -> None:
        """Wait until fewer than CROWDED_BYTES of frames wait for the peer."""
        await self._drained.until(lambda: not self.is_crowded)

    def close(self) -> None:
        """Drop all frames."""
        self.record_sent(len(self._frames))
