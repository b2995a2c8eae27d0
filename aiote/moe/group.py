"""A group of ranks: opened, broken, reset, and what its lanes share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from .. import service
from ..service.background import Bell, TaskScope, to_the_end
from .arrivals import Immediates
from .batch import Batch
from .config import MoeConfig, Sizes
from .device import Launcher, open_launcher
from .device_round import DeviceLane
from .joining import AGAIN_S, COMES_LATER, ELSEWHERE, Meeting, MoeService, service_of, within_reach
from .lane import Lane
from .memory import RankMemory
from .posting import Inbox, Posting, groups_alone
from .round import Round
from .states import GroupBrokenError, Membership
from .statistics import MoeStatistics
from .wire import MAX_GROUPS

__all__ = ["MoeGroup"]


class MoeGroup:
    """One rank of a group. Made by `open_group`; its rounds are collective: every rank makes the same ones."""

    def __init__(
        self,
        engine: aiote.Engine,
        members: Sequence[Any],
        rank: int,
        config: MoeConfig,
        group: int,
        debug: bool,
        device: int | Launcher | None = None,
    ) -> None:
        self.launcher = open_launcher(device)
        self.engine, self.config, self.rank, self.debug = engine, config, rank, debug
        self.members = [aiote.Address.parse(one) if isinstance(one, str) else one for one in members]
        if not 0 <= rank < len(members):
            raise aiote.UsageError(f"rank={rank!r}: expected from 0 to {len(members) - 1}, the last of the members")
        if self.members[rank].identity != engine.address.identity:
            raise aiote.UsageError(f"members[{rank}] is {self.members[rank]}, which is not this engine's address")
        if len({one.identity for one in self.members}) < len(self.members):
            raise aiote.UsageError("members: an engine is named twice; each rank has one of its own")
        if not 0 <= group < MAX_GROUPS:
            raise aiote.UsageError(f"group={group!r}: expected from 0 to {MAX_GROUPS - 1}")
        self.number, self.sizes = group, Sizes(config, len(members))
        self.membership = Membership(len(members), rank, masks=config.on_loss == "mask")
        self.memory = RankMemory(self.sizes, self.launcher)
        self.posting: Posting | None = None
        self._immediates: Immediates | None = None
        self.service: type[MoeService] = service_of(group)
        self.counted = MoeStatistics(
            expert_rows=np.zeros(self.sizes.held(rank), np.int64),
            rank_rows=np.zeros(self.sizes.ranks, np.int64),
            waited_for=np.zeros(self.sizes.ranks),
        )
        self._lanes = [(Lane if self.launcher is None else DeviceLane)(self, number) for number in range(config.lanes)]
        self._digest = hashlib.blake2b(config.digest + bytes([len(members) & 0xFF, len(members) >> 8])).digest()[:16]
        self._ready, self._leaving = 0, False
        self._entering: anyio.CancelScope | None = None
        self._changed = Bell()
        self._peers: dict[int, aiote.Peer] = {}
        self._tasks: TaskScope | None = None

    # Rounds.

    async def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, scales: Any = None, *, count: int | None = None, lane: int = 0
    ) -> Batch:
        """Send each token to the ranks of its experts, and return what this rank's experts got from all ranks.

        x (tokens, hidden), topk_ids (tokens, k) int32, int64 or uint32, topk_weights (tokens, k) float32, scales
        (tokens, scales); of which the first `count` are meant. Rows may have any stride. An id that is no expert is
        skipped; one that is named twice counts twice. All is copied before the first await. The batch is valid until
        `combine`. Cancelling breaks the group, on every rank. Raises UsageError, MoeOverflowError, PeerLostError for a
        rank that is lost, GroupBrokenError.
        """
        return await self.dispatch_send(x, topk_ids, topk_weights, scales, count=count, lane=lane).dispatch_recv()

    async def combine(self, batch: Batch, y: Any = None, *, out: Any = None, accumulate: bool = False) -> Any:
        """Return for each token the sum over k of its weight times what its experts returned, in `out` if given.

        `y` has the shape of `batch.y`, which is meant without it, and needs no copy. The sum is of float32 in the order
        of k and rounded once; ids that are skipped, dropped or of masked ranks add nothing. `accumulate` adds what is
        in `out`. Cancelling and errors are as of `dispatch`.
        """
        batch.round.combine_send(y)
        return await batch.round.combine_recv(out, accumulate=accumulate)

    def dispatch_send(
        self, x: Any, topk_ids: Any, topk_weights: Any, scales: Any = None, *, count: int | None = None, lane: int = 0
    ) -> Round:
        """Begin a round and return at once; `await round.dispatch_recv()` gives the batch. Else as `dispatch`."""
        if not 0 <= lane < len(self._lanes):
            raise aiote.UsageError(f"lane={lane!r}: expected from 0 to {len(self._lanes) - 1} (config.lanes)")
        return self._lanes[lane].begin(x, topk_ids, topk_weights, scales, count)

    def inputs(self, like: Any = None, lane: int = 0) -> tuple[Any, Any]:
        """Return arrays (tokens, hidden) and (tokens, scales), or None for no scales, that tokens may be put into.

        With placement "direct" they are registered, and tokens that lie there are sent without a copy; then they may be
        filled again once the round has ended. `like` is an array of the kind that is wanted, NumPy's by default.
        """
        return self._lanes[lane].inputs(like)

    # Members.

    @property
    def active(self) -> NDArray[np.bool_]:
        """Which ranks take part (ranks,)."""
        return np.array([self.membership.takes_part(rank) for rank in range(self.sizes.ranks)])

    @property
    def epoch(self) -> int:
        """How often the members were made anew; it is the same on all of them."""
        return self.membership.epoch

    def statistics(self) -> MoeStatistics:
        """Return what was counted since the group was opened."""
        return self.counted

    def mask(self, rank: int, reason: str = "it was masked") -> None:
        """Go on without a rank, of a group with on_loss="mask"; its connection is closed, so that it writes no more."""
        if self.config.on_loss != "mask":
            raise aiote.UsageError("mask: the group was opened with on_loss='raise', in which every rank takes part")
        if self.membership.mask(rank, reason):
            if rank in self._peers:
                self._peers[rank].disconnect(reason)
            self._wake()

    def abort(self, reason: str = "it was aborted") -> None:
        """Break the group, on every rank: for one that makes no more rounds, though others wait for it in one."""
        self.membership.break_by(GroupBrokenError(f"rank {self.rank}: {reason}"))
        # Also where it is broken already: by a reset that did not end the others were not told.
        self._broken(f"abort: {reason}")

    async def reset(self) -> None:
        """Begin a new epoch, in which no round is under way; every rank that takes part calls it.

        Returns when all are there. Rounds that were under way on any rank are lost, and nothing of them is written any
        more. Cancelled or failed it may be called again. Raises PeerError for a rank that cannot be reached.
        """
        self.abort("it resets the group")
        await self._renew(())

    async def replace(self, rank: int, address: aiote.Address | str) -> None:
        """Take another engine for a rank, and reset; every rank that takes part calls it, the new one `open_group`.

        It waits for the new one to open the group, however late that is; bound the wait by a scope. A rank that calls
        it between two rounds breaks no round that others have not ended yet. Else as `reset`.
        """
        if not 0 <= rank < self.sizes.ranks or rank == self.rank:
            raise aiote.UsageError(f"replace({rank!r}): expected another rank, from 0 to {self.sizes.ranks - 1}")
        self.members[rank] = aiote.Address.parse(address) if isinstance(address, str) else address
        old = self._peers.pop(rank, None)
        if old is not None:
            old.disconnect(f"rank {rank} was replaced")
        if self.membership.failure is not None or any(lane.state.phase != "idle" for lane in self._lanes):
            self.abort("it resets the group")
        await self._renew((rank,))

    # Failing.

    def fail(self, error: BaseException, step: str) -> None:
        """Break the group by what went wrong here, and tell the others."""
        broken = (
            error if isinstance(error, aiote.AioteError) else GroupBrokenError(f"{step} was interrupted: {error!r}")
        )
        if self.membership.break_by(broken):
            self._broken(f"{step}: {error!r}")

    def beside(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Run something beside the rounds, until the group is left."""
        if self._tasks is not None:
            self._tasks.start(body, *arguments)

    def _broken(self, tell: str) -> None:
        if self._entering is not None:
            self._entering.cancel()
        for lane in self._lanes:
            lane.cancel()
        self._wake()
        if self._tasks is not None:
            for rank in self.membership.active:
                self._tasks.start(self._tell, rank, self.membership.epoch, tell)

    async def _tell(self, rank: int, epoch: int, reason: str) -> None:
        with suppress(aiote.AioteError):
            await self._client(rank).broke(self.rank, epoch, reason[:200])

    def lose(self, rank: int, reason: str) -> None:
        """Take note that a rank does not take part any more."""
        address = str(self.members[rank])
        error = aiote.PeerLostError(address, f"rank {rank} of the group: {reason}", operation="moe")
        if rank not in self.membership.active or self.membership.failure is not None:
            return
        self.membership.lost(rank, error)
        if self.membership.failure is not None:
            self._broken(str(error))
        elif rank in self._peers:
            self._peers[rank].disconnect(reason)
        self._wake()

    def _wake(self) -> None:
        for lane in self._lanes:
            lane.wake()
        self._changed.ring()

    async def _watch(self, rank: int, peer: aiote.Peer) -> None:
        reason = await peer.wait_closed()
        if self._peers.get(rank) is not peer:
            return
        if rank not in self.membership.departed:
            self.lose(rank, reason)
            return
        # It takes part in no round that is still under way, if that is true.
        self.membership.gone[rank] = reason
        for lane in self._lanes:
            lane.check_gone(rank)

    # What peers call.

    async def meet(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        """Return the inbox for a member, once this rank is in that epoch; ELSEWHERE for one of a later group."""
        if self._is_over(rank, digest):
            return ELSEWHERE
        if digest != self._digest:
            raise aiote.UsageError(
                f"rank {rank} and rank {self.rank} have different configs, or members: {self.config}"
            )
        if not 0 <= rank < self.sizes.ranks or rank == self.rank:
            raise aiote.UsageError(f"rank {rank} of {self.sizes.ranks} asks rank {self.rank}")
        while not (self._ready >= epoch and self.membership.failure is None and self._is_member(rank, caller)):
            await self._changed.wait()
        assert self._immediates is not None
        self._immediates.allow(rank, caller)
        return Meeting(self._ready, self.memory.lend(rank, caller.address), self._immediates.first_of(rank))

    def _is_over(self, rank: int, digest: bytes) -> bool:
        """Whether this group is one that a rank has left, or may have left: it has opened another one then."""
        if self._leaving or rank in self.membership.departed:
            return True
        return digest != self._digest and (self.membership.failure is not None or not self.membership.takes_part(rank))

    def _is_member(self, rank: int, caller: aiote.Peer) -> bool:
        """Whether another rank is the caller: any engine that may connect can say that it is, or has been, one."""
        if not 0 <= rank < self.sizes.ranks or rank == self.rank:
            return False
        return self.members[rank].identity == caller.address.identity and self.membership.takes_part(rank)

    def told(self, rank: int, epoch: int, reason: str, caller: aiote.Peer) -> None:
        """Take note that another rank broke an epoch, if the caller is that rank."""
        if self._is_member(rank, caller) and self.membership.told(rank, epoch, reason):
            # Who said so may be gone before all have heard. A rank passes it on once, so that it ends.
            self._broken(f"rank {rank}: {reason}")

    async def left(self, rank: int, epoch: int, rounds: list[int], caller: aiote.Peer) -> None:
        """Take note that the caller, which is that rank, takes part in no round from these on."""
        if self._is_member(rank, caller) and (epoch, len(rounds)) == (self.membership.epoch, len(self._lanes)):
            self.membership.departed[rank] = rounds
            for lane in self._lanes:
                lane.check_departed()
            for lane in self._lanes:
                # Then it takes its lease back, which ends what is written to it, and to others in the same request.
                await lane.quiet()

    # Epochs.

    def _client(self, rank: int) -> MoeService:
        return service.client(self.engine, self.members[rank], self.service)

    async def _renew(self, back: Sequence[int]) -> None:
        try:
            for lane in self._lanes:
                lane.cancel()
            for lane in self._lanes:
                await to_the_end(lane.drain)
            await self._take_back()
            await self._enter(self.membership.epoch + 1, back, first=False)
        except BaseException as error:
            # Not all are in this epoch, and some may be making rounds in it; the next reset begins another.
            broken = GroupBrokenError(f"rank {self.rank} could not reset the group: {error!r}")
            if self.membership.break_by(broken):
                self._broken(str(broken))
            raise

    async def _take_back(self) -> None:
        # Who asks meanwhile waits for the next epoch: in this one nobody would answer his rows.
        self._ready = 0
        await self.memory.take_all_back()

    async def _enter(self, epoch: int, back: Sequence[int], *, first: bool) -> None:
        """Be in an epoch with all that take part, or in a later one: of somebody who is there, or after one that broke.

        Who told this rank that the epoch is broken makes another one, and waits for it there.
        """
        self.membership.reset(epoch, back)
        while True:
            epoch = self.membership.epoch
            self._open_counters()
            self._ready = epoch
            self._changed.ring()
            found = await self._meet_all(epoch, range(self.sizes.ranks) if first else back)
            latest = max([epoch + self.membership.heard, *(met.epoch for met in found.values())])
            if latest == epoch:
                self.membership.require_whole()
                break
            await self._take_back()
            self.membership.reset(latest)
        await self._reach(found)

    def _open_counters(self) -> None:
        """Open new counters on new immediates: what is still on its way in an earlier epoch counts nowhere."""
        for lane in self._lanes:
            lane.close()
        if self._immediates is not None:
            self._immediates.close()
        separate = self.sizes.ranks if self.config.on_loss == "mask" else 0
        self._immediates = Immediates(self.engine, len(self._lanes), separate)
        for lane in self._lanes:
            lane.open(self._immediates.firsts)

    async def _reach(self, found: dict[int, Meeting]) -> None:
        inboxes, firsts = {}, {}
        for rank in self.membership.active:
            if rank in found:
                try:
                    firsts[rank] = found[rank].first(len(self._lanes))
                    inboxes[rank] = self._inbox(rank, found[rank].inbox)
                except aiote.UsageError as error:
                    if self.config.on_loss == "raise":
                        raise
                    self.lose(rank, str(error))
                    continue
                # So that all together load the NICs of each alike.
                self._peers[rank].rotate_rails(self.rank + rank)
        connected = {rank: self._peers[rank] for rank in inboxes}  # One that may be masked may be lost already.
        peers = None if self.config.on_loss == "mask" else await self.engine.peer_group(connected.values())
        alone = {} if self.launcher is None else await groups_alone(self.engine, connected, self.lose)
        self.posting = Posting(self.engine, self.memory.outbox, inboxes, firsts, peers, self.lose, alone)

    def _inbox(self, rank: int, descriptors: Sequence[bytes]) -> Inbox:
        parts, owner = self.memory.map.parts(self.rank), self._peers[rank]
        try:
            if len(descriptors) != len(parts):
                raise aiote.UsageError(f"{len(descriptors)} descriptors for {len(parts)} parts")
            regions = [
                self.engine.attach(one, owner=owner, access="write", nbytes=part.stop - part.start)
                for one, part in zip(descriptors, parts, strict=True)
            ]
        except aiote.UsageError as error:
            raise aiote.UsageError(f"rank {rank} lends no inbox of its own: {error}") from None
        return Inbox(parts, regions)

    async def _meet_all(self, epoch: int, late: Container[int]) -> dict[int, Meeting]:
        """Ask all that take part at once, and until the group breaks; those in `late` may come later than this rank."""
        found: dict[int, Meeting] = {}
        self._found = found
        failed: list[Exception] = []
        refused: dict[int, aiote.UsageError] = {}
        asked = len(self.membership.active)

        async def one(rank: int) -> None:
            try:
                met = await self._meet(rank, epoch, first=rank in late)
            except aiote.UsageError as error:
                refused[rank] = error
                # One that refuses this rank is masked; where all do, it is this rank that is wrong.
                if self.config.on_loss == "raise" or len(refused) == asked:
                    failed.append(error)
                    tasks.cancel_scope.cancel()
                else:
                    self.lose(rank, str(error))
            except Exception as error:
                failed.append(error)
                tasks.cancel_scope.cancel()
            else:
                found.update({} if met is None else {rank: met})

        try:
            async with anyio.create_task_group() as tasks:
                self._entering = tasks.cancel_scope
                if self.membership.failure is None:
                    for rank in self.membership.active:
                        tasks.start_soon(one, rank)
        finally:
            self._entering = None
        if failed:
            raise failed[0]
        return found

    async def _meet(self, rank: int, epoch: int, *, first: bool) -> Meeting | None:
        """Ask a rank for its inbox; None for one that is lost and masked."""
        pause, most = AGAIN_S
        while True:
            try:
                await self._connect(rank)
                met = await self._client(rank).meet(self.rank, epoch, self._digest)
                if met != ELSEWHERE:
                    return within_reach(met, epoch, first=first)
            except service.NotServedError as error:
                # It has not come so far; or, later, it has gone.
                if not first:
                    self.lose(rank, str(error))
            except (aiote.PeerError, service.CallError) as error:
                if first and isinstance(error, COMES_LATER):
                    pass
                elif self.config.on_loss == "raise":
                    raise
                else:
                    self.lose(rank, str(error))
            if rank not in self.membership.active:
                return None
            await anyio.sleep(pause)
            pause = min(2 * pause, most)

    async def _connect(self, rank: int) -> None:
        peer = await self.engine.connect(self.members[rank])
        if self._peers.get(rank) is not peer:
            self._peers[rank] = peer
            assert self._tasks is not None
            self._tasks.start(self._watch, rank, peer)

    async def open(self, tasks: TaskScope, open_timeout: float | None) -> None:
        """Meet the other ranks for the first time, within so many seconds."""
        self._tasks = tasks
        self._found = {}
        limit = self.engine.config.connect_timeout if open_timeout is None else open_timeout
        with anyio.move_on_after(limit) as scope:
            await self._enter(1, (), first=True)
        if scope.cancelled_caught:
            came = sorted({self.rank, *self._found})
            late = [rank for rank in self.membership.active if rank not in self._found]
            why = f"ranks {late} of the group have not opened it within {limit} s (open_timeout); ranks {came} have"
            raise aiote.ConnectTimeoutError(str(self.members[(late or came)[0]]), why, operation="moe")

    async def leave(self) -> None:
        """Tell the others that this rank takes part in no more rounds, and wait until nobody uses its memory."""
        self._tasks = None
        self._leaving = True
        orderly = self.membership.failure is None and all(lane.state.phase == "idle" for lane in self._lanes)
        with anyio.move_on_after(self.engine.config.drain_timeout):
            async with anyio.create_task_group() as group:
                for rank in self.membership.active:
                    # Who has left before may be in the next group of this number by now.
                    if rank in self._peers and rank not in self.membership.departed:
                        group.start_soon(self._part, rank, orderly)

    async def _part(self, rank: int, orderly: bool) -> None:
        """Tell a rank that this one has left: between two rounds, or in the middle of one, which breaks the group."""
        if not orderly:
            await self._tell(rank, self.membership.epoch, f"rank {self.rank} has left the group")
            return
        with suppress(aiote.AioteError):
            await self._client(rank).left(self.rank, self.membership.epoch, [lane.state.number for lane in self._lanes])

    async def close(self) -> None:
        """Let go of everything. Called again after a cancellation it goes on.

        Raises GroupBrokenError, once all is done, where a GPU does not end what uses this rank's memory.
        """
        late: list[GroupBrokenError] = []
        for lane in self._lanes:
            lane.cancel()
            try:
                await lane.drain()
            except GroupBrokenError as error:
                late.append(error)
            lane.close()
        if self._immediates is not None:
            self._immediates.close()
        if not self.engine.closed:
            await self.memory.take_all_back()
        await self.memory.close()
        if late:
            raise late[0]
