"""The fate of the posts of a dead channel: rewritten, posted again, or known to have arrived.

A *post* is one work request: a stripe of a write, a read, an immediate alone, a message. (Natively one may be for
several pages; it then stands for as many posts, which have the same fate.) A *work* is a transfer or a recovery that
waits for posts. A post is *resolved* when it was confirmed, when it was never posted and its work is cancelled, or when
the recovery that took it over is over. A work is over when all its posts are resolved.

`take_over` gets the unconfirmed posts of a channel that is shut on both sides, with the confirmed counts and the other
side's report of its arrivals. It must not be called earlier: an old byte could land after the work was over.

| post                     | its fate                                                                        |
|--------------------------|---------------------------------------------------------------------------------|
| message that arrived     | resolved                                                                        |
| message that did not     | posted again with its number, cancelled or not, because a gap would never close |
| of a cancelled work      | resolved: no more is done for it                                                |
| read, or write uncounted | posted again                                                                    |
| counted, and all came    | resolved ("all": all of its immediate on this channel)                          |
| counted, and not all     | taken over by a recovery of its immediate                                       |
| confirmed, and forgotten | resolved long ago; a recovery of its immediate without posts counts again       |

A **recovery** deals with one immediate of one dead channel. It knows that `came` of its posts arrived, not which ones:

| stage     | it has posted                                          | left when all of those are resolved     |
|-----------|--------------------------------------------------------|-----------------------------------------|
| REWRITING | the bytes of all its posts, as uncounted posts         | to COUNTING                             |
| COUNTING  | max(0, live - came) immediates alone, as counted posts | to OVER: its posts are resolved         |
| OVER      |                                                        |                                         |

It posts no immediate before the last rewrite is resolved, because the receiver might take it for the immediate of
another write whose bytes are not there yet. The posts of a recovery are posts like any other; their work is the
recovery. So recoveries nest: an immediate that is unconfirmed on another dead channel is taken over by a second
recovery (without bytes to rewrite). The second resolves it when it is over, and until then the first is not over. A
rewrite is uncounted, so it is posted again.

When a work is cancelled, its posts in a recovery are resolved at once, except those that are being rewritten, which are
resolved with their rewrite. A recovery that has no posts left is cancelled in turn, unless it also repeats forgotten
counts. The number of missing immediates is computed when they are posted, from the posts that are live then.

This module knows neither channels nor time. The posts that it returns may go over any live channel, in any order.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from aiote.core.failover import Account, FailoverError, Received
from reference.channel_counts import reconcile

__all__ = [
    "GAPS_LIMIT",
    "MessageNumbers",
    "Post",
    "Recovery",
    "Stage",
    "TrackedWork",
    "cancel",
    "resolved",
    "take_over",
]

GAPS_LIMIT: Final = 1024  # a gap is a message in flight, for which a peer has few credits


class TrackedWork:
    """The owner of posts: the number of its posts that are not resolved, and whether it was cancelled."""

    __slots__ = ("cancelled", "open", "taken")

    def __init__(self) -> None:
        self.open = 0
        self.cancelled = False
        self.taken: dict[Post, None] = {}

    @property
    def live(self) -> bool:
        """Whether its posts must reach their target."""
        return not self.cancelled


class Post:
    """One work request; making one counts it as open in its work.

    `what` says what it moves (the engine knows how to read it), None for an immediate alone. `imm_data` is its
    immediate if it is counted, `number` its message's number. `origin` is the post that this one rewrites.
    """

    __slots__ = ("imm_data", "number", "origin", "recovery", "rewrite", "what", "work")

    def __init__(
        self,
        work: TrackedWork,
        what: object | None,
        *,
        imm_data: int | None = None,
        number: int | None = None,
        origin: Post | None = None,
    ) -> None:
        self.work = work
        self.what = what
        self.imm_data = imm_data
        self.number = number
        self.origin = origin
        self.recovery: Recovery | None = None
        self.rewrite: Post | None = None
        work.open += 1

    @property
    def live(self) -> bool:
        """Whether it must still be posted. A post that waits and is no longer live must be given to `resolved`."""
        return self.number is not None or (self.work.live if self.origin is None else self.origin.live)


class Stage(enum.Enum):
    """The stage of a recovery: see the table above."""

    REWRITING = enum.auto()
    COUNTING = enum.auto()
    OVER = enum.auto()


class Recovery(TrackedWork):
    """Brings the lost posts of one immediate of one dead channel to their target, and their counts."""

    __slots__ = ("came", "imm_data", "posts", "stage")

    def __init__(self, imm_data: int, posts: Iterable[Post], came: int) -> None:
        super().__init__()
        self.imm_data = imm_data
        self.came = came
        self.posts = dict.fromkeys(posts)
        self.stage = Stage.REWRITING
        for post in self.posts:
            post.recovery = self
            post.work.taken[post] = None

    def rewrites(self) -> list[Post]:
        """Return the posts that rewrite the bytes: the first step."""
        again = []
        for post in self.posts:
            if post.what is not None:
                post.rewrite = Post(self, post.what, origin=post)
                again.append(post.rewrite)
        return again

    def advance(self) -> tuple[list[Post], list[Post]]:
        """Advance if no post is open; return the posts to make, and the posts that this resolves."""
        again: list[Post] = []
        if self.open == 0 and self.stage is Stage.REWRITING:
            self.stage = Stage.COUNTING
            live = sum(post.live for post in self.posts)
            again = [Post(self, None, imm_data=self.imm_data) for _ in range(max(0, live - self.came))]
        if self.open == 0 and self.stage is Stage.COUNTING:
            self.stage = Stage.OVER
            over = list(self.posts)
            for post in over:
                self.release(post)
            return again, over
        return again, []

    def release(self, post: Post) -> None:
        """Remove a post, which the caller resolves."""
        del self.posts[post]
        del post.work.taken[post]
        post.recovery = None


def take_over(
    posts: Iterable[Post], confirmed: Mapping[int, int], arrivals: Account, forgettable: int = 0
) -> list[Post]:
    """Decide about the unconfirmed posts of a channel that is shut on both sides; return the posts to make.

    `forgettable`: how many counts the other side may have dropped when it shut its endpoint
    (`ChannelCounts.forgettable`).

    Raises FailoverError, before anything is changed, if the numbers of the two sides contradict each other.
    """
    again: list[Post] = []
    over: list[Post] = []
    counted: dict[int, list[Post]] = {}
    for post in posts:
        if post.imm_data is not None:
            counted.setdefault(post.imm_data, []).append(post)
        elif not post.live or (post.number is not None and post.number in arrivals.messages):
            over.append(post)
        else:
            again.append(post)
    numbers = {imm_data: (live := sum(post.live for post in of), len(of) - live) for imm_data, of in counted.items()}
    for imm_data, verdict in reconcile(numbers, confirmed, dict(arrivals.counts), forgettable).items():
        of = counted.get(imm_data, [])
        taken = [post for post in of if post.live] if verdict.rewrite else []
        over += [post for post in of if not verdict.rewrite or not post.live]
        if taken or verdict.missing:
            recovery = Recovery(imm_data, taken, verdict.came)
            again += recovery.rewrites()
            more, done = recovery.advance()
            again += more
            over += done
    return again + _resolve(over)


def resolved(post: Post) -> list[Post]:
    """Record that a post was confirmed, or was neither live nor posted; return the posts that may be made now."""
    return _resolve([post])


def cancel(work: TrackedWork) -> list[Post]:
    """Cancel a work; return the posts that may be made now.

    Its posted requests drain; the caller gives its queued posts to `resolved`.
    """
    work.cancelled = True
    return _resolve(_let_go(list(work.taken)))


def _let_go(posts: list[Post]) -> list[Post]:
    """Take posts of cancelled works out of their recoveries, unless they are being rewritten; return the resolved ones.

    A recovery that has no posts left is cancelled itself, and so on with the immediates that it has in other
    recoveries, unless its `came` is below zero.
    """
    over = []
    while posts:
        post = posts.pop()
        if post.recovery is None or post.rewrite is not None:
            continue
        recovery = post.recovery
        recovery.release(post)
        over.append(post)
        # Below zero, it repeats forgotten counts of transfers that are over, which cannot be cancelled any more.
        if not recovery.posts and recovery.came >= 0:
            recovery.cancelled = True
            posts += recovery.taken
    return over


def _resolve(over: list[Post]) -> list[Post]:
    """Resolve posts and everything that follows from that; return the posts that may be made now."""
    again: list[Post] = []
    while over:
        post = over.pop()
        work = post.work
        work.open -= 1
        origin = post.origin
        if origin is not None:
            origin.rewrite = None
            if not origin.live:
                over += _let_go([origin])
        if isinstance(work, Recovery):
            more, done = work.advance()
            again += more
            over += done
    return again


class MessageNumbers:
    """The messages of a peer that arrived, by number from 1 up, over any channel.

    Its size depends on the gaps only: a missing number is a message in flight, and there are at most as many of these
    as the peer has credits.
    """

    __slots__ = ("_highs", "_lows")

    def __init__(self) -> None:
        # Disjoint ranges that do not touch, in ascending order; the first ends at the high-water mark.
        self._lows = [1]
        self._highs = [0]

    def arrive(self, number: int) -> bool:
        """Record a message and return whether it is new; the caller drops one that is not.

        Raises FailoverError for a number that an honest peer cannot have sent.
        """
        if number < 1:
            raise FailoverError(f"the peer sent message number {number}, expected at least 1")
        at = bisect_left(self._highs, number)
        if at < len(self._lows) and self._lows[at] <= number:
            return False
        low = high = number
        first = last = at
        if at > 0 and self._highs[at - 1] == number - 1:
            first, low = at - 1, self._lows[at - 1]
        if at < len(self._lows) and self._lows[at] == number + 1:
            last, high = at + 1, self._highs[at]
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]
        if len(self._lows) > GAPS_LIMIT:
            raise FailoverError(f"over {GAPS_LIMIT} messages of the peer are missing between messages that arrived")
        return True

    def mark(self) -> Received:
        """Return the record of arrived messages for an Arrivals."""
        ranges = list(zip(self._lows, self._highs, strict=True))
        return Received(ranges[0][1], tuple(ranges[1:]))
