"""The planner gives what was published of two updates: bytes of every rank, and counts of calls.

Qwen3-235B is a printed schedule (bytes in GB to six digits), Kimi-K2 a table of the calls of one trainer in a second.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from aiote.cli import published_models
from aiote.weights import UpdatePlan, plan_update
from machine import LONG


@functools.cache
def plan(model: str, gather: str, *args: int) -> UpdatePlan:
    return plan_update(*getattr(published_models, model)(*args).plan_of(), gather=gather)


@pytest.mark.parametrize("gather", ["always", "auto"])
def test_qwen3_235b_bytes_are_the_published_ones_to_all_digits(gather):
    sent, received, _ = plan("qwen3_235b", gather).traffic
    # The first stage of each row of nodes has the embedding, the last has ten layers and the head.
    by_node = [{round(sent[8 * node + i] / 1e9, 5) for i in range(8)} for node in range(16)]
    assert by_node == [{11.47611}, *[{8.98679}] * 6, {9.97833}] * 2
    assert {round(size / 1e9, 5) for size in received.values()} == {37.68760}


def test_qwen3_235b_gathers_dense_meshes_first_and_then_those_of_experts():
    dense, experts = plan("qwen3_235b", "always").groups
    assert {len(mesh) for mesh in dense} == {16}
    assert {len(mesh) for mesh in experts} == {2}
    assert (len(dense), len(experts)) == (8, 64)


def test_qwen3_235b_gathers_next_to_nothing_when_it_may_choose():
    # k and v have 32 rows a rank, so that four ranks have a block of 128; all else is whole in one rank.
    meshes = set(plan("qwen3_235b", "auto").meshes.values())
    assert {len(mesh) for mesh in meshes} == {4}
    assert max(plan("qwen3_235b", "auto").traffic.gathered.values()) < 0.001 * 5.24e9
    assert min(plan("qwen3_235b", "always").traffic.gathered.values()) > 5.24e9


@pytest.mark.parametrize(
    ("stage", "parameters", "outputs", "writes"),
    [(0, 487, 647, 1144), *((stage, 632, 840, 1344) for stage in (1, 7, 14))],
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
    assert {round(sent[rank] / 1e9, 1) for rank in range(16, 240)} == {13.3}
    assert {round(size / 1e9, 2) for size in received.values()} == {30.10}
    if not LONG:
        return
    wider = plan("kimi_k2", "always", 32).traffic.received
    assert {round(wider[rank] / 1e9, 1) for rank in range(128)} == {46.0}


def test_kimi_k2_direct_sends_the_same_bytes_and_gathers_few():
    sent, received, gathered = plan("kimi_k2", "auto").traffic
    assert received == plan("kimi_k2", "always").traffic.received
    assert max(sent.values()) <= 1.0001 * max(plan("kimi_k2", "always").traffic.sent.values())
    assert max(gathered.values()) < 10e6
    kinds = Counter(task.kind for task in plan("kimi_k2", "auto").tasks(16))
    assert kinds["gather"] < 0.02 * sum(kinds.values())


def test_every_target_rank_expects_a_commit_of_each_sender():
    senders = plan("kimi_k2", "auto").senders
    assert set(map(len, senders.values())) == {256}  # all have dense shards that all inference ranks want


def test_a_plan_is_the_same_each_time_it_is_made():
    model = published_models.qwen3_235b(3).plan_of()
    again = published_models.qwen3_235b(3).plan_of()
    assert plan_update(*model).digest == plan_update(*again).digest
    assert plan_update(*model).digest != plan_update(*model, gather="always").digest
