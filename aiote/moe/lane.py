"""One lane of a rank: its rounds, which run one at a time, and the state that they share.

An error in a step breaks the group, except an overflow, which every rank detects alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import numpy as np

import aiote

from ..aio import Condition, TransferWindow, in_thread, run_shielded
from .arrays import elements, lines, plain
from .arrivals import ALL, KINDS, LaneCounters
from .joining import NOWHERE
from .round import Round
from .round_parts import DispatchArguments, RoundHost
from .states import GroupBrokenError, MoeOverflowError, NotBegunError, RoundState
from .wire import ROUTE, is_of

if TYPE_CHECKING:
    from .memory import LaneMemory

__all__ = ["Lane"]

IDS = ("int32", "int64", "uint32")
OFFLOADED = 4 << 20
"""From how many bytes on a thread copies or adds up rows: a core takes 1 to 2 ms for them, and a thread costs 0.2."""
T = TypeVar("T")


class Lane:
    """The state of a lane that its rounds share: phase, counters, transfers and memory."""

    def __init__(self, group: RoundHost, number: int) -> None:
        self.group, self.number = group, number
        self.state = RoundState()
        self.sizes = group.sizes
        self.reached = NOWHERE
        """The round and the kind of the last wait that has begun: all writes up to that kind are posted."""
        self.waiting = False
        self._arrivals: LaneCounters | None = None
        self._transfers = TransferWindow[aiote.Transfer](Condition())
        self._ranks: dict[aiote.Transfer, int] = {}
        self._copying = False
        self._copied = Condition()

    @property
    def memory(self) -> LaneMemory:
        """The lane's arrays."""
        return self.group.memory.lanes[self.number]

    @property
    def arrivals(self) -> LaneCounters:
        """The counters of the current epoch."""
        assert self._arrivals is not None
        return self._arrivals

    def open(self, first_immediates: Mapping[int, int]) -> None:
        """Begin an epoch with no round in progress; `first_immediates` are those of `EpochImmediates`."""
        self.close()
        self._arrivals = LaneCounters(self.group.engine, self.number, first_immediates)
        self.state, self.reached = RoundState(), NOWHERE

    def close(self) -> None:
        """Free the counters. Idempotent."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._arrivals = None

    def wake(self) -> None:
        """Make waits check again whether their rank, or the group, is lost."""
        if self._arrivals is not None:
            self._arrivals.wake()

    def loss_of(self, rank: int | None) -> aiote.AioteError | None:
        """Return why no more writes come from a rank, or, for None, from any rank; None while they may come."""
        membership = self.group.membership
        if rank is not None and membership.failure is None:
            why = membership.gone.get(rank) if membership.takes_part(rank) else membership.masked[rank]
            if why is not None:
                return aiote.PeerLostError(str(self.group.members[rank]), why, operation="moe")
        return membership.failure

    def check_departed(self) -> None:
        """Lose the ranks that left before the current round, or that claim to have left after a round still to come."""
        under_way = self.state.phase != "idle"
        for rank, rounds in tuple(self.group.membership.departed.items()):
            if under_way and rounds[self.number] <= self.state.number:
                self.group.lose(rank, "it has left the group")
            elif rounds[self.number] > self.state.number + under_way:
                self.group.lose(rank, "it says that it has left after a round that is not over")

    def check_gone(self, rank: int) -> None:
        """Lose a rank that has left, and whose connection has ended, if its route of the current round has not come."""
        state, epoch = self.state, self.group.membership.epoch
        if state.phase == "sent" and not is_of(self.memory.routes[state.parity, rank], epoch, state.number):
            self.group.lose(rank, "it has left the group before its route came")
        self.wake()

    # Transfers.

    def keep_transfers(self, transfers: list[tuple[int, aiote.Transfer]]) -> None:
        """Keep transfers until they have ended, each with its target rank, or -1 for several ranks."""
        for rank, transfer in transfers:
            self._ranks[transfer] = rank
            self._transfers.add(transfer)

    def cancel(self) -> None:
        """Cancel all transfers; `drain` waits until they have ended."""
        self._transfers.cancel()

    async def drain(self) -> None:
        """End all transfers and wait until no `offload` thread uses this memory. Cancelling the wait loses nothing."""
        await self._copied.until(lambda: not self._copying)
        await self._transfers.drain()
        self._ranks.clear()

    async def wait_sent(self) -> None:
        """Wait until all posted writes have completed. Ignores failed writes to ranks that need no more of this round.

        Another failed write is raised with on_loss="raise"; with on_loss="mask" its rank is lost.
        """
        while (failed := await self._transfers.next_failure()) is not None:
            rank = self._ranks[failed]
            try:
                failed.raise_failure()
            except (aiote.TransferError, aiote.PeerError) as error:
                if self.needs_nothing(rank):
                    pass
                elif self.group.config.on_loss == "raise":
                    self.group.membership.require_whole()
                    raise self.name_rank(error) from error
                else:
                    self.group.lose(rank, str(error))
        self._ranks.clear()

    async def offload(self, nbytes: int, function: Callable[[], T]) -> T:
        """Call a function that copies `nbytes` bytes of this lane, in a thread if that takes long.

        `drain` and a cancellation wait for its end. Raises its error, or the group's if that broke meanwhile.
        """
        if nbytes < OFFLOADED or self.group.launcher is not None:
            return function()
        self._copying = True
        try:
            result = await in_thread(function)
        finally:
            self._copying = False
            self._copied.wake_all()
        self.group.membership.require_whole()
        return result

    async def wait_quiet(self) -> None:
        """Wait until all transfers posted so far have ended, successfully or not. Cancelling cancels no transfer."""
        await self._transfers.wait_over()

    async def posted(self) -> tuple[int, int]:
        """Return `reached`, once all writes that were posted before have ended."""
        reached = self.reached
        await self.wait_quiet()
        return reached

    def in_round(self, number: int) -> bool:
        """Return whether a round has begun and is not over."""
        return self.state.phase != "idle" and self.state.number == number

    def needs_nothing(self, rank: int) -> bool:
        """Return whether a rank left after the current round: it has then received everything of this round."""
        rounds = self.group.membership.departed.get(rank)
        return rounds is not None and rounds[self.number] > self.state.number

    def name_rank(self, error: aiote.AioteError) -> aiote.AioteError:
        """Return an error that names the rank if a peer caused it, else the same error."""
        cause = error.cause if isinstance(error, aiote.TransferError) else error
        if not isinstance(cause, aiote.PeerError):
            return error
        ranks = [rank for rank, one in enumerate(self.group.members) if str(one) == cause.peer]
        return aiote.PeerLostError(cause.peer, f"rank {ranks} of the group: {cause.reason}", operation="moe")

    # Waiting.

    async def wait(self, what: str, kind: int, needs: dict[int, int]) -> list[int]:
        """Wait as `LaneCounters.wait` does, in the current round, and return the ranks that have come.

        Counts the seconds of the wait, and those in which one rank's route alone was missing. Loses the ranks that have
        not come, or that counted too many writes in this round or the last. A rank sends the route of a round when its
        writes of the last one have completed, so the last round's counts are all there when the routes are.
        """
        started = since = anyio.current_time()
        counted, parity, number = self.group.counted, self.state.parity, self.state.number
        late: int | None = None

        def record_late(rank: int | None) -> None:
            nonlocal late, since
            now = anyio.current_time()
            if late is not None:
                counted.waited_for[late] += now - since
            late, since = self._late(parity, number) if rank is None else rank, now

        self.reached, self.waiting = (number, kind), True
        try:
            came = await self.arrivals.wait(kind, number, needs, self.loss_of, record_late if kind == ROUTE else None)
        finally:
            self.waiting = False
        if late is not None:
            record_late(late)
        counted.waited[what] += anyio.current_time() - started
        for rank in needs.keys() - set(came):
            self.group.lose(rank, f"it has left the group, and its {what} have not come")
        if kind == ROUTE:
            came = self.without_surplus(came, number - 1)
        return self.without_surplus(came, number, kind)

    def without_surplus(self, came: list[int], number: int, *kinds: int) -> list[int]:
        """Lose the ranks that have counted more writes than they owe in a round, and return the others.

        `number` is this round or the one before, `kinds` the kinds of writes to check, by default all. A surplus count
        is an error because it can end the wait for a write that has not come. Raises GroupBrokenError if one counter
        serves all ranks, because the counter does not tell which rank counted too much.
        """
        surplus = self.arrivals.surplus(number, kinds or KINDS)
        if ALL in surplus:
            raise GroupBrokenError(f"more writes of round {number} came than the ranks owe, so its rows may be wrong")
        for rank in set(came).intersection(surplus):
            self.group.lose(rank, "it has sent more writes than it owes")
        return [rank for rank in came if rank not in surplus]

    def _late(self, parity: int, number: int) -> int | None:
        """Return the rank whose route is missing, if exactly one is."""
        membership, routes = self.group.membership, self.memory.routes[parity]
        missing = [rank for rank in membership.active if not is_of(routes[rank], membership.epoch, number)]
        return missing[0] if len(missing) == 1 else None

    # Steps.

    @contextmanager
    def step(self, name: str, under_way: RoundState, number: int) -> Iterator[None]:
        """Run a step of a round. An error breaks the group, except an overflow, which ends the round.

        Refused tokens (NotBegunError) leave the lane as it was. Raises UsageError if the round is over.
        """
        self.group.membership.require_whole()
        if self.state is not under_way or self.state.number != number:
            raise aiote.UsageError(f"{name}: the round is over; a lane has one round at a time")
        self.state.enter(name)
        try:
            yield
        except NotBegunError:
            self.state.undo()
            raise
        except MoeOverflowError:
            self.state.give_up()
            raise
        except BaseException as error:
            self.group.fail(error, name)
            raise
        self.state.leave(name)

    async def run(self, name: str, under_way: RoundState, number: int, body: Callable[[], Any]) -> Any:
        """Run a step that waits. If it breaks the group, first end all transfers of this lane."""
        try:
            with self.step(name, under_way, number):
                return await body()
        except BaseException:
            if self.group.membership.failure is not None:
                self.cancel()
                # Kernels that a GPU does not end are reported by the reset, or when the group is left.
                with suppress(GroupBrokenError):
                    await run_shielded(self.drain)
            raise

    def begin(self, x: Any, ids: Any, weights: Any, scales: Any, count: int | None) -> Round:
        """Begin a round: check the arguments, and send the route and rows. Raises as `MoeGroup.dispatch_send`."""
        config = self.sizes.config
        tokens = len(ids) if count is None else count
        if not 0 <= tokens <= min(len(ids), config.tokens):
            raise aiote.UsageError(f"{tokens} tokens: expected 0 to {min(len(ids), config.tokens)}")
        if scales is not None and not config.scales:
            raise aiote.UsageError("scales: the MoeConfig has scales=0, so give none, or set scales there")
        given = self.read_arguments(tokens, x, ids, weights, scales)
        with self.step("dispatch_send", self.state, self.state.number):
            for rank, rounds in tuple(self.group.membership.departed.items()):
                if rounds[self.number] <= self.state.number:
                    self.group.lose(rank, "it has left the group")
            self.group.membership.require_whole()
            made = self.round_of(given)
            made.send()
        return made

    def read_arguments(self, tokens: int, x: Any, ids: Any, weights: Any, scales: Any) -> DispatchArguments:
        """Return the arrays that a round is given, as lines; weights are copied. Raises UsageError."""
        config, shape = self.sizes.config, (len(ids), self.sizes.config.top_k)
        beside = np.empty((tokens, 0), np.uint8)
        if config.scales:
            beside = lines("scales", scales, (len(ids), config.scales), config.scale_dtype)[:tokens]
        return DispatchArguments(
            tokens,
            lines("x", x, (len(ids), config.hidden), config.dtype)[:tokens],
            plain("topk_ids", ids, shape, IDS)[:tokens],
            plain("topk_weights", weights, shape, ("float32",))[:tokens].copy(),
            beside,
            x,
        )

    def round_of(self, given: DispatchArguments) -> Round:
        """Return a new round for these tokens."""
        return Round(self, given)

    def inputs(self, like: Any) -> tuple[Any, Any]:
        """Return the arrays that tokens and scales may be put into, as `MoeGroup.inputs`."""
        sizes, config = self.sizes, self.sizes.config
        like = np.empty(0) if like is None else like
        rows = self.memory.inputs
        x = elements(rows, 0, (config.tokens, config.hidden), config.dtype, like)
        if not config.scales:
            return x, None
        return x, elements(rows, sizes.scales_at, (config.tokens, config.scales), config.scale_dtype, like)
