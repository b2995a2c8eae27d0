"""What becomes of the posts of a dead channel: rewritten, posted again, or known to have arrived.

A *post* is one work request: a stripe of a write, a read, an immediate alone, a message. (Natively one may be for
several pages; it then stands for as many posts, which have the same fate.) A *work* is what waits for posts, a
transfer. A post is *resolved* when it was confirmed, when it was never posted and its work is cancelled, or when the
recovery that took it over is over. A work is over when all its posts are resolved.

`take_over` gets the unconfirmed posts of a channel that is shut on both sides, with the confirmed counts and
what the other side says arrived. Never before: an old byte could land after the work was over.

| post                     | what becomes of it                                                          |
|--------------------------|-----------------------------------------------------------------------------|
| message that arrived     | resolved                                                                    |
| message that did not     | posted again with its number, cancelled or not, for a gap would never close |
| of a cancelled work      | resolved: nothing more is done for it                                       |
| read, or write uncounted | posted again                                                                |
| counted, and all came    | resolved ("all": all of its immediate on this channel)                      |
| counted, and not all     | taken over by a recovery of its immediate                                   |
| confirmed, and forgotten | resolved long ago; a recovery of its immediate without posts counts again   |

A **recovery** is about one immediate of one dead channel, of whose posts `came` arrived, nobody knows which:

| stage     | it has posted                                          | left when all of those are resolved     |
|-----------|--------------------------------------------------------|-----------------------------------------|
| REWRITING | the bytes of all its posts, as uncounted posts         | to COUNTING                             |
| COUNTING  | max(0, live - came) immediates alone, as counted posts | to OVER: its posts are resolved         |
| OVER      |                                                        |                                         |

Not one immediate before the last rewrite: it might be taken for the one of another write whose bytes are not there yet.
What a recovery posts are posts like any other, whose work is the recovery. So recoveries nest: an immediate that is
unconfirmed on another dead channel is taken over by a second recovery (without bytes to rewrite). That resolves it when
it is over, and until then the first is not over. A rewrite is uncounted, and is posted again.

When a work is cancelled, its posts in a recovery are resolved at once, except those that are being rewritten: these are
resolved with their rewrite. A recovery that has no posts left is cancelled in its turn, unless it also counts again
what was forgotten. How many immediates are missing is counted when they are posted, by what is live then.

This module knows neither channels nor time. What it returns is to be posted on any live channel, in any order.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from .failover import Account, FailoverError, Received, reconcile

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

GAPS_LIMIT: Final = 1024  # a gap is a message under way, and a peer has few credits for those


class TrackedWork:
    """Whatever posts belong to: how many of them are not resolved, and whether it was cancelled."""

    __slots__ = ("cancelled", "open", "taken")

    def __init__(self) -> None:
        self.open = 0
        self.cancelled = False
        self.taken: dict[Post, None] = {}

    @property
    def live(self) -> bool:
        """Whether its posts have to come to their target."""
        return not self.cancelled


class Post:
    """One work request; to make one opens it in its work.

    `what` says what it moves (the engine knows how to read it), None for an immediate alone. `imm_data` is its
    immediate, where it is counted, `number` its message's number. `origin` is the post that this one rewrites.
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
        """Whether it is to be posted; one that waits to be and is not live any more is to be given to `resolved`."""
        return self.number is not None or (self.work.live if self.origin is None else self.origin.live)


class Stage(enum.Enum):
    """Where a recovery stands: see the table above."""

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
        """Return what brings the bytes: the first step."""
        again = []
        for post in self.posts:
            if post.what is not None:
                post.rewrite = Post(self, post.what, origin=post)
                again.append(post.rewrite)
        return again

    def advance(self) -> tuple[list[Post], list[Post]]:
        """Go on when nothing is open; return what to post, and what is resolved by this."""
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
        """Let a post go; it is to be resolved."""
        del self.posts[post]
        del post.work.taken[post]
        post.recovery = None


def take_over(
    posts: Iterable[Post], confirmed: Mapping[int, int], arrivals: Account, forgettable: int = 0
) -> list[Post]:
    """Decide about the unconfirmed posts of a channel that is shut on both sides; return what is to be posted.

    `forgettable`: how many counts the other side may have dropped when it shut its own (`ChannelCounts.forgettable`).

    Raises FailoverError where the numbers of the two sides cannot both be right; nothing was changed then.
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
    """Take note that a post was confirmed, or is not live and was not posted; return what may be posted now."""
    return _resolve([post])


def cancel(work: TrackedWork) -> list[Post]:
    """Cancel a work; return what may be posted now. What of it is posted drains, what is queued is to be resolved."""
    work.cancelled = True
    return _resolve(_let_go(list(work.taken)))


def _let_go(posts: list[Post]) -> list[Post]:
    """Take posts that nobody wants out of their recoveries, unless they are being rewritten; return what is resolved.

    A recovery that has none left is cancelled itself, and so on with the immediates that it has in others; not so where
    `came` is below zero.
    """
    over = []
    while posts:
        post = posts.pop()
        if post.recovery is None or post.rewrite is not None:
            continue
        recovery = post.recovery
        recovery.release(post)
        over.append(post)
        # What it counts for those that were forgotten is of transfers that are over, which nobody can cancel.
        if not recovery.posts and recovery.came >= 0:
            recovery.cancelled = True
            posts += recovery.taken
    return over


def _resolve(over: list[Post]) -> list[Post]:
    """Resolve posts and whatever follows from that."""
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
    """Which messages of a peer arrived, by number from 1 up, whichever channel they came by.

    It takes room by the gaps only: a number that is missing is a message under way, of which there are no more than
    the peer has credits.
    """

    __slots__ = ("_highs", "_lows")

    def __init__(self) -> None:
        # Disjoint ranges that do not touch, in order; the first is up to the high-water mark.
        self._lows = [1]
        self._highs = [0]

    def arrive(self, number: int) -> bool:
        """Tell whether this message is new; one that is not is to be dropped.

        Raises FailoverError for a number that no peer of good faith can have sent.
        """
        if number < 1:
            raise FailoverError(f"the peer sends a message with the number {number}, expected at least 1")
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
            raise FailoverError(f"over {GAPS_LIMIT} messages of the peer are missing between others")
        return True

    def mark(self) -> Received:
        """Return what to say in Arrivals."""
        ranges = list(zip(self._lows, self._highs, strict=True))
        return Received(ranges[0][1], tuple(ranges[1:]))
