"""The plan against plain loops over tokens: every row has one place, which sender and receiver compute alike."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.moe import MoeConfig
from aiote.moe.config import Sizes
from aiote.moe.memory import LaneMap
from aiote.moe.plan import Counts, RoundPlan
from support import machine
from support.moe.twins import numbered

# Four properties: ten thousand shapes in all at full length.
many = settings(max_examples=2500) if machine.LONG else settings()


class World(NamedTuple):
    """A config, and what the tokens of each rank ask for."""

    sizes: Sizes
    ids: list[Any]


@st.composite
def worlds(draw: Any) -> World:
    """Draw ranks that are unequal in every way: some without tokens, some without experts."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    top_k, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    layout = draw(st.sampled_from(["grouped", "contiguous"]))
    align = draw(st.sampled_from([1, 4])) if layout == "contiguous" else 1
    placement = draw(st.sampled_from(["packed", "direct"]))
    config = MoeConfig(
        experts=experts,
        top_k=top_k,
        hidden=draw(st.integers(1, 3)),
        tokens=tokens,
        layout=layout,
        align=align,
        rows=draw(st.one_of(st.none(), st.integers(1, 8).map(lambda n: n * align))),
        on_overflow=draw(st.sampled_from(["drop", "raise"])),
        placement=placement,
        private=draw(st.one_of(st.none(), st.integers(1, 6))) if placement == "packed" else None,
    )
    expert = draw(st.sampled_from([st.integers(-1, experts), st.integers(-1, 0), st.just(experts - 1)]))
    rows = st.lists(st.lists(expert, min_size=top_k, max_size=top_k), max_size=tokens)
    return World(Sizes(config, ranks), [np.array(draw(rows), np.int64).reshape(-1, top_k) for _ in range(ranks)])


def planned(world: World) -> tuple[list[RoundPlan], list[Any]]:
    """Return the plan as each rank has it, and the positions of each rank's rows."""
    sizes, config = world.sizes, world.sizes.config
    experts = np.zeros((sizes.ranks, config.experts), np.int64)
    copies = np.zeros((sizes.ranks, sizes.ranks), np.int64)
    positions = []
    for rank, ids in enumerate(world.ids):
        at = np.empty(ids.shape, np.int32)
        experts[rank], copies[rank] = numbered(ids, config.experts, sizes.local, sizes.ranks, False, at)
        positions.append(at)
    return [RoundPlan(sizes, rank, Counts(experts, copies)) for rank in range(sizes.ranks)], positions


def placed(world: World) -> tuple[dict[tuple[int, int, int], tuple[int, int] | None], dict[int, list[int]]]:
    """Return where each (source, token, k) lies, rank and row, None if dropped; and the counts of ranks' experts."""
    sizes, config = world.sizes, world.sizes.config
    places: dict[tuple[int, int, int], tuple[int, int] | None] = {}
    counts: dict[int, list[int]] = {rank: [] for rank in range(sizes.ranks)}
    for rank in range(sizes.ranks):
        start = 0
        for number in range(sizes.first_expert_of(rank), sizes.first_expert_of(rank) + sizes.experts_of(rank)):
            wanted = [
                (source, token, slot)
                for source, ids in enumerate(world.ids)
                for token, slot in np.argwhere(ids == number).tolist()
            ]
            if config.layout == "grouped":
                start, room = (number - sizes.first_expert_of(rank)) * sizes.rows, sizes.rows
            else:
                room = max(0, sizes.rows - start)
            for index, one in enumerate(wanted):
                places[one] = (rank, start + index) if index < room else None
            counts[rank].append(min(room, len(wanted)))
            start += -(-len(wanted) // config.align) * config.align
    return places, counts


@many
@given(worlds())
def test_every_row_has_its_place(world):
    plans, positions = planned(world)
    places, counts = placed(world)
    sizes = world.sizes
    for me, (plan, at) in enumerate(zip(plans, positions, strict=True)):
        assert plan.expert_rows().tolist() == counts[me]
        found = {}
        for target in range(sizes.ranks):
            for there, here, count in plan.runs(me, target).tolist():
                first = int(plan.start[me, target])
                found |= {first + here + i: (target, there + i) for i in range(count)}
        dropped = plan.dropped_rows(at.astype(np.int64))
        for token, slot in np.argwhere(at >= 0).tolist():
            place = places[me, token, slot]
            assert found.get(int(at[token, slot])) == place
            assert dropped[token, slot] == (place is None)
        assert plan.overflows == any(place is None for place in places.values())
        assert all(row < sizes.placed for place in found.values() for row in [place[1]])
        if sizes.config.rows is not None and sizes.rows >= plan.demand:
            assert not plan.overflows


@many
@given(worlds())
def test_senders_write_what_receivers_wait_for_and_nothing_else(world):
    """Each row of the region is written at most once, within it, and lies there where the receiver looks."""
    plans, _ = planned(world)
    sizes = world.sizes
    refused = plans[0].overflows and sizes.config.on_overflow == "raise"
    for me, plan in enumerate(plans):
        region: dict[int, tuple[int, int]] = {}
        for source in set(range(sizes.ranks)) - {me}:
            sender = plans[source]
            if sizes.direct:
                wanted = 0 if refused else int(sender.runs(source, me)[:, 2].sum())
                assert plan.arrivals(source) == wanted
                continue
            early = sender.private(source, me)
            lines = {source * sizes.private + i: (source, i) for i in range(early)}
            beyond = sender.beyond(source, me) if not refused else np.zeros((0, 3), np.int64)
            first = sizes.ranks * sizes.private + sender.shared_start(source, me)
            lines |= {first + to + i: (source, at + i) for to, at, count in beyond.tolist() for i in range(count)}
            assert not lines.keys() & region.keys()
            region |= lines
            assert plan.arrivals(source) == (early > 0) + (len(beyond) > 0)
        assert all(line < LaneMap(sizes).inbox_rows for line in region)
        if not sizes.direct and not refused:
            for source in set(range(sizes.ranks)) - {me}:
                wanted = {(to + i, at + i) for to, at, n in plan.runs(source, me).tolist() for i in range(n)}
                got = {(to + i, region[at + i]) for to, at, n in plan.received_runs(source).tolist() for i in range(n)}
                assert {(to, (source, at)) for to, at in wanted} == got


@st.composite
def masking(draw: Any) -> World:
    """Draw ranks that may be masked: no token names an expert twice."""
    ranks, experts, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, experts))
    more = draw(
        st.sampled_from([{}, {"layout": "contiguous"}, {"copies": "rank"}, {"copies": "rank", "reduce": "expert"}])
    )
    config = MoeConfig(
        experts=experts,
        top_k=top_k,
        hidden=3,
        tokens=tokens,
        lanes=draw(st.integers(1, 3)),
        on_loss="mask",
        placement="packed",
        **more,
    )
    token = st.permutations(range(experts)).map(lambda ids: ids[:top_k])
    ids = [np.array(draw(st.lists(token, max_size=tokens)), np.int64).reshape(-1, top_k) for _ in range(ranks)]
    for one in ids:
        one[draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one))), 0] = -1
    return World(Sizes(config, ranks), ids)


@many
@given(masking())
def test_where_ranks_are_masked_each_may_write_to_its_own_slots_alone(world):
    """No byte of an inbox is in two ranks' parts, and all that a rank writes is in a part of its own."""
    sizes = world.sizes
    lane, rows, lanes = LaneMap(sizes), sizes.private * sizes.row, sizes.config.lanes
    answers = sizes.answers_of_rank * sizes.y_row
    owners = np.full(lane.inbox * lanes, -1)
    for rank in range(sizes.ranks):
        parts = lane.parts(rank)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(parts))
        for base in range(0, lane.inbox * lanes, lane.inbox):
            places = [(lane.route_at(rank, parity), lane.route) for parity in (0, 1)]
            places += [(lane.rows_at + rank * rows, rows), (lane.answers_at + rank * answers, answers)]
            for at, nbytes in places:
                assert any(part.start <= base + at and base + at + nbytes <= part.stop for part in parts)
        for part in parts:
            assert (owners[part] == -1).all()
            owners[part] = rank


@many
@given(masking())
def test_where_ranks_are_masked_answers_lie_in_the_slots_of_who_answers(world):
    plans, positions = planned(world)
    sizes, by_copy = world.sizes, world.sizes.config.reduce == "expert"
    for me, plan in enumerate(plans):
        at = np.arange(int(plan.sent[me].sum()), dtype=np.int32) if by_copy else positions[me]
        found = plan.answers_at(at)
        assert ((found < 0) == (at < 0)).all()
        in_order = found.ravel()[np.argsort(at.ravel())][int((at < 0).sum()) :].tolist()
        expected: list[int] = []
        for target, answerer in enumerate(plans):
            count, first = int(plan.returned[me, target]), int(answerer.answer[me, target])
            assert count <= sizes.answers_of_rank
            expected += range(first, first + count)
        assert in_order == expected
        assert len(set(expected)) == len(expected)
        assert max(expected, default=-1) < sizes.answer_lines


@many
@given(worlds())
def test_answers_lie_where_their_source_looks(world):
    plans, positions = planned(world)
    sizes = world.sizes
    for me, plan in enumerate(plans):
        for target in range(sizes.ranks):
            answerer = plans[target]
            assert int(answerer.answer[me, target]) == int(plan.start[me, target])
            pieces = 0
            end = -1
            for _, here, count in answerer.runs(me, target).tolist():
                pieces, end = pieces + (here != end), here + count
            rows = int(answerer.runs(me, target)[:, 2].sum())
            assert plan.replies(target) == (rows if sizes.direct else pieces)
        assert int(positions[me].max(initial=-1)) < sizes.answers


@many
@given(worlds())
def test_offsets_surround_every_expert(world):
    for plan in planned(world)[0]:
        offsets, rows = plan.offsets(), plan.expert_rows()
        assert len(offsets) == len(rows) + 1
        assert (offsets[:-1] + rows <= offsets[1:]).all()
        assert (offsets <= max(world.sizes.placed, 0)).all()
        assert (offsets % world.sizes.config.align == 0).all()
