"""The planner gives what was published of two updates: bytes of every rank, and counts of calls.

Qwen3-235B is a printed schedule (bytes in GB to six digits), Kimi-K2 a table of the calls of one trainer in a second.
Without LONG one of the stages between the first and the last stands for all; what the others bring is added.
"""

from __future__ import annotations

from collections import Counter

import pytest

from aiote.cli import published_models
from aiote.weights import plan_update
from support.machine import LONG
from support.weights.published_plans import STAGES, left_out, plan


@pytest.mark.parametrize("gather", ["always", "auto"])
def test_qwen3_235b_bytes_are_the_published_ones_to_all_digits(gather):
    sent, received, _ = plan("qwen3_235b", gather).traffic
    # The first stage of each row of nodes has the embedding, the last has ten layers and the head.
    between = 6 - left_out("qwen3_235b")
    nodes = [node for node in range(16) if node % 8 < between + 2]
    by_node = [{round(sent[8 * node + i] / 1e9, 5) for i in range(8)} for node in nodes]
    assert by_node == [{11.47611}, *[{8.98679}] * between, {9.97833}] * 2
    # Each target rank gets its 32nd of what the 16 ranks of a stage send.
    others = left_out("qwen3_235b") * sum(sent[rank] for node in (1, 9) for rank in range(8 * node, 8 * node + 8)) / 32
    assert {round((size + others) / 1e9, 5) for size in received.values()} == {37.68760}


def test_qwen3_235b_gathers_dense_meshes_first_and_then_those_of_experts():
    dense, experts = plan("qwen3_235b", "always").groups
    assert {len(mesh) for mesh in dense} == {16}
    assert {len(mesh) for mesh in experts} == {2}
    stages = STAGES["qwen3_235b"] - left_out("qwen3_235b")
    assert (len(dense), len(experts)) == (stages, 8 * stages)


def test_qwen3_235b_gathers_next_to_nothing_when_it_may_choose():
    # k and v have 32 rows a rank, so that four ranks have a block of 128; all else is whole in one rank.
    meshes = set(plan("qwen3_235b", "auto").meshes.values())
    assert {len(mesh) for mesh in meshes} == {4}
    assert max(plan("qwen3_235b", "auto").traffic.gathered.values()) < 0.001 * 5.24e9
    assert min(plan("qwen3_235b", "always").traffic.gathered.values()) > 5.24e9


@pytest.mark.parametrize(
    ("stage", "parameters", "outputs", "writes"),
    [(0, 487, 647, 1144), *((stage, 632, 840, 1344) for stage in ((1, 7, 14) if LONG else (1,)))],
)
def test_kimi_k2_trainers_make_the_published_number_of_calls(stage, parameters, outputs, writes):
    for rank in (16 * stage, 16 * stage + 15):
        tasks = list(plan("kimi_k2", "always").tasks(rank))
        assert len({read.copy.source for task in tasks for read in task.reads}) == parameters
        assert sum(1 + bool(task.scale) for task in tasks) == outputs
        assert sum(len(write.ranks) for task in tasks for write in task.writes) == writes


def test_kimi_k2_ranks_send_and_receive_the_published_bytes():
    sent, received, _ = plan("kimi_k2", "always").traffic
    assert {round(sent[rank] / 1e9, 1) for rank in range(16)} == {32.7}
    between = range(16, 240 - 16 * left_out("kimi_k2"))
    assert {round(sent[rank] / 1e9, 1) for rank in between} == {13.3}
    others = left_out("kimi_k2") * sum(sent[rank] for rank in range(16, 32)) / 128
    assert {round((size + others) / 1e9, 2) for size in received.values()} == {30.10}
    wider = plan("kimi_k2", "always", expert_ranks=32).traffic
    others = left_out("kimi_k2") * sum(wider.sent[rank] for rank in range(16, 32)) / 128
    assert {round((wider.received[rank] + others) / 1e9, 1) for rank in range(128)} == {46.0}


def test_kimi_k2_direct_sends_the_same_bytes_and_gathers_few():
    sent, received, gathered = plan("kimi_k2", "auto").traffic
    assert received == plan("kimi_k2", "always").traffic.received
    assert max(sent.values()) <= 1.0001 * max(plan("kimi_k2", "always").traffic.sent.values())
    assert max(gathered.values()) < 10e6
    kinds = Counter(task.kind for task in plan("kimi_k2", "auto").tasks(16))
    assert kinds["gather"] < 0.02 * sum(kinds.values())


def test_every_target_rank_expects_a_commit_of_each_sender():
    # All have dense shards that all inference ranks want.
    senders = plan("kimi_k2", "auto").senders
    assert set(map(len, senders.values())) == {256 - 16 * left_out("kimi_k2")}


def test_a_plan_is_the_same_each_time_it_is_made():
    model = published_models.qwen3_235b(3).plan_of()
    again = published_models.qwen3_235b(3).plan_of()
    assert plan_update(*model).digest == plan_update(*again).digest
    assert plan_update(*model).digest != plan_update(*model, gather="always").digest
