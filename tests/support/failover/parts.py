"""What a `world.World` consists of: sides, transfers, and posts on their way."""

from __future__ import annotations

import random
from collections import Counter, deque

from aiote.core.control import Role
from aiote.core.failover import Account, ChannelStates
from aiote.core.striping import decode_immediate
from reference.channel_counts import ChannelCounts
from reference.imm_counters import ImmCounters
from reference.recovery import MessageNumbers, Post, TrackedWork

FAULTS = {
    "arrivals as of the own shut": "the peer says",
    "posted again too early": "a byte landed for a transfer that is over",
    "acknowledgements not applied": "the peer says",
    "acknowledgements not taken out": "the peer says",
    "no acknowledgements": "the sender's table is over its limit",
    "queue not drained": "the peer says",
    "counts kept": "the peer says",
    "messages not looked up": "came twice",
    "arrivals without sign": "of the immediate",
    "forgotten counts taken for a lie": "the peer says",
    "tail with head": "is counted before its bytes are there",
}
"""What an engine might leave out or do wrongly, and by what it shows."""


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


class Transfer(TrackedWork):
    """One write, read or message; `heads` and `tails` are posts, the tails for when the heads are resolved."""

    __slots__ = ("confirmed", "credited", "heads", "imm_data", "message", "over", "side", "stripes", "tails")

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.imm_data: int | None = None
        self.message = 0
        self.over = False
        self.stripes: list[Stripe] = []
        self.heads = 0
        self.tails = 0
        self.credited = 0
        self.confirmed = 0  # of its counted posts, not counting those of its recoveries

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

    def __init__(self, index: int, channels: int, limit: int, seed: random.Random, forgets: bool) -> None:
        self.index = index
        self.forgets = forgets
        self.states = ChannelStates(channels, Role.ACCEPTOR if index else Role.INITIATOR, seed)
        self.limit = limit
        self.channel_counts = [self.new_counts() for _ in range(channels)]
        self.open = [True] * channels
        self.control: deque[tuple] = deque()  # what the other side has to read
        self.queue: list[Post] = []
        self.completions: list[tuple[int, int | None, Post | None]] = []
        self.posted: list[dict[Post, Flight]] = [{} for _ in range(channels)]
        self.unconfirmed: list[list[Post]] = [[] for _ in range(channels)]
        self.early: list[Account] = [Account()] * channels
        self.tasks: dict[tuple[int, type], int] = {}  # (channel, action) under way: its generation
        self.transfers: list[Transfer] = []
        self.sent = 0
        self.numbers = MessageNumbers()
        self.inbox: Counter[int] = Counter()
        self.counters = ImmCounters()
        self.counted: Counter[int] = Counter()
        self.arrived: Counter[int] = Counter()
        self.placed: Counter[int] = Counter()

    def new_counts(self) -> ChannelCounts:
        """Return the tables of a generation of a channel."""
        return ChannelCounts(self.limit, forgets=self.forgets)


def check_counts(side: Side, other: Side) -> None:
    """See that what one side sent was counted by the other: exactly, but for what was cancelled unconfirmed."""
    sure: Counter[int] = Counter()
    doubtful: Counter[int] = Counter()
    for transfer in side.transfers:
        if transfer.imm_data is not None:
            posts = decode_immediate(transfer.imm_data)[1]
            known = transfer.confirmed if transfer.cancelled else posts
            sure[transfer.imm_data] += known
            if transfer.cancelled:
                doubtful[transfer.imm_data] += posts - known
    for imm_data in {*sure, *other.counted}:
        came = other.counted[imm_data]
        check(
            sure[imm_data] <= came <= sure[imm_data] + doubtful[imm_data],
            f"{came} of the immediate {imm_data:#x}, not {sure[imm_data]}",
        )
    values = Counter(decode_immediate(one.imm_data)[0] for one in side.transfers if one.imm_data is not None)
    unsure = {decode_immediate(imm_data)[0] for imm_data in doubtful}
    for imm, writes in values.items():
        check(imm in unsure or other.counters.value(imm) == writes, f"the value {imm} is not {writes}")


def check_over(transfer: Transfer, side: Side, other: Side) -> None:
    """See that a transfer that is reported over has come to its target."""
    if transfer.cancelled:
        return
    check(all(stripe.placed for stripe in transfer.stripes), "a transfer is over without its bytes")
    if transfer.message:
        waiting = any(imm_data == -transfer.message for _, imm_data, _ in other.completions)
        check(bool(other.inbox[transfer.message]) or waiting, "a message is over that did not arrive")
    imm_data = transfer.imm_data
    if imm_data is not None:
        over = sum(one.over and not one.cancelled for one in side.transfers if one.imm_data == imm_data)
        check(other.arrived[imm_data] >= over * decode_immediate(imm_data)[1], "a transfer is over without its count")


def check_tables(side: Side, other: Side, k: int, limit: int) -> None:
    """See that the receiver's table holds nothing but what is under way."""
    arrived = side.channel_counts[k]._arrived
    if len(arrived) <= limit or (side.forgets and not side.open[k]):
        return
    posts = len(other.posted[k]) + len(other.unconfirmed[k])
    unread = sum(len(rest[0]) for kind, at, _, *rest in other.control if kind == "ack" and at == k)
    above = sum(n > 0 for n in arrived.values())
    check(above <= len(other.channel_counts[k].confirmed) + posts + unread, "the receiver's table grows")
    check(len(arrived) - above <= len(side.completions), "the receiver's table is below zero for no reason")


def check_uncounted(transfer: Transfer, side: Side, other: Side) -> None:
    """See that the receiver cannot have concluded yet, from the count, that all writes of this value are there.

    Where one of them was cancelled, it can conclude nothing.
    """
    imm = decode_immediate(transfer.imm_data or 0)[0]
    writes = [one for one in side.transfers if one.imm_data is not None and decode_immediate(one.imm_data)[0] == imm]
    if not any(one.cancelled for one in writes):
        check(other.counters.value(imm) < len(writes), "a byte landed although its value is counted in full")
