"""Prompts that vLLM's connector offers while they are computed: the scheduler's side, and a worker's with engines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

import aiote
from aiote.connectors.vllm import layers as layers_module
from aiote.connectors.vllm.prompts import BlockRow, Computing, LayerSteps, PromptTable
from aiote.connectors.vllm.requests import Offered, RequestTable, Steps, Wanted
from aiote.connectors.vllm.transfers import EndedRequests, RankTransfers
from aiote.kvcache import Cache, Consumer, PageRow, Reception, TransferRefused, moving, pushing
from aiote.kvcache.moving import TransferBatch
from support.engines.opening import PATIENCE_S, opened
from support.service.bridges import aside

ADDRESS = "aiote://127.0.0.1:38503/5bd42e82b292382d3c88b9c0ebc9ba67.18eac90921963061"
DECODE = {"do_remote_decode": True}
PAGES, LAYERS, IN_PAGE = 8, 2, 16
NAMES = {f"model.layers.{number}.attn": number for number in range(LAYERS)}
FIRST, SECOND = NAMES
NOTHING = LayerSteps([], [], [], {}, [])

# The scheduler's side.


def arrived(request: str = "r", tokens: int = 40, layered: bool = True, **params: Any) -> PromptTable:
    table = PromptTable({0: IN_PAGE}, layered=layered)
    table.record_arrived(request, {**DECODE, **params}, tokens)
    return table


def news(table: PromptTable) -> LayerSteps | None:
    return table.take_steps(renew=False)


def test_a_prompt_is_offered_from_its_first_step_on():
    table = arrived(transfer_id="ours")
    assert not table.holds("r")
    assert news(table) is None
    table.record_step("r", 16, [[7]])
    assert news(table) == NOTHING._replace(computing=[Computing("r", "ours", 40, 16, {0: BlockRow([7], 0)})])
    assert table.holds("r")
    assert table.is_computing("r")
    # The block after the prompt's last is no part of it, and what is decoded is not offered.
    table.record_step("r", 41, [[7, 3, 9, 4]])
    assert news(table) == NOTHING._replace(computing=[Computing("r", "ours", 40, 40, {0: BlockRow([7, 3, 9], 0)})])
    assert not table.is_computing("r")
    table.record_step("r", 42, [[7, 3, 9, 4]])
    assert news(table) is None
    assert table.record_finished("r", well=True) == ("ours", 40)
    assert news(table) == NOTHING._replace(ended=["r"])
    assert not table.holds("r")


def test_a_preempted_prompt_is_computed_again_in_other_blocks():
    table = arrived()
    table.record_step("r", 40, [[7, 3, 9]])
    news(table)
    table.record_preempted("r")
    table.record_preempted("stranger")
    assert table.is_computing("r")
    table.record_step("r", 32, [[1, 2]])
    again = Computing("r", "r", 40, 32, {0: BlockRow([1, 2], 0)})
    assert news(table) == NOTHING._replace(computing=[again], suspended=["r"])


@pytest.mark.parametrize("begun", [False, True], ids=["queued", "begun"])
@pytest.mark.parametrize("name", ["", "ours"], ids=["unnamed", "named"])
def test_what_is_aborted_is_withdrawn_if_somebody_may_ask_for_it(begun, name):
    table = arrived(**({"transfer_id": name} if name else {}))
    if begun:
        table.record_step("r", 16, [[7]])
        news(table)
    assert table.record_finished("r", well=False) == ("", 0)
    gone = {name or "r": "r" if begun else ""} if begun or name else {}
    assert news(table) == (NOTHING._replace(withdrawn=gone) if gone else None)


def test_the_names_of_queued_prompts_are_told_as_long_as_they_are_queued():
    table = arrived(transfer_id="ours")
    table.record_arrived("unnamed", DECODE, 40)
    table.record_arrived("other", {"do_remote_decode": False, "transfer_id": "x"}, 40)
    table.record_arrived("lie", {**DECODE, "transfer_id": 3}, 40)
    assert table.has_names
    assert table.take_steps(renew=True) == NOTHING._replace(queued=["ours"])
    table.record_step("r", 16, [[7]])
    assert not table.has_names
    news(table)
    assert table.take_steps(renew=True) is None


def requests(layered: bool) -> RequestTable:
    table = RequestTable("engine", {0: IN_PAGE}, produces=True, settings={}, layered=layered)
    table.addresses = [ADDRESS]
    return table


@pytest.mark.parametrize("layered", [False, True], ids=["whole", "layers"])
def test_both_engines_may_be_told_at_once(layered):
    """A proxy names the prompt, and says to the decode engine no more than that and where the prompt is computed."""
    prefill, decode = requests(layered), requests(layered)
    asked, told = {**DECODE, "transfer_id": "ours"}, {"do_remote_prefill": True, "remote_request_id": "ours"}
    told["aiote"] = {"addresses": [ADDRESS]}
    prefill.prompts.record_arrived("r", asked, 40)
    assert decode.external(told, 40, 16) == 24
    decode.record_arrived("d", told, 0.0)
    decode.record_allocated("d", told, 40, [[5, 1, 2]], 24)
    assert decode.take_steps(0.0).wanted == [Wanted("d", "ours", [ADDRESS], 40, {0: BlockRow([1, 2], 1)})]
    prefill.prompts.record_step("r", 40, [[7, 3, 9]])
    params = prefill.record_finished("r", asked, 40, [[7, 3, 9]])
    assert params is not None
    assert (params["remote_request_id"], params["remote_num_tokens"]) == ("ours", 40)
    assert json.loads(json.dumps(params)) == params
    steps = prefill.take_steps(0.0)
    whole = [Offered("r", 40, {0: BlockRow([7, 3, 9], 0)}, "ours")]
    assert steps.offered == ([] if layered else whole)
    assert (steps.layers is not None and steps.layers.ended == ["r"]) == layered


# A worker's side.


def cache(name: str, value: int) -> tuple[Cache, np.ndarray]:
    made, array = Cache(name), np.full((LAYERS, PAGES, 2, 64), value, np.uint8)
    made.add(array, "layer page head item")
    return made, array


@contextmanager
def prefill(made: Cache) -> Iterator[RankTransfers]:
    one = RankTransfers(
        made,
        produces=True,
        consumes=False,
        lease=PATIENCE_S,
        layers=NAMES,
        block_tokens={0: IN_PAGE},
        settings={"provider": "local"},
    )
    try:
        yield one
    finally:
        aside(one.close)


class Pair:
    """A prefill rank, a decode rank that receives request "r" into pages 4, 1 and 6, and what each has in memory."""

    def __init__(self, worker: RankTransfers, here: np.ndarray, there: np.ndarray) -> None:
        self.worker, self.here, self.there = worker, here, there
        self.leave = anyio.Event()
        self.left = False
        self.engine: Any = None
        self.cancel: Callable[[], bool] = bool
        self.reception: Reception | None = None

    async def receive(self, consumer: Consumer, task_status: Any) -> str:
        rows = {0: PageRow([4, 1, 6])}
        try:
            return await self._receive(consumer, rows, task_status)
        finally:
            self.left = True

    async def _receive(self, consumer: Consumer, rows: dict[int, PageRow], task_status: Any) -> str:
        async with consumer.receive([self.worker.address], "r", tokens=40, rows=rows) as self.reception:
            task_status.started()
            await self.leave.wait()
            try:
                await self.reception.arrived()
            except TransferRefused as error:
                return str(error)
        return ""

    def computes(self, computed: int, pages: list[int]) -> None:
        steps = NOTHING._replace(computing=[Computing("r", "r", 40, computed, {0: BlockRow(pages, 0)})])
        self.tell(steps)

    def tell(self, steps: LayerSteps) -> None:
        self.worker.begin(Steps([], [], [], None, steps))


@contextmanager
def pair(portal: Any) -> Iterator[tuple[Pair, Callable[[], str], Callable[[int], None]]]:
    (left, here), (right, there) = cache("prefill", 0), cache("decode", 0)
    with (
        prefill(left) as worker,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Consumer(engine, right)) as consumer,
    ):
        made = Pair(worker, here, there)
        made.engine = engine
        future, _ = portal.start_task(made.receive, consumer)
        made.cancel = future.cancel

        def outcome() -> str:
            portal.call(made.leave.set)
            return future.result(PATIENCE_S)

        def arrived_layers(count: int) -> None:
            assert made.reception is not None
            portal.call(made.reception.arrived, count)

        try:
            yield made, outcome, arrived_layers
        finally:
            portal.call(made.leave.set)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def sent(worker: RankTransfers) -> EndedRequests:
    found: list[EndedRequests] = []
    until(lambda: bool((found.append(worker.take_ended()) or found[-1]).sent))
    return found[-1]


pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def test_a_layer_moves_before_the_next_is_computed(portal):
    with pair(portal) as (made, outcome, arrived_layers):
        made.computes(40, [5, 7, 2])
        made.here[0, [5, 7, 2]] = 3
        made.worker.saved(FIRST)
        arrived_layers(1)
        assert made.there[0, [4, 1, 6]].min() == 3
        assert not made.there[1].any()
        # A layer of which vLLM says nothing is offered at the end of the step.
        made.here[1, [5, 7, 2]] = 9
        made.worker.saved("model.layers.7.attn")
        made.worker.end()
        assert outcome() == ""
        assert made.there[1, [4, 1, 6]].min() == 9
        # All has moved, and the engine's request goes on: its blocks are free when it has ended, too.
        offers = made.worker._offers
        until(lambda: made.worker.take_ended() == EndedRequests(set(), set(), {}) and "r" in offers._over)
        made.tell(NOTHING._replace(ended=["r"]))
        assert made.worker.take_ended() == EndedRequests({"r"}, set(), {})


def test_a_block_moves_once_a_chunk_has_filled_it(portal):
    with pair(portal) as (made, outcome, _):
        made.here[:, 5] = 3
        made.computes(20, [5, 7])
        made.worker.saved(FIRST)
        made.worker.saved(SECOND)
        made.worker.end()
        until(lambda: made.there[:, 4].min() == 3)
        assert not made.there[:, [1, 6]].any()
        made.here[:, [7, 2]] = 9
        made.computes(40, [5, 7, 2])
        made.worker.end()
        assert outcome() == ""
        assert made.there[:, 4].min() == 3
        assert made.there[:, [1, 6]].min() == 9


def test_blocks_of_a_preempted_prompt_are_not_read_any_more(portal):
    """Others write into them at once. The prompt goes on in other blocks, and what has moved stays."""
    with pair(portal) as (made, outcome, arrived_layers):
        made.here[:, [5, 7, 2]] = 3
        made.computes(40, [5, 7, 2])
        made.worker.saved(FIRST)
        arrived_layers(1)
        made.worker.end()
        made.tell(NOTHING._replace(suspended=["r"]))
        made.here[:, [5, 7, 2]] = 0xEE
        moved = made.there[:, [4, 1, 6]].copy()
        assert moved[0].min() == moved[0].max() == 3
        assert set(np.unique(moved[1])) <= {0, 3}
        made.here[:, [0, 1, 3]] = 3
        made.computes(20, [0, 1])
        made.worker.end()
        made.computes(40, [0, 1, 3])
        made.worker.end()
        assert outcome() == ""
        assert made.there[:, [4, 1, 6]].min() == made.there[:, [4, 1, 6]].max() == 3


class StuckBatch(TransferBatch):
    """Writes that have no room after the first."""

    begun = 0

    @property
    def has_room(self) -> bool:
        return not self.begun and super().has_room

    async def room(self) -> None:
        await anyio.sleep_forever()

    def submit(self, *arguments: Any, **more: Any) -> aiote.Transfer:
        self.begun += 1
        return super().submit(*arguments, **more)


@pytest.mark.parametrize("how", ["preempted", "aborted"])
def test_blocks_are_free_although_a_reader_takes_no_more(portal, monkeypatch, how):
    """Between two layers: the first has moved, and the second finds no room."""
    monkeypatch.setattr(pushing, "TransferBatch", StuckBatch)
    monkeypatch.setattr(moving, "MOST_AT_ONCE", 3)  # pieces, as one layer has
    monkeypatch.setattr(layers_module, "SUSPEND_S", 0)
    with pair(portal) as (made, outcome, arrived_layers):
        made.here[:, [5, 7, 2]] = 3
        made.computes(40, [5, 7, 2])
        made.worker.end()
        arrived_layers(1)
        steps = {"preempted": NOTHING._replace(suspended=["r"]), "aborted": NOTHING._replace(withdrawn={"r": "r"})}
        made.tell(steps[how])
        if how == "aborted":
            assert sent(made.worker) == EndedRequests({"r"}, set(), {})
        made.here[:, [5, 7, 2]] = 0xEE
        assert ("taken back" in outcome()) == (how == "preempted")
        assert not made.there[1].any()
        made.tell(NOTHING._replace(ended=["r"]))
        if how == "preempted":
            assert sent(made.worker) == EndedRequests({"r"}, set(), {})
        assert made.worker.take_ended() == EndedRequests(set(), set(), {})


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_a_decode_rank_that_is_gone_between_two_layers_keeps_no_block(portal, how):
    """The prompt goes on, and its blocks are free once it has ended."""
    with pair(portal) as (made, outcome, arrived_layers):
        made.here[:, [5, 7, 2]] = 3
        made.computes(40, [5, 7, 2])
        made.worker.saved(FIRST)
        arrived_layers(1)
        if how == "lost":
            portal.call(made.engine.aclose)
            assert outcome()
        else:
            made.cancel()
            until(lambda: made.left)
        offers = made.worker._offers
        made.worker.saved(SECOND)
        made.worker.end()
        until(lambda: made.worker.take_ended() == EndedRequests(set(), set(), {}) and "r" in offers._over)
        made.computes(40, [5, 7, 2])
        made.worker.end()
        assert not made.there[1].any()
        made.tell(NOTHING._replace(ended=["r"]))
        assert made.worker.take_ended() == EndedRequests({"r"}, set(), {})


def test_a_name_that_another_prompt_has_is_refused_and_its_blocks_are_free(portal):
    with pair(portal) as (made, outcome, _):
        made.here[:] = 3
        made.computes(40, [5, 7, 2])
        again = Computing("other", "r", 40, 40, {0: BlockRow([0, 1, 3], 0)})
        made.tell(NOTHING._replace(computing=[again], queued=["later"]))
        made.tell(NOTHING._replace(ended=["other"], withdrawn={"later": ""}))
        assert made.worker.take_ended() == EndedRequests({"other"}, set(), {})
        made.worker.end()
        assert outcome() == ""
