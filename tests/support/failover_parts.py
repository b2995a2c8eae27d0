"""What the world of `failover_world` consists of: sides, transfers, and posts on their way."""

from __future__ import annotations

import random
from collections import Counter, deque

from aiote.core.control import Role
from aiote.core.counters import ImmCounters
from aiote.core.failover import Arrivals, ChannelStates, Ledger
from aiote.core.recovery import MessageNumbers, Post, Work

FAULTS = {
    "arrivals as of the own shut": "arrivals are taken when the own endpoint is shut, whatever is still being settled",
    "posted again too early": "what is unconfirmed goes to other channels as soon as the own endpoint is shut",
    "settlements not applied": "the receiver ignores Settle",
    "settlements not taken out": "the sender keeps what it has settled",
    "no settlements": "the sender's ledger grows",
    "queue not drained": "arrivals are told before the completion queue is read to the end",
    "ledger kept": "a channel that comes back goes on with its old ledger",
    "messages not looked up": "unconfirmed messages are sent again whether or not they arrived",
    "tail with head": "the counted part of a write is posted along with the part before it",
}


class Broken(AssertionError):
    """A promise was broken."""


def check(condition: bool, text: str) -> None:
    if not condition:
        raise Broken(text)


class Stripe:
    """What a post moves: whether its bytes are in place, and whose memory they go to."""

    __slots__ = ("into", "placed")

    def __init__(self, into: int) -> None:
        self.into = into
        self.placed = False


class Transfer(Work):
    """One write, read or message; `heads` and `tails` are posts, the tails for when the heads are settled."""

    __slots__ = ("credited", "heads", "message", "over", "side", "stripes", "tails", "word")

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.word: int | None = None
        self.message = 0
        self.over = False
        self.stripes: list[Stripe] = []
        self.heads = 0
        self.tails = 0
        self.credited = 0

    def credit(self) -> int:
        """Return how many more of the counted stripes are in place, together with all that has to be before them."""
        if not all(stripe.placed for stripe in self.stripes[: self.heads]):
            return 0
        before, self.credited = self.credited, sum(stripe.placed for stripe in self.stripes[self.heads :])
        return self.credited - before


class Flight:
    """One post on its way: 0 posted, 1 all bytes landed, 2 arrived, 3 completed."""

    __slots__ = ("post", "sender", "stage", "stuck", "target")

    def __init__(self, post: Post, sender: int, target: int, stuck: bool) -> None:
        self.post = post
        self.sender = sender
        self.target = target
        self.stage = 0
        self.stuck = stuck


class Side:
    """One engine."""

    def __init__(self, index: int, channels: int, limit: int, seed: random.Random) -> None:
        self.index = index
        self.states = ChannelStates(channels, Role.ACCEPTOR if index else Role.INITIATOR, seed)
        self.limit = limit
        self.ledgers = [Ledger(limit) for _ in range(channels)]
        self.open = [True] * channels
        self.control: deque[tuple] = deque()  # what the other side has to read
        self.queue: list[Post] = []
        self.completions: list[tuple[int, int | None, Post | None]] = []
        self.posted: list[dict[Post, Flight]] = [{} for _ in range(channels)]
        self.unconfirmed: list[list[Post]] = [[] for _ in range(channels)]
        self.early: list[Arrivals] = [Arrivals()] * channels
        self.tasks: dict[tuple[int, type], int] = {}  # (channel, action) under way: its generation
        self.transfers: list[Transfer] = []
        self.sent = 0
        self.numbers = MessageNumbers()
        self.inbox: Counter[int] = Counter()
        self.counters = ImmCounters()
        self.counted: Counter[int] = Counter()
        self.arrived: Counter[int] = Counter()
        self.placed: Counter[int] = Counter()
