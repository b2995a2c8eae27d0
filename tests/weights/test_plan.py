"""Who sends what, in which order, and who gathers with whom."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.weights import (
    Layout,
    Mesh,
    Recipe,
    Replicate,
    Shard,
    Tensor,
    cat,
    packed,
    plan_update,
    quantized,
    slots,
    source,
    stack,
)
from aiote.weights.balance import place, shares
from support.weights.plans import carry_out, hold
from support.weights.random_layouts import bound

classes = st.dictionaries(
    st.sets(st.integers(0, 6), min_size=1).map(lambda holders: tuple(sorted(holders))),
    st.integers(0, 10_000),
    min_size=1,
)


@given(classes)
def test_shares_reach_the_bound_and_leave_nothing_over(weights):
    found = shares(weights)
    assert {holders: sum(share.values()) for holders, share in found.items()} == weights
    assert all(set(share) == set(holders) and min(share.values()) >= 0 for holders, share in found.items())
    load = Counter[int]()
    for share in found.values():
        load.update(share)
    masks = {sum(1 << rank for rank in holders): weight for holders, weight in weights.items()}
    assert max(load.values()) <= bound(masks) + 1


@given(classes)
def test_no_share_could_be_moved_to_a_rank_with_less(weights):
    found = shares(weights)
    load = Counter[int]()
    for share in found.values():
        load.update(share)
    ranks = len(load)
    for share in found.values():
        for rank, other in itertools.permutations(share, 2):
            # Each level is rounded up, once for each of at most as many levels as ranks.
            assert not share[rank] or load[rank] - load[other] <= ranks + 1


def test_shares_are_level_below_the_busiest_rank_too():
    assert shares({(0,): 100, (0, 1): 30, (1, 2): 30, (3, 4): 10}) == {
        (0,): {0: 100},
        (0, 1): {0: 0, 1: 30},
        (1, 2): {1: 0, 2: 30},
        (3, 4): {3: 5, 4: 5},
    }


@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1).map(lambda holders: tuple(sorted(holders))), max_size=6),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.integers(1, 8),
)
def test_pieces_of_one_weight_are_placed_as_well_as_can_be(holders, before, weight):
    sent = Counter(dict(enumerate(before)))
    taken = place([(weight, ranks) for ranks in holders], sent)
    assert all(rank in ranks for rank, ranks in zip(taken, holders, strict=True))
    assert sent == Counter(dict(enumerate(before))) + Counter({r: weight * taken.count(r) for r in set(taken)})
    ways = (
        [load + weight * way.count(rank) for rank, load in enumerate(before)] for way in itertools.product(*holders)
    )
    assert max(sent.values()) <= min(map(max, ways))


def test_a_rank_makes_room_for_a_piece():
    sent = Counter({0: 2})
    # The first could go to 1 or 2 and goes to 1; the second then only fits there once the first has moved on.
    assert place([(2, (1, 2)), (2, (0, 1))], sent) == [2, 1]
    assert sent == {0: 2, 1: 2, 2: 2}


# --- plans ---

EVERYWHERE = Mesh.of(range(4))


def test_replicas_send_equal_shares_of_what_they_all_have():
    sources = Layout.over([[0, 1], [2, 3]], {"w": ((64, 8), "BF16", (Replicate(), Shard(0)))})
    targets = Layout.over(range(2), {"w": ((64, 8), "BF16", Replicate())})
    assert plan_update(sources, targets).traffic.sent == dict.fromkeys(range(4), 512)


def loads(rows: int, held_by: list[tuple[int, ...]]) -> dict[int, int]:
    """Return what each rank sends if there is a tensor of so many rows for each of some sets of holders."""
    tensors = {
        str(number): Tensor.over((rows,), "F32", Mesh.of(ranks), (Replicate(),)) for number, ranks in enumerate(held_by)
    }
    targets = Layout.over(range(1), {name: ((rows,), "F32", Replicate()) for name in tensors})
    return plan_update(Layout(tensors), targets).traffic.sent


@pytest.mark.parametrize("rows", [3, 5, 7, 13])
def test_rounding_does_not_add_up_over_many_sets_of_holders(rows):
    holders = [ranks for size in (2, 3) for ranks in itertools.combinations(range(6), size)]
    sent = loads(rows, holders)
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / 6


def test_a_tensor_that_cannot_be_divided_goes_to_the_rank_with_least():
    # A flow gives each rank four fifths of a tensor; whole, they must avoid each other.
    sent = loads(1, [(0, 4), (2, 4), (0, 1, 3), (2, 3)])
    assert sorted(sent.values()) == [0, 4, 4, 4, 4]


def test_a_stage_sends_only_what_it_has():
    tensors = {f"w{stage}": ((8, 4), "F32", (Shard(0),)) for stage in range(2)}
    sources = Layout.merge(
        Layout.over(range(2 * stage, 2 * stage + 2), {f"w{stage}": tensors[f"w{stage}"]}) for stage in range(2)
    )
    targets = Layout.over(range(2), tensors)
    plan = plan_update(sources, targets)
    assert {task.target for task in plan.tasks(0)} == {"w0"}
    assert {task.target for task in plan.tasks(3)} == {"w1"}
    assert plan.senders == {0: (0, 2), 1: (1, 3)}


def test_equal_shards_are_sent_directly_in_one_run_each():
    layout = Layout.over(range(4), {"w": ((64, 8), "BF16", Shard(0))})
    plan = plan_update(layout, layout)
    for rank in range(4):
        [task] = plan.tasks(rank)
        [(ranks, copy)] = task.writes
        assert (task.kind, task.reads, ranks) == ("direct", (), (rank,))
        assert (copy.shape, copy.source_offset, copy.target_offset, copy.run, copy.elements) == ((128,), 0, 0, 128, 128)


def test_a_transpose_is_one_strided_copy():
    sources = Layout.over(range(1), {"w": ((3, 4), "F32", Replicate())})
    targets = Layout.over(range(1), {"w": ((4, 3), "F32", Replicate())})
    [task] = plan_update(sources, targets, Recipe({"w": source("w").transpose()})).tasks(0)
    [(_, copy)] = task.writes
    assert (copy.shape, copy.source_strides, copy.target_strides, copy.run) == ((4, 3), (1, 4), (3, 1), 1)


def test_a_tensor_that_is_kept_transposed_is_moved_as_it_lies():
    transposed = Tensor.over((3, 4), "F32", Mesh.of(range(1)), (Replicate(),), (1, 0))
    sources = Layout.over(range(1), {"w": ((4, 3), "F32", Replicate())})
    recipe = Recipe({"w": source("w").transpose()})
    [task] = plan_update(sources, Layout({"w": transposed}), recipe).tasks(0)
    assert task.writes[0].copy.run == 12


def test_at_every_step_each_target_rank_has_one_sender():
    sources = Layout.over(range(4), {f"w{i}": ((64, 8), "BF16", Shard(0)) for i in range(8)})
    targets = Layout.over(range(4), {f"w{i}": ((64, 8), "BF16", Replicate()) for i in range(8)})
    plan = plan_update(sources, targets)
    steps = [[rank for task in plan.tasks(s) for write in task.writes for rank in write.ranks] for s in range(4)]
    assert all(sorted(step) == [0, 1, 2, 3] for step in zip(*steps, strict=True))


def test_experts_of_several_stages_do_not_go_to_one_rank_at_once():
    names = {stage: [f"{stage}.{e}" for e in range(8)] for stage in range(4)}
    shape = (8, 8)
    sources = Layout.merge(
        Layout.over([stage], dict.fromkeys(several, (shape, "BF16", (Replicate(),))))
        for stage, several in names.items()
    )
    targets = Layout.over(range(4), {f"w{stage}": ((8, *shape), "BF16", Shard(0)) for stage in names})
    plan = plan_update(sources, targets, Recipe({f"w{stage}": stack(*several) for stage, several in names.items()}))
    steps = [[rank for task in plan.tasks(s) for write in task.writes for rank in write.ranks] for s in range(4)]
    assert all(len(set(step)) == 4 for step in zip(*steps, strict=True))


def test_what_takes_longest_comes_first_on_every_rank():
    shapes = {f"w{i}": (4, 8) for i in range(50)} | {"embed": (4000, 8)} | {f"v{i}": (4, 8) for i in range(50)}
    sources = Layout.over(range(4), {name: (shape, "BF16", Shard(0)) for name, shape in shapes.items()})
    targets = Layout.over(range(2), {name: (shape, "BF16", Replicate()) for name, shape in shapes.items()})
    plan = plan_update(sources, targets)
    tasks = [[task.target for task in plan.tasks(rank)] for rank in range(4)]
    assert all(sorted(several) == sorted(shapes) for several in tasks)
    assert [several[:2] for several in tasks] == [["embed", name] for name in ("w0", "w25", "v0", "v25")]


def test_an_expert_with_several_slots_is_written_to_each():
    sources = Layout.over(range(2), {"w": ((4, 6), "F32", Shard(0))})
    targets = Layout.over(range(2), {"w": ((4, 6), "F32", slots(0, [[3, 0, 3], [1, 2]]))})
    plan = plan_update(sources, targets)
    value = np.arange(24.0).reshape(4, 6)
    memory, count = carry_out(plan, hold(sources, {"w": value}))
    assert np.array_equal(memory[0]["w"], value[[3, 0, 3]].ravel())
    assert {int(times) for held in count.values() for times in held["w"]} == {1}
    assert plan.traffic.received == {0: 72, 1: 48}


QKV = {"q": 512, "k": 128, "v": 128}


def fused(gather: str):
    sources = Layout.over(range(8), {name: ((rows, 256), "BF16", Shard(0)) for name, rows in QKV.items()})
    spread = packed(0, 2, (512, 4), (128, 1), (128, 1))
    blocks = packed(0, 2, (4, 4), (1, 1), (1, 1))
    targets = Layout.over(range(2), {"qkv": ((768, 256), "F8_E4M3", spread), "s": ((6, 2), "F32", blocks)})
    return plan_update(sources, targets, Recipe({"qkv": quantized(cat(*QKV), scale="s")}), gather=gather)


def test_only_ranks_that_share_a_block_gather_it():
    plan = fused("auto")
    # q has 64 rows a rank: two have a block. k and v have 16: all eight have the one block of each.
    assert plan.groups == (((0, 1), (2, 3), (4, 5), (6, 7)), (tuple(range(8)),))
    assert {task.kind for rank in range(8) for task in plan.tasks(rank)} == {"gather"}
    # Gathering comes in the order of the groups on every rank.
    for rank in range(8):
        order = [plan.meshes[number] for number in plan.order(rank)]
        assert order == sorted(order, key=len)


def test_always_gathering_gathers_whole_tensors_on_all_ranks_that_send():
    plan = fused("always")
    assert plan.groups == ((tuple(range(8)),),)
    for number, unit in enumerate(plan.units):
        assert (unit.start, unit.stop) == ((0, 0), (768, 256))
        assert len(plan.task(number).reads) == 24
    assert Counter(rank for unit in plan.units for rank in unit.ranks or ()) == {0: 1, 1: 1}


def test_a_rank_that_sends_nothing_has_no_tasks():
    sources = Layout.over(range(4), {"w": ((2, 4), "F32", Shard(0))})
    plan = plan_update(sources, Layout.over(range(1), {"w": ((2, 4), "F32", Replicate())}))
    assert list(plan.tasks(3)) == []
    assert plan.order(9) == []


def test_a_plan_without_tensors_is_empty():
    plan = plan_update(Layout({}), Layout({}))
    assert (plan.units, plan.senders, plan.groups, plan.traffic.sent) == ((), {}, (), {})


@pytest.mark.parametrize("gather", ["auto", "always"])
def test_the_digest_tells_plans_apart(gather):
    def made(rows: int = 8, ranks: int = 2, to: str = "BF16") -> bytes:
        sources = Layout.over(range(ranks), {"w": ((rows, 4), "BF16", Shard(0))})
        targets = Layout.over(range(2), {"w": ((rows, 4), to, Replicate())})
        return plan_update(sources, targets, Recipe({"w": source("w").cast()}), gather=gather).digest

    different = {made(), made(rows=9), made(ranks=3), made(to="F32")}
    assert len(different) == 4
    assert made() == made()


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 8))
def test_a_tensor_arrives_whole_from_any_number_of_ranks_to_any(rows, sources, targets):
    here = Layout.over(range(sources), {"w": ((rows, 3), "F32", Shard(0))})
    there = Layout.over(range(targets), {"w": ((rows, 3), "F32", Shard(0))})
    value = np.arange(3.0 * rows).reshape(rows, 3)
    memory, _ = carry_out(plan_update(here, there), hold(here, {"w": value}))
    assert np.array_equal(np.concatenate([memory[rank]["w"] for rank in there.ranks]), value.ravel())
