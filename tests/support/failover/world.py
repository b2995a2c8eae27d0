"""Two engines whose channels die, in memory and driven by a seed: one `World` is one schedule.

The two sides run `core.failover` and `reference.recovery` as an engine would. The world plays the rest, as badly as it
is allowed to: posts move in any order, in steps (some of the bytes, all of them, the immediate in the completion queue,
the completion in the sender's); bytes and immediates move until the *target's* endpoint is shut, whatever the sender
did; queues and control messages are read whenever it likes; channels die or are only believed dead, on either side or
on both, also while others recover and while they come back; transfers are cancelled at any time. Some providers forget:
when an endpoint is shut, some of what its completion queue holds is gone.

`check` looks at each step: no byte lands for what is over, or when the receiver has counted all of its value; no
immediate is counted more often than posts of it have their bytes in place; nothing is over before its bytes and its
counts are there; no message comes twice. At the end nothing hangs, every count is exact and every channel is back. A
schedule that breaks this raises `Broken`.

`fault` takes out one part of what the engine has to do, to see that this is noticed: `parts.FAULTS`. Parts of
the pure modules are taken out by whoever patches them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from aiote.core.failover import (
    Account,
    Action,
    ChannelState,
    Join,
    LosePeer,
    OpenAgain,
    Reconcile,
    SendArrivals,
    SendRailDown,
    Shut,
)
from aiote.core.striping import encode_immediate
from reference.recovery import Post, Recovery, cancel, resolved, take_over
from support.failover.parts import (
    Broken,
    Flight,
    Side,
    Stripe,
    Transfer,
    check,
    check_counts,
    check_over,
    check_tables,
    check_uncounted,
)

MARK = Account().messages
STEPS = 300
ROUNDS = 3000


class World:
    """One schedule; `run` plays it and returns what happened in it."""

    def __init__(self, seed: int, fault: str = "") -> None:
        self.rng = rng = random.Random(seed)
        self.fault = fault
        self.channels = rng.choice((1, 2, 2, 3, 3, 4, 4, 4))
        limit = 1 << 20 if fault == "no acknowledgements" else rng.choice((1, 2, 3))
        self.limit = rng.choice((1, 2, 3)) if fault == "no acknowledgements" else limit
        self.forgets = rng.random() < 0.3
        self.sides = [Side(index, self.channels, limit, rng, self.forgets) for index in (0, 1)]
        self.alive = [True] * self.channels
        self.flights: list[list[Flight]] = [[] for _ in range(self.channels)]
        self.now = 0.0
        self.lost = self.ending = False
        self.deaths_left = rng.choice((1, 1, 2, 3, 5, 8, 12))
        self.may_be_lost = rng.random() < 0.05
        self.tally: Counter[str] = Counter()
        self.transfers_left = rng.randrange(1, 25)
        self.cancels_left = rng.choice((0, 0, 1, 2, 5))
        self.values = rng.choice((1, 2, 2, 8))
        self.malice = rng.random() < 0.3  # what recovers is hit again
        self.slow = rng.choice((-1, rng.randrange(self.channels)))

    def run(self) -> Counter[str]:
        moves: list[tuple[Callable[[], object], int]] = [
            (self.submit, 4),
            (self.post, 8),
            (self.fly, 12),
            (self.read, 1 if self.forgets else 6),
            (self.hear, 4),
            (self.work_on, 3),
            (self.die, 2),
            (self.notice, 2),
            (self.cancel, 1),
            (self.tick, 1),
        ]
        # What is frequent and what is rare differs from schedule to schedule: a mean of all would reach few corners.
        draw = self.rng.random
        for _ in range(int(draw() * self.transfers_left)):
            self.submit()
        rare = self.rng.sample(range(len(moves)), self.rng.randrange(4))
        deck = [move for at, (move, often) in enumerate(moves) for _ in range(1 if at in rare else 4 * often)]
        for _ in range(STEPS):
            deck[int(draw() * len(deck))]()
            if self.lost:
                self.tally["lost"] += 1
                return self.tally
        self.end()
        return self.tally

    def transfer_of(self, post: Post) -> Transfer:
        """Return the transfer whose bytes a post moves."""
        work = (post.origin or post).work
        assert isinstance(work, Transfer)
        return work

    def fly(self, flight: Flight | None = None, k: int | None = None) -> bool:
        """Move one flight by one step."""
        if flight is None or k is None:
            k = int(self.rng.random() * self.channels)
            if not self.flights[k] or (k == self.slow and self.rng.random() < 0.9):
                return False
            flight = self.flights[k][int(self.rng.random() * len(self.flights[k]))]
        if flight.stuck or not self.sides[flight.sender if flight.stage == 2 else flight.target].open[k]:
            return False
        if flight.stage == 0:
            self.land(flight.post, flight.target)
        elif flight.stage == 1:
            self.arrive(flight, k)
        else:
            self.flights[k].remove(flight)
            self.sides[flight.sender].completions.append((k, None, flight.post))
        flight.stage += 1
        return True

    def land(self, post: Post, target: int) -> None:
        """Put bytes in place: some of them, which shows only in whose they are, or all."""
        stripe = post.what
        if not isinstance(stripe, Stripe):
            return
        transfer = self.transfer_of(post)
        check(not transfer.over, "a byte landed for a transfer that is over")
        if transfer.imm_data is not None:
            check_uncounted(transfer, self.sides[transfer.side], self.sides[1 - transfer.side])
        if not stripe.placed:
            stripe.placed = True
            if transfer.imm_data is not None:
                self.sides[target].placed[transfer.imm_data] += transfer.credit()

    def arrive(self, flight: Flight, k: int) -> None:
        post, target = flight.post, self.sides[flight.target]
        if post.imm_data is not None:
            target.arrived[post.imm_data] += 1
            target.completions.append((k, post.imm_data, None))
        elif post.number is not None:
            target.completions.append((k, -post.number, None))

    def die(self) -> bool:
        """Let a channel die, most often one with something on its way."""
        busy = [k for k in range(self.channels) if self.flights[k]]
        if not busy and self.rng.random() < 0.9:
            return False
        return self.kill(self.rng.choice(busy or range(self.channels)))

    def kill(self, k: int) -> bool:
        """Kill a channel; some of what it carries may still move, and it may be well in truth."""
        last = any(side.states.live in ((), (k,)) for side in self.sides) or sum(self.alive) <= self.alive[k]
        if self.deaths_left == 0 or (last and not self.may_be_lost):
            return False
        self.deaths_left -= 1
        self.tally["deaths"] += 1
        self.alive[k] = False
        stuck = self.rng.choice((0.0, 0.0, 0.5, 1.0))
        for flight in self.flights[k]:
            flight.stuck = self.rng.random() < stuck
        if self.rng.random() < 0.5:
            self.notice_at(k, self.rng.choice((0, 1)))
            if self.rng.random() < 0.3:
                self.tally["noticed by both"] += 1
                for index in (0, 1):
                    self.notice_at(k, index)
        return True

    def notice(self) -> bool:
        """Let one side find out that a channel is dead."""
        dead = [k for k in range(self.channels) if not self.alive[k]]
        return bool(dead) and self.notice_at(self.rng.choice(dead), self.rng.choice((0, 1)))

    def notice_at(self, k: int, index: int) -> bool:
        side = self.sides[index]
        if self.lost or side.states.state(k) not in (ChannelState.LIVE, ChannelState.JOINING, ChannelState.OPENING):
            return False
        self.act(side, side.states.record_failed(k, "dead", self.now))
        return True

    # What a side does.

    def submit(self) -> bool:
        if self.transfers_left == 0 or self.ending:
            return False
        self.transfers_left -= 1
        rng = self.rng
        side = self.sides[rng.choice((0, 1))]
        transfer = Transfer(side.index)
        side.transfers.append(transfer)
        kind = rng.random()
        if kind < 0.15:
            side.sent += 1
            transfer.message = side.sent
            self.queue(side, Post(transfer, None, number=side.sent))
        elif kind < 0.4:
            into = side.index if kind < 0.25 else 1 - side.index
            transfer.stripes = [Stripe(into) for _ in range(rng.randrange(1, 4))]
            self.queue(side, *(Post(transfer, stripe) for stripe in transfer.stripes))
        else:
            self.submit_counted(side, transfer)
        return True

    def submit_counted(self, side: Side, transfer: Transfer) -> None:
        rng = self.rng
        transfer.tails = rng.choice((1, 1, 2, 3))
        transfer.imm_data = encode_immediate(rng.randrange(self.values), transfer.tails)
        if rng.random() < 0.1:
            self.sides[1 - side.index].placed[transfer.imm_data] += transfer.tails  # nothing to place
            transfer.stripes = []
        else:
            transfer.heads = rng.randrange(1, 3) if rng.random() < 0.2 else 0
            transfer.stripes = [Stripe(1 - side.index) for _ in range(transfer.heads + transfer.tails)]
        heads = [Post(transfer, stripe) for stripe in transfer.stripes[: transfer.heads]]
        self.queue(side, *heads)
        if not heads or self.fault == "tail with head":
            self.queue_tails(side, transfer)

    def queue_tails(self, side: Side, transfer: Transfer) -> None:
        stripes = transfer.stripes[transfer.heads :] or [None] * transfer.tails
        transfer.tails = 0
        self.queue(side, *(Post(transfer, stripe, imm_data=transfer.imm_data) for stripe in stripes))

    def queue(self, side: Side, *posts: Post) -> None:
        side.queue += posts

    def post(self, side: Side | None = None) -> bool:
        """Post one of what is queued, or drop it where nobody wants it any more."""
        side = side or self.sides[int(self.rng.random() * 2)]
        live = side.states.live
        if not side.queue or not live:
            return False
        at = int(self.rng.random() * len(side.queue))
        post = side.queue[at]
        side.queue[at] = side.queue[-1]
        side.queue.pop()
        if not post.live:
            self.go_on(side, resolved(post))
            return True
        k = live[int(self.rng.random() * len(live))]
        target = post.what.into if isinstance(post.what, Stripe) else 1 - side.index
        flight = Flight(post, side.index, target, not self.alive[k] and (self.ending or self.rng.random() < 0.7))
        check(side.open[k], f"a post on channel {k}, which is shut")
        self.flights[k].append(flight)
        side.posted[k][post] = flight
        if self.malice and isinstance(post.work, Recovery) and self.rng.random() < 0.6:
            self.kill(k)
        return True

    def read(self, side: Side | None = None) -> bool:
        """Read one entry of a completion queue."""
        side = side or self.sides[int(self.rng.random() * 2)]
        if side.completions:
            self.complete(side, *side.completions.pop(int(self.rng.random() * len(side.completions))))
            return True
        return False

    def complete(self, side: Side, k: int, imm_data: int | None, post: Post | None) -> None:
        counts = side.channel_counts[k]
        if post is not None:
            del side.posted[k][post]
            if post.imm_data is not None:
                counts.confirm(post.imm_data)
                if isinstance(post.work, Transfer):
                    post.work.confirmed += 1
                kept = dict(counts.confirmed)
                items = counts.counts_to_ack()
                if items is not None:
                    self.tally["acknowledgements"] += 1
                    side.control.append(("ack", k, side.states.generation(k), items))
                    if self.fault == "acknowledgements not taken out":
                        counts._confirmed.update(kept)
                    check(not counts.confirmed or bool(self.fault), "a counts_to_ack left something")
                check(len(counts.confirmed) <= self.limit or bool(items), "the sender's table is over its limit")
            self.go_on(side, resolved(post))
        elif imm_data is not None and imm_data >= 0:
            counts.arrive(imm_data)
            if not self.fault:
                check_tables(side, self.sides[1 - side.index], k, self.limit)
            side.counters.arrive(imm_data)
            side.counted[imm_data] += 1
            check(
                side.counted[imm_data] <= side.placed[imm_data],
                f"the immediate {imm_data:#x} is counted before its bytes are there",
            )
        elif imm_data is not None and (side.numbers.arrive(-imm_data) or self.fault == "messages not looked up"):
            side.inbox[-imm_data] += 1
            check(side.inbox[-imm_data] == 1, f"message {-imm_data} came twice")

    def go_on(self, side: Side, again: list[Post]) -> None:
        """Queue what is to be posted, and see which transfers are over."""
        self.queue(side, *again)
        for transfer in side.transfers:
            if transfer.open == 0 and not transfer.over:
                if transfer.tails and not transfer.cancelled:
                    self.queue_tails(side, transfer)
                else:
                    transfer.over = True
                    check_over(transfer, side, self.sides[1 - side.index])

    def cancel(self) -> bool:
        side = self.sides[self.rng.choice((0, 1))]
        going = [one for one in side.transfers if not (one.over or one.cancelled)]
        if not going or self.cancels_left == 0:
            return False
        self.cancels_left -= 1
        self.tally["cancelled"] += 1
        self.go_on(side, cancel(self.rng.choice(going)))
        return True

    def tick(self) -> bool:
        """Let time pass."""
        self.now += self.rng.choice((0.01, 0.1, 1.0, 40.0))
        return self.be_due()

    def be_due(self) -> bool:
        done = False
        for side in self.sides:
            deadline = side.states.deadline
            if deadline is not None and deadline <= self.now and not self.lost:
                self.act(side, side.states.advance(self.now))
                done = True
        return done

    # What the failover asks for.

    def act(self, side: Side, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Shut(k):
                    side.tasks.pop((k, OpenAgain), None)
                    side.tasks.pop((k, Join), None)
                    side.tasks[k, Shut] = 0
                case OpenAgain(k, generation) | Join(k, generation):
                    side.tasks[k, type(action)] = generation
                case SendRailDown(k, generation, reason):
                    side.control.append(("down", k, generation, reason))
                case SendArrivals(k, generation):
                    told = Account(side.channel_counts[k].arrivals(), side.numbers.mark())
                    if self.fault == "arrivals as of the own shut":
                        told = side.early[k]
                    if self.fault == "arrivals without sign":
                        told = Account(tuple(item for item in told.counts if item[1] > 0), told.messages)
                    side.control.append(("arrivals", k, generation, told))
                case Reconcile(k, arrivals):
                    self.reconcile(side, k, arrivals)
                case LosePeer():
                    self.lost = True

    def reconcile(self, side: Side, k: int, arrivals: Account) -> None:
        posts, side.unconfirmed[k] = side.unconfirmed[k], []
        if self.fault == "messages not looked up":
            arrivals = Account(arrivals.counts, MARK)
        self.tally["posts taken over"] += len(posts)
        self.tally["nested"] += sum(post.imm_data is not None and isinstance(post.work, Recovery) for post in posts)
        counts = side.channel_counts[k]
        forgettable = 0 if self.fault == "forgotten counts taken for a lie" else counts.forgettable
        self.tally["forgotten"] += any(dict(arrivals.counts).get(imm, 0) < n for imm, n in counts.confirmed.items())
        again = take_over(posts, counts.confirmed, arrivals, forgettable)
        self.tally["immediates and rewrites"] += sum(
            post.imm_data is not None or post.origin is not None for post in again
        )
        if self.fault != "counts kept":
            side.channel_counts[k] = side.new_counts()
        self.go_on(side, again)

    def work_on(self) -> bool:
        """Finish one of the things that take a while: shutting, opening, joining."""
        side = self.sides[int(self.rng.random() * 2)]
        if not side.tasks:
            return False
        k, kind = self.rng.choice(list(side.tasks))
        generation = side.tasks.pop((k, kind))
        if kind is Shut:
            self.shut(side, k)
        elif kind is OpenAgain:
            self.open(side, k, generation)
        elif self.alive[k]:
            self.act(side, side.states.record_joined(k, self.now))
        else:
            self.act(side, side.states.record_failed(k, "the probe did not come back", self.now))
        return True

    def shut(self, side: Side, k: int) -> None:
        side.open[k] = False
        self.flights[k] = [flight for flight in self.flights[k] if self.moves_on(flight, k)]
        if self.fault == "queue not drained":
            side.early[k] = Account(tuple(sorted(side.channel_counts[k]._arrived.items())), side.numbers.mark())
        for entry in [entry for entry in side.completions if entry[0] == k]:
            side.completions.remove(entry)
            if self.forgets and (entry[1] is None or entry[1] >= 0) and self.rng.random() < 0.7:
                continue  # Not a message: one is kept until the other side has told of it (messages.pyx).
            if self.fault != "queue not drained" or entry[2] is not None:
                self.complete(side, *entry)
        if self.fault == "arrivals as of the own shut":
            side.early[k] = Account(tuple(sorted(side.channel_counts[k]._arrived.items())), side.numbers.mark())
        side.unconfirmed[k] = list(side.posted[k])
        side.posted[k] = {}
        if self.fault == "posted again too early":
            early = [post for post in side.unconfirmed[k] if post.imm_data is None and post.number is None]
            side.unconfirmed[k] = [post for post in side.unconfirmed[k] if post not in early]
            self.queue(side, *early)
        self.act(side, side.states.record_shut(k))

    def moves_on(self, flight: Flight, k: int) -> bool:
        """Tell whether a flight can still do something, now that one endpoint is shut."""
        return self.sides[flight.target].open[k] if flight.stage < 2 else self.sides[flight.sender].open[k]

    def open(self, side: Side, k: int, generation: int) -> None:
        if side.index == 0:
            self.alive[k] = self.ending or self.rng.random() < 0.7
            check(not self.flights[k], "a channel is opened again while something moves on its last generation")
        if not self.ending and self.rng.random() < 0.1:
            self.act(side, side.states.record_failed(k, "cannot be opened", self.now))
            return
        self.tally["opened"] += 1
        side.open[k] = True
        side.control.append(("reopen", k, generation))
        if side.index == 1:
            side.tasks[k, Join] = generation

    def hear(self, side: Side | None = None) -> bool:
        """Read one control message."""
        side = side or self.sides[int(self.rng.random() * 2)]
        other = self.sides[1 - side.index]
        if not other.control or self.lost:
            return False
        kind, k, generation, *rest = other.control.popleft()
        states = side.states
        if kind == "ack":
            if states.on_ack_counts(k, generation) and self.fault != "acknowledgements not applied":
                side.channel_counts[k].ack_counts(rest[0])
                if not self.fault:
                    check_tables(side, other, k, self.limit)
        elif kind == "down":
            self.act(side, states.on_rail_down(k, generation, rest[0], self.now))
        elif kind == "arrivals":
            self.act(side, states.on_arrivals(k, generation, rest[0], self.now))
        else:
            self.act(side, states.on_reopen(k, generation, self.now))
        return True

    # The end: nothing dies any more, and everything that can happen does.

    def end(self) -> None:
        self.ending, self.deaths_left = True, 0
        for _ in range(ROUNDS):
            if self.lost:
                return
            if self.round():
                continue
            deadlines = [side.states.deadline for side in self.sides if side.states.deadline is not None]
            if not deadlines:
                break
            self.now = max(self.now, min(deadlines))
            self.be_due()
        else:
            raise Broken("it does not come to an end")
        self.check_end()

    def round(self) -> bool:
        """Do everything once; tell whether anything was done."""
        done = False
        for side in self.sides:
            while side.completions and self.read(side):
                done = True
            while side.queue and self.post(side):
                done = True
            done |= self.hear(side)
        for k in range(self.channels):
            for flight in list(self.flights[k]):
                done |= flight in self.flights[k] and self.fly(flight, k)
        while any(side.tasks for side in self.sides) and not self.lost:
            done |= self.work_on()
        return done or self.notice()

    def check_end(self) -> None:
        for side, other in (self.sides, self.sides[::-1]):
            for k in range(self.channels):
                check(side.states.state(k) is ChannelState.LIVE, f"channel {k} did not come back")
                check(side.states.generation(k) == other.states.generation(k), f"channel {k} has two generations")
                check(len(side.channel_counts[k].confirmed) <= self.limit, "the sender's table is over its limit")
                left = dict(other.channel_counts[k].arrivals())
                check(left == dict(side.channel_counts[k].confirmed) or bool(self.fault), "the two tables differ")
            check(all(transfer.over for transfer in side.transfers), "a transfer hangs")
            check(set(other.inbox) == set(range(1, side.sent + 1)), "a message was lost")
            check_counts(side, other)
