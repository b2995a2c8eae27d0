"""A plan is the service's: without the service's own planning there is none, and where that decides otherwise, so does
the plan.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import aiote
from aiote.cli.plan_times import Calls, times_of
from aiote.kvcache import mapping
from aiote.kvcache.tensors import CacheSpec
from aiote.moe import round as moe_round
from aiote.plan import KV_SHAPES, MOE_SHAPES, MoeShape, kvcache, nics_of, weights
from aiote.plan.kvcache import Computation, KvScenario, ParallelLayout, plan_kvcache
from aiote.plan.moe import MoeScenario, plan_moe
from aiote.testing import EFA_400G
from aiote.weights import Layout as WeightLayout
from aiote.weights import Replicate, Shard, assignment, plan, plan_update

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

SMALL = KV_SHAPES["qwen3-235b"]._replace(layers=8)
PROMPT = KvScenario(
    shape=SMALL, nics=nics_of("efa-200g"), tokens=2048, prefill=ParallelLayout(2), decode=ParallelLayout(4),
    computation=Computation(1.0, 1.0),
)  # fmt: skip
GROUP = MoeScenario(
    shape=MoeShape("small", 16, 2, 1024, "a test"), nics=nics_of("connectx-7"), ranks=4, tokens=32, node=2
)


class Refused(Exception):
    """What stands for a planner that does not work."""


def refuse(*_arguments: Any, **_more: Any) -> Any:
    raise Refused


def update() -> Any:
    sources = WeightLayout.over(range(4), {"w": ((512, 256), "BF16", Shard(0)), "v": ((64, 256), "BF16", Replicate())})
    return sources, WeightLayout.over(range(2), {n: (t.shape, "BF16", Replicate()) for n, t in sources.tensors.items()})


# Without the service's planner.


@pytest.mark.parametrize(("where", "name"), [(kvcache, "assign"), (mapping.CacheMap, "__post_init__")])
def test_there_is_no_plan_of_a_cache_without_its_mapping(monkeypatch, where, name):
    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(Refused):
        plan_kvcache(PROMPT)


def test_no_transfer_of_a_cache_is_timed_without_the_services_mapping(monkeypatch):
    """The mapping of the plan's own bytes is let through; what the ranks compute of their caches is not."""
    monkeypatch.setattr("aiote.kvcache.producers.assign", refuse)
    with pytest.raises(BaseExceptionGroup) as raised:
        plan_kvcache(PROMPT)
    assert raised.group_contains(Refused)


def test_there_is_no_plan_of_a_round_without_its_planner(monkeypatch):
    monkeypatch.setattr(moe_round, "NativePlan", refuse)
    with pytest.raises(BaseExceptionGroup) as raised:
        plan_moe(GROUP)
    assert raised.group_contains(Refused)


@pytest.mark.parametrize(
    ("where", "name"),
    [(plan, "assign_cells"), (plan.UpdatePlan, "_wanting_ranks"), (plan.UpdatePlan, "bytes"), (weights, "in_turn")],
)
def test_there_is_no_plan_of_an_update_without_its_planner(monkeypatch, where, name):
    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(Refused):
        timed(plan_update(*update()))


def timed(made: plan.UpdatePlan) -> Any:
    made.senders  # noqa: B018
    return times_of(made, nics_of("efa-200g"), Calls.PUBLISHED)


# With another plan of the service's.


def test_another_mapping_of_a_cache_has_another_hottest_nic(monkeypatch):
    """All decode ranks take a replicated cache from the first prefill rank, not each from another."""
    shared = dataclasses.replace(PROMPT, shape=KV_SHAPES["deepseek-v3"]._replace(layers=4))
    usual = plan_kvcache(shared)
    real = mapping.assign
    monkeypatch.setattr(kvcache, "assign", lambda sources, target, _turn=0: first_of(real, sources, target))
    monkeypatch.setattr(
        "aiote.kvcache.producers.assign", lambda sources, target, _turn=0: first_of(real, sources, target)
    )
    skewed = plan_kvcache(shared)
    assert sum(skewed.sent.values()) == sum(usual.sent.values())
    assert usual.sent[0] == usual.sent[1]
    assert skewed.sent == {0: sum(usual.sent.values()), 1: 0}
    assert skewed.hottest[1] == pytest.approx(2 * usual.hottest[1], rel=0.01)
    assert skewed.layer_ms > 1.2 * usual.layer_ms


def first_of(real: Any, sources: Any, target: Any) -> Any:
    """Return the parts of a cache of which the first source has all."""
    nothing = CacheSpec(target.name, target.memories, (), target.ranks)
    return [*real(sources[:1], target, 0), *[nothing] * (len(sources) - 1)]


def test_a_rounds_private_rows_change_what_it_takes():
    """Of `private=1` all other rows wait for the routes of all ranks."""
    usual, waiting = (plan_moe(dataclasses.replace(GROUP, private=private)) for private in (None, 1))
    assert [sum(row) for row in usual.sent] == pytest.approx([sum(row) for row in waiting.sent], rel=0.01)
    assert waiting.dispatch.mean > usual.dispatch.mean + 5
    assert waiting.combine.mean == pytest.approx(usual.combine.mean, rel=0.02)


def test_an_order_in_which_all_ranks_begin_with_the_same_one_makes_a_round_longer(monkeypatch):
    """A rank begins with the next higher rank. Here all begin with rank 0, so it receives from all at once."""
    group = dataclasses.replace(GROUP, node=1, ranks=8, tokens=128)
    usual = plan_moe(group)
    monkeypatch.setattr(moe_round, "sorted", lambda several, key: sorted(several), raising=False)
    together = plan_moe(group)
    assert [sum(row) for row in together.sent] == [sum(row) for row in usual.sent]
    assert together.dispatch.slowest > usual.dispatch.slowest + 0.2


def test_another_share_of_an_update_takes_another_time(monkeypatch):
    """All of what every rank has is sent by the first, instead of by all of them alike."""
    sources = WeightLayout.over(range(4), {"w": ((4096, 1024), "BF16", Replicate())})
    layouts = sources, WeightLayout.over(range(2), {"w": ((4096, 1024), "BF16", Replicate())})
    usual = plan_update(*layouts)
    monkeypatch.setattr(
        assignment, "shares", lambda classes: {ranks: {ranks[0]: size} for ranks, size in classes.items()}
    )
    skewed = plan_update(*layouts)
    found = [
        weights.simulate(weights.jobs_of(each), EFA_400G, weights.Costs(0, 0, 0, 0, 0, 0)) for each in (usual, skewed)
    ]
    assert skewed.traffic.sent[0] == sum(usual.traffic.sent.values())
    assert found[1].total > 1.8 * found[0].total


# What a plan says is what the service does.


@pytest.mark.parametrize("layer_ms", [0.0, 0.05, 0.5, 5.0])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_layers_that_are_not_simulated_take_what_they_would_take(monkeypatch, tokens, layer_ms):
    """Whether the NICs or the computation is the limit. 0 ms: all layers are written at the same time."""
    prompt = dataclasses.replace(PROMPT, tokens=tokens, computation=Computation(layer_ms, layer_ms))
    part = plan_kvcache(prompt).first_token_ms
    monkeypatch.setattr(kvcache, "LAYERS", SMALL.layers)
    assert part == pytest.approx(plan_kvcache(prompt).first_token_ms, rel=0.02)


def test_the_bytes_by_rank_are_the_mappings_and_a_prompts():
    found = plan_kvcache(PROMPT)
    whole = SMALL.layers * SMALL.token_bytes * PROMPT.tokens
    assert sum(found.sent.values()) == sum(found.received.values()) == whole
    assert list(found.received.values()) == [whole // 4] * 4
    assert all(sum(row) == pytest.approx(found.received[rank], rel=1e-3) for rank, row in found.received_by_nic.items())
    assert found.pools.decode_prompt == whole // 4


def test_pages_that_do_not_fit_into_a_layers_time_fall_behind():
    """Each layer comes later than the one before, and all layers of the model count."""
    fast, slow = (
        plan_kvcache(dataclasses.replace(PROMPT, computation=Computation(millis, millis))) for millis in (100.0, 0.0)
    )
    assert fast.added_ms == pytest.approx(fast.layer_ms, rel=0.05)
    wire = slow.hottest[1] * 8e-6 / slow.scenario.nics.model.gbps
    assert slow.added_ms > 0.9 * wire
    assert slow.added_ms < 1.5 * wire + fast.added_ms


@pytest.mark.parametrize("group", [GROUP, dataclasses.replace(GROUP, node=1, ranks=8, tokens=128, zipf=1.0)])
def test_arithmetic_gives_what_engines_give(group):
    """Over one NIC there is no choice of NICs, so bytes are equal, and times nearly so."""
    engines, computed = plan_moe(group), plan_moe(dataclasses.replace(group, how="arithmetic"))
    assert (engines.simulated, computed.simulated) == (True, False)
    assert (computed.sent, computed.received) == (engines.sent, engines.received)
    for mine, theirs in ((computed.dispatch, engines.dispatch), (computed.combine, engines.combine)):
        assert mine == pytest.approx(theirs, rel=0.005)
    assert (computed.inbox, computed.outbox, computed.constant) == (engines.inbox, engines.outbox, engines.constant)


def test_over_several_nics_arithmetic_divides_pairs_of_ranks_evenly():
    group = dataclasses.replace(GROUP, nics=nics_of("efa-200g", 4), node=1, ranks=16, tokens=256, how="arithmetic")
    found = plan_moe(group)
    for row in (*found.sent, *found.received):
        assert max(row) < 1.35 * sum(row) / 4
    assert sum(map(sum, found.sent)) == sum(map(sum, found.received))


def test_a_large_group_is_computed_and_a_small_one_is_run():
    assert GROUP.simulated
    large = dataclasses.replace(GROUP, shape=MoeShape("wide", 128, 2, 1024, "a test"), ranks=128)
    assert not large.simulated
    assert dataclasses.replace(large, how="engines").simulated
    assert plan_moe(large).dispatch.mean > plan_moe(GROUP).dispatch.mean


def test_the_smaller_rows_of_a_simulated_round_are_in_proportion():
    assert GROUP.smaller() == (GROUP.config, 1, 1)
    _, row, answer = dataclasses.replace(GROUP, shape=MOE_SHAPES["deepseek-v3"], ranks=16).smaller()
    assert row == pytest.approx(4, rel=0.005)
    assert answer == pytest.approx(4, rel=0.005)


def test_ranks_of_a_node_are_not_sent_to():
    ids = GROUP.tokens_of(0)
    assert set(np.unique(ids)) <= {-1, *range(8, 16)}
    assert (dataclasses.replace(GROUP, node=1).tokens_of(0) >= 0).all()
    counts = np.bincount(
        dataclasses.replace(GROUP, node=1, zipf=2.0, tokens=512).tokens_of(0).reshape(-1), minlength=16
    )
    assert counts[0] > 5 * counts[8]


def test_skewed_experts_make_a_rank_hot():
    even, skewed = (plan_moe(dataclasses.replace(GROUP, node=1, zipf=zipf)) for zipf in (0.0, 1.5))
    assert skewed.hottest[2] > 1.3 * even.hottest[2]
    assert skewed.combine.slowest > even.combine.slowest


def test_a_rate_that_is_too_much_is_refused_with_what_can_be():
    with pytest.raises(aiote.UsageError, match="prefill group computes a prompt in 0.001 s: expected 0 to 1000 pro"):
        plan_kvcache(dataclasses.replace(PROMPT, rate=2000.0))
    idle = dataclasses.replace(PROMPT, computation=Computation(), rate=1e6)
    with pytest.raises(aiote.UsageError, match=r"NIC of .* expected from 0 to \d+ prompts a second, or more NICs"):
        plan_kvcache(idle)
