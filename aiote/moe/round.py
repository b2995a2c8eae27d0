"""One round of a rank, step by step.

The plan assigns rows to places (`plan`), the kernels move rows within this rank's memory, `posting` writes them to
other ranks, `arrivals` waits for theirs, and the lane checks the order of the steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiote

from . import kernels
from .arrays import Bytes, elements, lines, plain, same_memory
from .batch import Batch
from .native_plan import NativePlan
from .plan import Counts, RoundPlan
from .posting import OutboxWrite
from .round_parts import RoundParts
from .runs import expand_runs, merge_runs, unfold
from .states import MoeOverflowError, NotBegunError
from .wire import ANSWER, PAYLOAD, ROUTE, OtherRoundError, Route

__all__ = ["Round"]


class Round(RoundParts):
    """A round in progress, returned by `MoeGroup.dispatch_send`. The caller takes its steps in order, once each."""

    # Sending.

    def send(self) -> None:
        """Send the route to every rank, and with placement "packed" the rows that need no other rank's route."""
        memory, sizes, config, me = self._memory, self._sizes, self._config, self._me
        self._position = memory.position[: self._tokens]
        self._copy = memory.copy_position[: self._tokens]
        given = self._given
        shape = config.experts, sizes.local, sizes.ranks
        rows, copies = kernels.number_rows(given.ids, *shape, by_rank=False, out=self._position)
        if config.copies == "rank":
            kernels.number_rows(given.ids, *shape, by_rank=True, out=self._copy)
        self._experts, self._copies = rows.astype(np.int64), copies.astype(np.int64)
        sent = self._copies if config.copies == "rank" else sizes.for_ranks(self._experts)
        self._require_room()
        said = self._tokens, self._experts, self._copies, self._group.mapped_inboxes.rank_bits
        Route(self._membership.epoch, self.number, *said).write(memory.own_routes[self._parity])
        where = self._map
        slot = where.route_at(me, self._parity)
        base, here = self._base(), self._outbox()
        # Each rank begins with the next higher rank, so that not all write to the same rank at once.
        active = sorted(self._membership.active, key=lambda rank: (rank - me) % sizes.ranks)
        self._write(
            [OutboxWrite(r, base + slot, here + self._parity * where.route, where.route) for r in active], ROUTE
        )
        self._starts = np.cumsum(sent) - sent
        self._pack(sent)
        if not sizes.direct:
            counts = np.minimum(sent, sizes.private)
            self._write(
                [self._early_rows(r, int(self._starts[r]), int(counts[r])) for r in active if counts[r]], PAYLOAD
            )
        self._counted.sent_rows += int(sent.sum())

    def _require_room(self) -> None:
        if self._sizes.may_overflow(self._experts):
            raise NotBegunError(
                "topk_ids: the tokens name an expert so often that rows may overflow, which "
                "on_loss='mask' forbids; let a token name an expert once at most"
            )

    def _early_rows(self, rank: int, first: int, count: int) -> OutboxWrite:
        """Return the write of rows to this rank's part of an inbox; rows in a mapped inbox are only counted."""
        if rank in self._mapped_inboxes:
            return self._count_of(rank, count * self._sizes.row)
        return self._rows_to(rank, self._me * self._sizes.private, first, count)

    def _pack(self, sent: NDArray[np.int64]) -> None:
        """Pack tokens with scales and tails into the outbox; this rank's own rows go into place, if that is known.

        `sent` are the rows for each rank. Rows for a mapped inbox go straight there, but those beyond the private part.
        """
        memory, sizes, given = self._memory, self._sizes, self._given
        first, count = int(self._starts[self._me]), int(sent[self._me])
        tail = memory.tail[: self._tokens]
        top_k = self._config.top_k
        tail[:, :4].view(np.uint32)[:, 0] = np.arange(self._tokens)
        known = (given.ids >= 0) & (given.ids < self._config.experts)
        ids = tail[:, 4 : 4 + 4 * top_k].view(np.int32)
        ids[...] = -1
        np.copyto(ids, given.ids, where=known, casting="unsafe")  # unsigned types have no -1
        tail[:, 4 + 4 * top_k :].view(np.float32)[...] = given.weights
        x, scales = given.x, given.scales
        own = memory.sent[first : first + count]
        if sizes.direct:
            at = np.arange(self._tokens, dtype=np.int32)[:, None]
            if same_memory(x, memory.sent):
                x = x[:, :0]
            own, first, count = memory.sent, 0, 0
        else:
            at = self._copy if self._config.copies == "rank" else self._position
            if sizes.whole:
                line = self._me * sizes.private
                own = memory.received[line : line + count]
            for rank in self._membership.active if self._mapped_inboxes else ():
                at = self._pack_mapped(rank, min(int(sent[rank]), sizes.private), at, tail)
        stop, scales_at, tail_at = first + count, sizes.scales_at, sizes.token_at
        kernels.pack(
            memory.sent, own, first, stop, at, x, scales=scales, tail=tail, scales_at=scales_at, tail_at=tail_at
        )

    def _pack_mapped(self, rank: int, count: int, at: NDArray[np.int32], tail: Bytes) -> NDArray[np.int32]:
        """Pack the first rows for a rank into its inbox, if that is mapped; return `at` without them."""
        if rank not in self._mapped_inboxes or not count:
            return at
        sizes, given, there = self._sizes, self._given, self._mapped_inboxes[rank].received
        here = at - int(self._starts[rank])
        chosen = (here >= 0) & (here < count)
        line = 0 if sizes.has_own_slots else self._me * sizes.private
        lines = np.where(chosen, here + line, -1).astype(np.int32)
        x, scales, scales_at, tail_at = given.x, given.scales, sizes.scales_at, sizes.token_at
        kernels.pack(there, there, 0, 0, lines, x, scales=scales, tail=tail, scales_at=scales_at, tail_at=tail_at)
        return np.where(chosen, -1, at).astype(np.int32)

    # Receiving.

    async def dispatch_recv(self) -> Batch:
        """Wait for the rows of all ranks, and return them as a batch. Otherwise as `MoeGroup.dispatch`."""
        made: Batch = await self._lane.run("dispatch_recv", self._state, self.number, self._receive)
        return made

    async def _receive(self) -> Batch:
        routes = self._read(await self._wait("routes", ROUTE, dict.fromkeys(self._membership.active, 1)))
        plan = self._plan_arrived(routes)
        refused = plan.overflows and self._config.on_overflow == "raise"
        if not refused:
            self._post_rest(plan, list(routes))
        if self._sizes.direct and not refused:
            self._place_own(plan)
        rows_of = await self._wait("rows", PAYLOAD, {rank: plan.arrivals(rank) for rank in routes})
        if refused:
            await self._lane.wait_sent()
            raise MoeOverflowError(plan.demand, self._sizes.rows)
        self._plan = plan = await self._place_arrived(plan, routes, rows_of)
        return self._batch(plan)

    def _mapped_slots(self, plan: RoundPlan, came: list[int]) -> list[int]:
        """Return the ranks whose writes are in slots of shared memory, and not in the inbox."""
        return [rank for rank in came if rank in plan.mapping_ranks] if self._sizes.has_own_slots else []

    async def _place_arrived(self, plan: RoundPlan, routes: dict[int, Route], came: list[int]) -> RoundPlan:
        """Place the rows of the ranks that have come; return the plan of those whose rows match their routes."""
        slots = self._mapped_slots(plan, came)
        while True:
            if len(came) < len(routes):
                plan = self._plan_arrived({rank: routes[rank] for rank in came})
            self._arrived_ranks = came
            nbytes = 0 if self._sizes.direct else int(plan.sent[:, plan.me].sum()) * self._sizes.row
            faulty = await self._lane.offload(nbytes, partial(self._take_rows, plan, slots))
            if faulty is None:
                return plan
            self._refuse(faulty, "its rows are not for the experts that its route says")
            came, slots = [rank for rank in came if rank != faulty], []

    def _take_rows(self, plan: RoundPlan, slots: list[int]) -> int | None:
        """Do as `_place`, after the rows of `slots` were copied from shared memory to where rails write them."""
        for rank in slots:
            runs = np.array([[rank * self._sizes.private, 0, plan.private(rank, plan.me)]])
            kernels.copy_runs(self._memory.received, self._memory.slots[rank].received, runs, self._sizes.row)
        return self._place(plan)

    def _read(self, came: list[int]) -> dict[int, Route]:
        """Return the routes of the ranks that have come, and lose the ranks whose routes are impossible."""
        found = {}
        for rank in came:
            words, epoch = self._memory.routes[self._parity, rank], self._membership.epoch
            try:
                found[rank] = Route.read(words, self._sizes, epoch, self.number)
            except OtherRoundError as error:
                raise aiote.PeerError(str(self._group.members[rank]), f"rank {rank}: its route: {error}") from None
            except ValueError as error:
                self._refuse(rank, f"its route: {error}")
            if rank in found and found[rank].maps(self._me) and not self._group.memory.is_shared_with(rank):
                self._refuse(rank, "it claims to write to memory that was not shared with it")
                del found[rank]
        return found

    def _plan_arrived(self, routes: dict[int, Route]) -> RoundPlan:
        """Return the plan of this rank and the ranks that have come."""
        sizes, me = self._sizes, self._me
        experts = np.zeros((sizes.ranks, self._config.experts), np.int64)
        copies = np.zeros((sizes.ranks, sizes.ranks), np.int64)
        experts[me], copies[me] = self._experts, self._copies
        for rank, route in routes.items():
            experts[rank], copies[rank] = route.experts, route.copies
        plan = NativePlan(sizes, me, Counts(experts, copies))
        plan.mapping_ranks = frozenset(rank for rank, route in routes.items() if route.maps(me))
        return plan

    def _post_rest(self, plan: RoundPlan, came: list[int]) -> None:
        """Write the rows that needed every rank's route: all rows in place, or those beyond the private parts."""
        me, sizes, where = self._me, self._sizes, self._map
        if sizes.direct:
            tokens, counts = self._tokens_in_order(), []
            for rank in sorted(came, key=lambda rank: (rank - me) % sizes.ranks):
                runs = plan.runs(me, rank)
                there = expand_runs(runs[:, 0], runs[:, 2])
                here = tokens[int(self._starts[rank]) + expand_runs(runs[:, 1], runs[:, 2])]
                if rank in self._mapped_inboxes:
                    kernels.copy_rows(self._mapped_inboxes[rank].received, self._memory.sent, there, here, sizes.row)
                    counts += [self._count_of(rank, len(there) * sizes.row)] if len(there) else []
                else:
                    to, at = self._base() + where.rows_at, self._outbox() + where.sent_at
                    self._pages(rank, (to, there), (at, here), sizes.row, PAYLOAD)
            self._write(counts, PAYLOAD)
            return
        writes = []
        for rank in came if sizes.shared else ():
            runs = plan.beyond(me, rank)
            if len(runs):
                # Dropped rows lie between these rows. Move them together, behind the private part, which is in flight.
                first = int(self._starts[rank])
                for there, here, count in runs.tolist():
                    rows = self._memory.sent[first + here : first + here + count].copy()
                    self._memory.sent[first + sizes.private + there :][:count] = rows
                line = sizes.ranks * sizes.private + plan.shared_start(me, rank)
                writes.append(self._rows_to(rank, line, first + sizes.private, int(runs[:, 2].sum())))
        self._write(writes, PAYLOAD)

    def _tokens_in_order(self) -> NDArray[np.int64]:
        """Return the number of the token of each of this rank's rows, in the order of rows."""
        tokens = np.empty(int(self._experts.sum()), np.int64)
        token, slot = np.nonzero(self._position >= 0)
        tokens[self._position[token, slot]] = token
        return tokens

    def _place_own(self, plan: RoundPlan) -> None:
        """Copy this rank's tokens for its own experts to their places."""
        me, memory = self._me, self._memory
        runs = plan.runs(me, me)
        places = np.full(int(plan.sent[me, me]) + 1, -1, np.int32)
        places[expand_runs(runs[:, 1], runs[:, 2])] = expand_runs(runs[:, 0], runs[:, 2])
        here = self._position - int(self._starts[me])
        own = (here >= 0) & (here < len(places) - 1)
        at = places[np.where(own, here, -1)]
        self._spread_rows(memory.sent[: self._tokens], at)

    def _spread_rows(self, rows: Bytes, at: NDArray[np.int32]) -> None:
        """Copy each row to all places that `at` (rows, k) names."""
        placed, nothing = self._memory.placed, np.empty((len(rows), 0), np.uint8)
        kernels.pack(placed, placed, 0, 0, at, rows, scales=nothing, tail=nothing)

    def _place(self, plan: RoundPlan) -> int | None:
        """Copy rows from where they were received to their places; return a rank whose rows are not as it announced."""
        memory, sizes, me = self._memory, self._sizes, self._me
        if sizes.direct:
            return None
        if self._config.copies == "rank":
            return self._unfold(plan)
        runs = plan.runs(me, me) + np.array([0, self._starts[me], 0])
        self._kernels.copy_runs(memory.placed, memory.sent, runs, sizes.row)
        for rank in self._arrived_ranks:
            self._kernels.copy_runs(memory.placed, memory.received, plan.received_runs(rank), sizes.row)
        return None

    def _unfold(self, plan: RoundPlan) -> int | None:
        """Find the experts that each copy by rank is for, and, unless the layout is "rank", place a row for each.

        Returns a rank whose copies are not for the experts that its route names.
        """
        for source in sorted((plan.me, *self._arrived_ranks)):
            rows = self._copies_of(plan, source)
            fits = unfold(self._memory, plan, source, rows, self._sizes.row)
            if not fits and source != plan.me:
                return source
        return None

    def _copies_of(self, plan: RoundPlan, source: int) -> Bytes:
        """Return a source's copies for this rank, in the memory where they were received."""
        count = int(plan.sent[source, plan.me])
        if source == plan.me and not self._own_received:
            return self._memory.sent[int(self._starts[source]) :][:count]
        return self._memory.received[source * self._sizes.private :][:count]

    def _batch(self, plan: RoundPlan) -> Batch:
        group = self._group
        dropped = None
        if plan.overflows:
            dropped = plan.dropped_rows(self._position.astype(np.int64))
            self._counted.dropped_rows += int(dropped.sum())
        self._dropped = dropped
        self._counted.expert_rows += plan.expert_rows()
        self._counted.rank_rows += plan.kept[:, plan.me].sum(1)
        return Batch(self, plan, self._sizes, self._memory, like=self._given.like, dropped=dropped, active=group.active)

    # Answers.

    def combine_send(self, y: Any = None) -> None:
        """Send this rank's experts' results, and return at once. `y` may be used again; the batch is over.

        Raises UsageError for another shape or type of `y`, and if it is not the turn of this step.
        """
        config, sizes = self._config, self._sizes
        shape = {"grouped": (sizes.experts_of(self._me), sizes.rows), "contiguous": (sizes.placed,)}
        lead = shape.get(config.layout, (sizes.ranks, config.tokens))
        rows = self._memory.y if y is None else self._lines("y", y, (*lead, config.hidden), config.out_dtype)
        if y is not None:
            self._y_like = y
        with self._lane.step("combine_send", self._state, self.number):
            self._answer_sources(rows)

    def _answer_sources(self, y: Bytes) -> None:
        """Answer every source: one write for each row, or packed answers in as few writes as possible."""
        plan, memory, sizes = self._known_plan(), self._memory, self._sizes
        me, where = self._me, self._map
        at = self._outbox() + (where.y_at if sizes.whole else where.packed_at)
        writes: list[OutboxWrite] = []
        line = 0
        self._own = self._own_places(y)
        for source in sorted((me, *self._arrived_ranks), key=lambda rank: (rank - me) % sizes.ranks):
            if source == me and self._own is not None:
                continue
            to = self._base() + where.answers_at + int(plan.answer[source, me]) * sizes.y_row
            if source in self._mapped_inboxes:
                writes += self._answer_mapped(y, source)
                continue
            if sizes.direct:
                self._answer_rows(y, source, to)
                continue
            line = source * self._config.tokens if sizes.whole else line
            target = memory.answers[int(plan.answer[me, me]) :] if source == me else memory.packed[line:]
            pieces = self._whole_answers(y, source) if sizes.whole else self._pack_answers(y, source, target)
            for there, count in pieces if source != me else ():
                writes.append(
                    OutboxWrite(source, to + there * sizes.y_row, at + line * sizes.y_row, count * sizes.y_row),
                )
                line += count
        if self._group.debug:
            # Overwrite before the answers leave, because the sources send their next rows once they have them.
            self._poison()
        self._write(writes, ANSWER)

    def _answer_mapped(self, y: Bytes, source: int) -> list[OutboxWrite]:
        """Put each result for a source to its place in its mapped inbox; return the write that counts them."""
        plan, sizes, me = self._known_plan(), self._sizes, self._me
        to, first = self._mapped_inboxes[source].answers, 0 if sizes.has_own_slots else int(plan.answer[source, me])
        if self._config.reduce == "expert" and not sizes.whole:
            pieces = self._pack_answers(y, source, to[first : first + int(plan.sent[source, me])])
            return [self._count_of(source, count * sizes.y_bytes) for _, count in pieces]
        runs = plan.runs(source, me)[:, [1, 0, 2]]
        if sizes.whole:
            runs = np.array([[0, source * self._config.tokens, int(plan.sent[source, me])]])
        there, here = expand_runs(first + runs[:, 0], runs[:, 2]), expand_runs(runs[:, 1], runs[:, 2])
        kernels.copy_rows(to, y, there, here, sizes.y_bytes)
        return [self._count_of(source, len(there) * sizes.y_bytes)] if len(there) else []

    def _poison(self) -> None:
        self._memory.placed[...] = 0xFF

    def _in_place(self, y: Any) -> bool:
        """Return whether the experts' results are already in the memory that answers are written from."""
        return same_memory(y, self._memory.y)

    def _own_places(self, y: Bytes) -> NDArray[np.int32] | None:
        """Return the places in `batch.y` of the answers to this rank's own rows, if the sum can read them there."""
        plan, me = self._known_plan(), self._me
        if self._config.reduce == "expert" or not self._in_place(y):
            return None
        runs = plan.runs(me, me)
        places = np.full(int(plan.returned[me, me]), -1, np.int32)
        places[expand_runs(runs[:, 1], runs[:, 2])] = expand_runs(runs[:, 0], runs[:, 2])
        return places

    def _whole_answers(self, y: Bytes, source: int) -> list[tuple[int, int]]:
        """Put the answers to a source where they are written from; return the piece as `_pack_answers` does."""
        plan, memory, me = self._known_plan(), self._memory, self._me
        line, count = source * self._config.tokens, int(plan.sent[source, me])
        if source == me or not self._in_place(y):
            target = memory.answers[int(plan.answer[me, me]) :] if source == me else memory.written[line:]
            self._kernels.copy_runs(target, y, np.array([[0, line, count]]), self._sizes.y_bytes)
        return [(0, count)] if count else []

    def _pack_answers(self, y: Bytes, source: int, to: Bytes) -> list[tuple[int, int]]:
        """Pack the answers to a source; return the pieces to write: (row among the source's answers, rows).

        Answers are in the source's order. Each gap that dropped rows leave in that order ends a piece. The packed
        answers have no gaps, except those of this rank itself, which stay in its own order.
        """
        plan, sizes = self._known_plan(), self._sizes
        if self._config.reduce == "expert":
            rows, count = self._copies_of(plan, source), int(plan.sent[source, self._me])
            weights = rows[:, sizes.weights_at : sizes.weights_at + 4 * self._config.top_k].copy().view(np.float32)
            places = self._memory.copies[source, :count]
            out = to[:count, : sizes.y_bytes]
            self._kernels.combine(out, y, places, weights, self._config.out_dtype, accumulate=False)
            return [(0, count)] if count else []
        own = source == self._me
        runs = plan.runs(source, self._me)
        packed = np.cumsum(runs[:, 2]) - runs[:, 2]
        turned = np.stack((runs[:, 1] if own else packed, runs[:, 0], runs[:, 2]), 1)
        self._kernels.copy_runs(to, y, turned, sizes.y_bytes)
        return merge_runs(runs)

    def _answer_rows(self, y: Bytes, source: int, to: int) -> None:
        """Answer a source with one write for each row, from where the results are."""
        plan, me, nbytes, where = self._known_plan(), self._me, self._sizes.y_bytes, self._map
        runs = plan.runs(source, me)
        if source == me:
            self._kernels.copy_runs(self._memory.answers[int(plan.answer[me, me]) :], y, runs[:, [1, 0, 2]], nbytes)
            return
        if not self._in_place(y):
            self._kernels.copy_runs(self._memory.written, y, runs[:, [0, 0, 2]], nbytes)
        there, here = expand_runs(runs[:, 1], runs[:, 2]), expand_runs(runs[:, 0], runs[:, 2])
        self._pages(source, (to, there), (self._outbox() + where.y_at, here), self._sizes.y_row, ANSWER)

    def reweigh(self, topk_weights: Any, skipped: NDArray[np.bool_] | None = None) -> None:
        """Replace the dispatched weights (tokens, k), before `combine_recv`; `skipped` (tokens, k) add nothing.

        This is for programs that know the weights only then. Raises UsageError with reduce="expert", where the experts'
        ranks have applied the weights already, and for another shape or type.
        """
        if self._config.reduce == "expert":
            raise aiote.UsageError(
                "reweigh: with reduce='expert' the experts' ranks have applied the weights already; use reduce='source'"
            )
        self._given.weights = self._weights(topk_weights)
        if skipped is not None:
            self._dropped = skipped if self._dropped is None else self._dropped | skipped

    def _weights(self, topk_weights: Any) -> Any:
        return plain("topk_weights", topk_weights, (self._tokens, self._config.top_k), ("float32",)).copy()

    async def combine_recv(self, out: Any = None, *, accumulate: bool = False) -> Any:
        """Wait for the answers, and return the sums; the round is over. Otherwise as `MoeGroup.combine`."""
        if out is None and accumulate:
            raise aiote.UsageError("combine: accumulate=True needs `out`, the array to add to")
        config = self._config
        if out is None:
            out = elements(self._sums(), 0, (self._tokens, config.hidden), config.out_dtype, self._y_like)
        found = self._lines("out", out, (None, config.hidden), config.out_dtype)
        if len(found) < self._tokens:
            raise aiote.UsageError(f"out: expected {self._tokens} rows, one for each token, got {len(found)}")

        async def body() -> None:
            await self._sum(found[: self._tokens], accumulate)

        await self._lane.run("combine_recv", self._state, self.number, body)
        return out

    def _lines(self, what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Any:
        """Return a caller's array as lines. Raises UsageError."""
        return lines(what, array, shape, dtype)

    def _sums(self) -> Any:
        """Return new lines for the sums; they replace an `out` that the caller did not give."""
        return np.zeros((self._tokens, self._sizes.y_bytes), np.uint8)

    async def _sum(self, out: Bytes, accumulate: bool) -> None:
        plan, config = self._known_plan(), self._config
        needs = {rank: plan.replies(rank) for rank in self._arrived_ranks}
        came = await self._wait("answers", ANSWER, needs)
        await self._lane.wait_sent()
        for number in (self.number - 1, self.number):
            # Look at the last round's counts again: its late write and the route may have come over different NICs, and
            # the engine may have polled the NIC of the route first.
            came = self._lane.without_surplus(came, number)
        by_copy = config.reduce == "expert"
        places = plan.answers_at(self._copy if by_copy else self._position)
        if self._dropped is not None and not by_copy:
            places[self._dropped] = -1
        for rank in set(range(self._sizes.ranks)) - {*came, self._me}:
            first = plan.answer[self._me, rank]
            gone = (places >= first) & (places < first + plan.returned[self._me, rank])
            places[gone] = -1
        if by_copy:
            for slot in range(1, places.shape[1]):
                places[(places[:, :slot] == places[:, slot, None]).any(1), slot] = -1
        if self._own is not None:
            here = places - int(plan.answer[self._me, self._me])
            own = (here >= 0) & (here < len(self._own)) & (places >= 0)
            # The kernel takes -2 - n for row n of `beside`.
            places[own] = -2 - self._own[here[own]]
        weights = None if by_copy else self._given.weights
        beside = {} if self._own is None else {"own": self._memory.y}

        def add_up() -> None:
            for rank in self._mapped_slots(plan, came):
                runs = np.array([[int(plan.answer[plan.me, rank]), 0, int(plan.returned[plan.me, rank])]])
                kernels.copy_runs(self._memory.answers, self._memory.slots[rank].answers, runs, self._sizes.y_row)
            self._kernels.combine(out, self._memory.answers, places, weights, config.out_dtype, accumulate, **beside)

        await self._lane.offload(int((places != -1).sum()) * self._sizes.y_row, add_up)
        answered = np.zeros(self._sizes.ranks, np.bool_)
        answered[[*came, self._me]] = True
        self.answered = answered
        self._counted.rounds += 1
