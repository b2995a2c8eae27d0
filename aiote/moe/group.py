"""One rank of a group: how it opens, breaks, resets and leaves, and the state that its lanes share.

`epochs` has how it meets the others, `lane` the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from ..aio import TaskScope, run_shielded
from .batch import Batch
from .config import MoeConfig, Sizes
from .device import Launcher, open_launcher
from .device_round import DeviceLane
from .epochs import Epochs
from .joining import NOWHERE, Meeting, MoeService, service_of
from .lane import Lane
from .leaving import handle_departure
from .memory import RankMemory
from .posting import Posting
from .round import Round
from .sharing import MappedInboxes
from .states import GroupBrokenError, Membership
from .statistics import MoeStatistics
from .wire import MAX_GROUPS

__all__ = ["MoeGroup"]


class MoeGroup:
    """One rank of a group, made by `open_group`. Rounds are collective: every rank takes part in each of them."""

    def __init__(
        self,
        engine: aiote.Engine,
        members: Sequence[Any],
        rank: int,
        config: MoeConfig,
        *,
        group: int = 0,
        debug: bool = False,
        device: int | Launcher | None = None,
    ) -> None:
        self.launcher = open_launcher(device)
        self.engine, self.config, self.rank, self.debug = engine, config, rank, debug
        self.members = [aiote.Address.parse(one) if isinstance(one, str) else one for one in members]
        if not 0 <= rank < len(members):
            raise aiote.UsageError(f"rank={rank!r}: expected 0 to {len(members) - 1}, an index into members")
        if self.members[rank].identity != engine.address.identity:
            raise aiote.UsageError(f"members[{rank}] is {self.members[rank]}: expected this engine's address")
        if len({one.identity for one in self.members}) < len(self.members):
            raise aiote.UsageError("members: an engine is named twice; each rank needs an engine of its own")
        if not 0 <= group < MAX_GROUPS:
            raise aiote.UsageError(f"group={group!r}: expected 0 to {MAX_GROUPS - 1}")
        self.number, self.sizes = group, Sizes(config, len(members))
        self.membership = Membership(len(members), rank, masks=config.on_loss == "mask")
        self.memory = RankMemory(self.sizes, self.launcher)
        self.mapped_inboxes = MappedInboxes(self.sizes, self.memory.map)
        self.posting: Posting | None = None
        self.service: type[MoeService] = service_of(group)
        self.counted = MoeStatistics(
            expert_rows=np.zeros(self.sizes.experts_of(rank), np.int64),
            rank_rows=np.zeros(self.sizes.ranks, np.int64),
            waited_for=np.zeros(self.sizes.ranks),
        )
        self._lanes = [(Lane if self.launcher is None else DeviceLane)(self, number) for number in range(config.lanes)]
        self._epochs = Epochs(self, self._lanes, self.service)
        self._tasks: TaskScope | None = None

    # Rounds.

    async def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, scales: Any = None, *, count: int | None = None, lane: int = 0
    ) -> Batch:
        """Send each token to the ranks of its experts, and return the rows of this rank's experts, from all ranks.

        x (tokens, hidden), topk_ids (tokens, k) int32, int64 or uint32, topk_weights (tokens, k) float32, scales
        (tokens, scales); with `count` only the first `count` tokens are sent. Rows may have any stride. An id that is
        no expert is skipped; an id that a token names twice counts twice. On a CPU, all arguments are copied before the
        first await. The batch is valid until `combine`. Cancelling breaks the group on every rank. Raises UsageError,
        MoeOverflowError, PeerLostError if a rank is lost, GroupBrokenError.
        """
        return await self.dispatch_send(x, topk_ids, topk_weights, scales, count=count, lane=lane).dispatch_recv()

    async def combine(self, batch: Batch, y: Any = None, *, out: Any = None, accumulate: bool = False) -> Any:
        """Return for each token the sum over k of its weights times its experts' results, in `out` if given.

        `y` has the shape of `batch.y`; by default it is `batch.y` itself, which needs no copy. The sum is computed in
        float32 in the order of k, and rounded once. Ids that were skipped or dropped, or that belong to masked ranks,
        add nothing. `accumulate` adds the previous content of `out`. Cancelling and errors are as for `dispatch`.
        """
        batch.round.combine_send(y)
        return await batch.round.combine_recv(out, accumulate=accumulate)

    def dispatch_send(
        self, x: Any, topk_ids: Any, topk_weights: Any, scales: Any = None, *, count: int | None = None, lane: int = 0
    ) -> Round:
        """Begin a round and return at once; `await round.dispatch_recv()` gives the batch. Otherwise as `dispatch`."""
        if not 0 <= lane < len(self._lanes):
            raise aiote.UsageError(f"lane={lane!r}: expected 0 to {len(self._lanes) - 1} (config.lanes)")
        return self._lanes[lane].begin(x, topk_ids, topk_weights, scales, count)

    def inputs(self, like: Any = None, lane: int = 0) -> tuple[Any, Any]:
        """Return arrays that tokens may be put into: (tokens, hidden) and (tokens, scales), or None without scales.

        With placement "direct" they are registered, and tokens in them are sent without a copy; the caller may fill
        them again once the round has ended. `like` is an array of the wanted kind, by default NumPy's.
        """
        return self._lanes[lane].inputs(like)

    # Members.

    @property
    def active(self) -> NDArray[np.bool_]:
        """Which ranks take part (ranks,), including this one."""
        return np.array([self.membership.takes_part(rank) for rank in range(self.sizes.ranks)])

    @property
    def others(self) -> list[aiote.Address]:
        """The addresses of the other ranks that take part."""
        return [self.members[rank] for rank in self.membership.active]

    @property
    def epoch(self) -> int:
        """The number of the epoch: 1 when the group opens, greater after each reset, the same on all members."""
        return self.membership.epoch

    def statistics(self) -> MoeStatistics:
        """Return the counters since the group was opened."""
        return self.counted

    def mask(self, rank: int, reason: str = "it was masked") -> None:
        """Go on without a rank; disconnect it, so that it writes no more. Raises UsageError with on_loss="raise"."""
        if self.config.on_loss != "mask":
            raise aiote.UsageError("mask: a group with on_loss='raise' cannot leave a rank out; use on_loss='mask'")
        if self.membership.mask(rank, reason):
            if rank in self._epochs.peers:
                self._epochs.peers[rank].disconnect(reason)
            self._wake()

    def abort(self, reason: str = "it was aborted") -> None:
        """Break the group on every rank. A rank that stops between two steps calls it, because others wait for it."""
        self.membership.break_by(GroupBrokenError(f"rank {self.rank}: {reason}"))
        # Tell the others even if the group is broken already: an unfinished reset may not have told them.
        self._stop_steps(f"abort: {reason}")

    async def reset(self) -> None:
        """Begin a new epoch without any round in progress. Every rank that takes part calls it.

        Returns when all of them have. Rounds in progress on any rank are lost; no more of their writes arrive. After a
        cancellation or a failure it may be called again. Raises PeerError; GroupBrokenError if a rank is always ahead.
        """
        self.abort("it resets the group")
        await self._renew(())

    async def replace(self, rank: int, address: aiote.Address | str) -> None:
        """Put another engine in a rank's place, and reset. Every other rank calls it, and the new one `open_group`.

        It waits until the new engine opens the group, without a limit; a cancel scope can bound the wait. A rank that
        calls it between two rounds breaks no round that others have not ended yet. Otherwise as `reset`.
        """
        if not 0 <= rank < self.sizes.ranks or rank == self.rank:
            raise aiote.UsageError(f"replace({rank!r}): expected another rank, from 0 to {self.sizes.ranks - 1}")
        self.members[rank] = aiote.Address.parse(address) if isinstance(address, str) else address
        old = self._epochs.peers.pop(rank, None)
        if old is not None:
            old.disconnect(f"rank {rank} was replaced")
        if self.membership.failure is not None or any(lane.state.phase != "idle" for lane in self._lanes):
            self.abort("it resets the group")
        await self._renew((rank,))

    # Failing.

    def fail(self, error: BaseException, step: str) -> None:
        """Break the group because of an error on this rank, and tell the others."""
        broken = (
            error if isinstance(error, aiote.AioteError) else GroupBrokenError(f"{step} was interrupted: {error!r}")
        )
        if self.membership.break_by(broken):
            self._stop_steps(f"{step}: {error!r}")

    def start_task(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Run a task beside the rounds, until the group is left."""
        if self._tasks is not None:
            self._tasks.start(body, *arguments)

    def _stop_steps(self, tell: str) -> None:
        self._epochs.stop()
        for lane in self._lanes:
            lane.cancel()
        self._wake()
        if self._tasks is not None:
            for rank in self.membership.active:
                self._tasks.start(self._tell_break, rank, self.membership.epoch, tell)

    async def _tell_break(self, rank: int, epoch: int, reason: str) -> None:
        with suppress(aiote.AioteError), anyio.move_on_after(self.engine.config.drain_timeout):
            await self._epochs.client(rank).broke(self.rank, epoch, reason[:200])

    def lose(self, rank: int, reason: str) -> None:
        """Record that a rank is lost: mask and disconnect it, or break the group."""
        address = str(self.members[rank])
        error = aiote.PeerLostError(address, f"rank {rank} of the group: {reason}", operation="moe")
        if rank not in self.membership.active or self.membership.failure is not None:
            return
        self.membership.record_loss(rank, error)
        if self.membership.failure is not None:
            self._stop_steps(str(error))
        elif rank in self._epochs.peers:
            self._epochs.peers[rank].disconnect(reason)
        self._wake()

    def _wake(self) -> None:
        for lane in self._lanes:
            lane.wake()
        self._epochs.wake()

    async def watch(self, rank: int, peer: aiote.Peer) -> None:
        """Lose a rank once its connection has ended; a task beside the rounds."""
        reason = await peer.wait_closed()
        if self._epochs.peers.get(rank) is not peer:
            return
        if rank not in self.membership.departed:
            self.lose(rank, reason)
            return
        # The rank has said that it takes no part in rounds still in progress; the lanes check that.
        self.membership.gone[rank] = reason
        for lane in self._lanes:
            lane.check_gone(rank)

    # Calls from peers.

    async def admit_rank(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        """Return the inbox for a member, once this rank is in that epoch; ELSEWHERE for a rank of a later group.

        Raises UsageError for another config or other members, and for a number that is no other rank.
        """
        return await self._epochs.admit_rank(rank, epoch, digest, caller)

    def is_member(self, rank: int, caller: aiote.Peer) -> bool:
        """Return whether the caller is that rank, by its identity: any engine that may connect can claim to be one."""
        other = 0 <= rank < self.sizes.ranks and rank != self.rank
        return other and self.members[rank].identity == caller.address.identity and self.membership.takes_part(rank)

    def record_break(self, rank: int, epoch: int, reason: str, caller: aiote.Peer) -> None:
        """Record that another rank broke an epoch, if the caller is that rank, and pass it on."""
        if self.is_member(rank, caller) and self.membership.record_break(rank, epoch, reason):
            # The rank that broke it may be gone before all have heard. Each rank passes the news on once, so it ends.
            self._stop_steps(f"rank {rank}: {reason}")

    async def record_departure(self, rank: int, epoch: int, rounds: list[int], caller: aiote.Peer) -> None:
        """Record that the caller, if it is that rank, takes no part in `rounds` (one for each lane) and later ones."""
        if self.is_member(rank, caller) and (epoch, len(rounds)) == (self.membership.epoch, len(self._lanes)):
            await handle_departure(self, self._lanes, self._epochs.client, rank, rounds)

    async def reached(self, rank: int, epoch: int, lane: int, caller: aiote.Peer) -> tuple[int, int]:
        """Return how far a lane is, as `MoeService.reached`; NOWHERE to any engine but that rank's."""
        known = self.is_member(rank, caller) and epoch == self.membership.epoch and lane < len(self._lanes)
        return await self._lanes[lane].posted() if known else NOWHERE

    # Epochs.

    async def _renew(self, back: Sequence[int]) -> None:
        try:
            for lane in self._lanes:
                lane.cancel()
            for lane in self._lanes:
                await run_shielded(lane.drain)
            await self._epochs.end()
            self.posting = await self._epochs.enter(self.membership.epoch + 1, back, first=False)
        except BaseException as error:
            # Not all ranks are in this epoch, and some may be in a round of it; the next reset begins another epoch.
            broken = GroupBrokenError(f"rank {self.rank} could not reset the group: {error!r}")
            if self.membership.break_by(broken):
                self._stop_steps(str(broken))
            raise

    async def open(self, tasks: TaskScope, open_timeout: float | None) -> None:
        """Meet the other ranks for the first time, within `open_timeout` seconds, or raise ConnectTimeoutError."""
        self._tasks = tasks
        limit = self.engine.config.connect_timeout if open_timeout is None else open_timeout
        with anyio.move_on_after(limit) as scope:
            self.posting = await self._epochs.enter(1, (), first=True)
        if scope.cancelled_caught:
            came = sorted({self.rank, *self._epochs.met})
            late = [rank for rank in self.membership.active if rank not in self._epochs.met]
            why = f"ranks {late} of the group have not opened it within {limit} s (open_timeout); ranks {came} have"
            raise aiote.ConnectTimeoutError(str(self.members[(late or came)[0]]), why, operation="moe")

    async def leave(self) -> None:
        """Tell the others that this rank takes part in no more rounds, and wait until their writes to it have ended.

        The wait lasts at most `drain_timeout`.
        """
        self._tasks = None
        self._epochs.leaving = True
        orderly = self.membership.failure is None and all(lane.state.phase == "idle" for lane in self._lanes)
        with anyio.move_on_after(self.engine.config.drain_timeout):
            async with anyio.create_task_group() as group:
                for rank in self.membership.active:
                    # A rank that left earlier may be in the next group of this number by now.
                    if rank in self._epochs.peers and rank not in self.membership.departed:
                        group.start_soon(self._tell_departure, rank, orderly)

    async def _tell_departure(self, rank: int, orderly: bool) -> None:
        """Tell a rank that this one has left: between two rounds (`orderly`), or inside one, which breaks the group."""
        if not orderly:
            await self._tell_break(rank, self.membership.epoch, f"rank {self.rank} has left the group")
            return
        with suppress(aiote.AioteError):
            await self._epochs.client(rank).left(
                self.rank, self.membership.epoch, [lane.state.number for lane in self._lanes]
            )

    async def close(self) -> None:
        """End transfers, counters, leases and registrations. After a cancellation, call it again to continue.

        At its end raises GroupBrokenError if a GPU did not end the kernels that use this rank's memory.
        """
        late: list[GroupBrokenError] = []
        for lane in self._lanes:
            lane.cancel()
            try:
                await lane.drain()
            except GroupBrokenError as error:
                late.append(error)
        self._epochs.close()
        if not self.engine.closed:
            await self.memory.take_all_back()
        await self.memory.close()
        if late:
            raise late[0]
