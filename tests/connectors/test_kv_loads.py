"""Requests that vLLM's connector computes before all their layers have arrived: both sides of it, with real engines."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

from aiote.connectors.vllm import loads as loads_module
from aiote.connectors.vllm.requests import BlockRow, RequestTable, Steps, Wanted
from aiote.connectors.vllm.transfers import EndedRequests, RankTransfers
from aiote.kvcache import Cache, PageRow, Producer
from support.engines.opening import LOST_SOON, PATIENCE_S, opened
from support.kv.caches import Side, built
from support.kv.faults import Child
from support.kv.producer_process import MODEL, TOKENS
from support.kv.producer_process import PAGES as CHILD_PAGES
from support.service.bridges import aside

PAGES, LAYERS, HERE, THERE = 8, 4, [5, 7, 2], [4, 1, 6]
NAMES = {f"model.layers.{number}.attn": number for number in range(LAYERS)}
NOTHING, NONE = Steps([], [], []), EndedRequests(set(), set(), {})
COMPUTED = NOTHING._replace(computed=["our r"])
PATTERN = 0xEE

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

# The scheduler's side.


def told(early: bool = True) -> RequestTable:
    """Make a table whose workers have reported a request as received."""
    table = RequestTable("engine", {0: 16}, produces=False, settings={}, early=early)
    params = {"do_remote_prefill": True, "remote_request_id": "r", "aiote": {"addresses": ["aiote://a"]}}
    table.record_arrived("d", params, 0.0)
    table.record_allocated("d", params, 40, [[5, 1, 2]], 40)
    table.take_steps(0.0)
    table.record_received("d")
    return table


def test_a_request_that_ends_before_its_layers_keeps_its_blocks():
    table = told()
    assert table.uncomputed == {"d"}
    assert table.record_left("d", has_output=False)
    assert table.record_finished("d", None, 0, [[5, 1, 2]]) is None
    assert (table.take_steps(0.0).cancelled, table.uncomputed) == (["d"], set())
    # What the workers report then is its end.
    table.record_received("d")
    assert not table.uncomputed
    assert not table.record_left("d", has_output=False)


def test_a_request_with_an_output_has_all_its_layers():
    table = told()
    table.record_computation([], ["d"])
    assert table.take_steps(0.0)[-2:] == ([], ["d"])
    assert table.uncomputed == {"d"}
    table.record_computation(["d"], [])
    assert table.take_steps(0.0)[-2:] == (["d"], [])
    assert not table.uncomputed
    assert not table.record_left("d", has_output=True)
    assert table.take_steps(0.0) == NOTHING


def test_whole_requests_are_received_once():
    table = told(early=False)
    assert not table.uncomputed
    assert not table.record_left("d", has_output=False)


def test_a_request_that_is_aborted_before_its_first_layer_is_no_early_one():
    table = RequestTable("engine", {0: 16}, produces=False, settings={}, early=True)
    params = {"do_remote_prefill": True, "remote_request_id": "r", "aiote": {"addresses": ["aiote://a"]}}
    table.record_allocated("d", params, 40, [[5, 1, 2]], 40)
    assert not table.record_left("d", has_output=False)
    assert table.record_finished("d", params, 0, [[5, 1, 2]]) is None
    assert table.take_steps(0.0).cancelled == ["d"]
    table.record_received("d")
    assert not table.uncomputed


# A worker's side.


@contextmanager
def decode(made: Cache, names: dict[str, int] = NAMES) -> Iterator[RankTransfers]:
    settings = {"provider": "local", **LOST_SOON}
    one = RankTransfers(made, produces=False, consumes=True, loads=names, settings=settings)
    try:
        yield one
    finally:
        aside(one.close)


class Pair:
    """A decode rank that engines step, and a producer whose layers the test computes one by one."""

    def __init__(self, portal: Any, worker: RankTransfers, producer: Producer, address: str) -> None:
        self.portal, self.worker, self.producer, self.address = portal, worker, producer, address
        self.here = np.full((LAYERS, PAGES, 2, 64), 3, np.uint8)
        self.there = np.zeros((LAYERS, PAGES, 2, 64), np.uint8)
        self.offer: Any = None
        self.stop = anyio.Event()
        self.outcome: Any = None

    async def offered(self, name: str, task_status: Any) -> str:
        rows, self.stop = {0: PageRow(HERE)}, anyio.Event()
        async with self.producer.offer(name, tokens=40, rows=rows, readers=None) as self.offer:
            task_status.started()
            while not (self.offer.complete or self.offer.stopped or self.stop.is_set()):
                await self.offer.changed.wait()
            if self.stop.is_set():
                self.offer.stop("it is stopped")
        return self.offer.outcome

    def begin(self, name: str = "r", **changes: Any) -> None:
        """Offer a request, and have the worker receive it."""
        self.outcome, _ = self.portal.start_task(self.offered, name)
        rows = {0: BlockRow(THERE, 0)}
        wanted = Wanted(f"our {name}", name, [self.address], 40, rows)._replace(**changes)
        self.step(Steps([], [wanted], []))

    def step(self, steps: Steps) -> None:
        self.worker.begin(steps)
        self.worker.start(steps)

    def compute(self, *layers: int) -> None:
        for layer in layers:
            self.portal.call(self.offer.computed, layer)

    def end_offer(self) -> None:
        self.portal.call(self._end_offer)
        self.outcome.result(PATIENCE_S)

    def _end_offer(self) -> None:
        self.stop.set()
        self.offer.changed.wake_all()

    def has(self, layers: int) -> bool:
        """Return whether these first layers, and no others, are here."""
        return bool((self.there[:layers, THERE] == 3).all() and not self.there[layers:].any())


@contextmanager
def pair(portal: Any) -> Iterator[Pair]:
    caches = Cache("prefill"), Cache("decode")
    here, there = (np.full((LAYERS, PAGES, 2, 64), value, np.uint8) for value in (3, 0))
    for made, array in zip(caches, (here, there), strict=True):
        made.add(array, "layer page head item")
    with (
        decode(caches[1]) as worker,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, caches[0], match_timeout=PATIENCE_S)) as producer,
    ):
        made = Pair(portal, worker, producer, str(engine.address))
        made.here, made.there = here, there
        try:
            yield made
        finally:
            if made.outcome is not None:
                made.end_offer()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ended(worker: RankTransfers) -> EndedRequests:
    """Ask as an engine does between two steps, until something has ended."""
    found: list[EndedRequests] = []
    until(lambda: bool((found.append(worker.take_ended()) or found[-1]) != NONE))
    return found[-1]


def loading(made: Pair) -> None:
    """Have a request of which the first layer has arrived."""
    made.begin()
    made.compute(0)
    assert ended(made.worker) == NONE._replace(received={"our r"})


def test_each_layer_is_waited_for_alone(portal):
    with pair(portal) as made:
        made.begin()
        assert made.worker.take_ended() == NONE
        made.compute(0)
        assert ended(made.worker) == NONE._replace(received={"our r"})
        made.step(COMPUTED)
        for name, layer in NAMES.items():
            later = threading.Timer(0.02 if layer else 0, made.compute, [layer])
            later.start()
            made.worker.wait(name)
            assert made.has(layer + 1)
            later.join()
        made.worker.wait("model.layers.7.attn")
        made.worker.end()
        assert (made.worker.take_ended(), made.worker.invalid) == (NONE, set())
        assert made.outcome.result(PATIENCE_S) == "moved"
        # The engine aborts it before it has heard of the output: its blocks are free at once.
        made.step(NOTHING._replace(cancelled=["our r"]))
        assert made.worker.take_ended() == NONE._replace(received={"our r"})


def test_a_step_without_a_computation_waits_for_nothing(portal):
    with pair(portal) as made:
        loading(made)
        made.step(NOTHING)
        made.worker.end()
        assert made.worker.take_ended() == NONE
        made.compute(*range(1, LAYERS))
        made.worker.wait("model.layers.3.attn")
        assert made.has(LAYERS)


def test_layers_in_any_order_and_several_times(portal):
    """Of each layer that a wait has returned for, and of those before it, all bytes are here."""
    draw = random.Random(45)
    with pair(portal) as made:
        for number in range(25):
            made.there[:] = 0
            made.begin(f"r{number}")
            order = [*range(LAYERS), *draw.choices(range(LAYERS), k=draw.randint(0, 4))]
            draw.shuffle(order)
            thread = threading.Thread(target=made.compute, args=order)
            thread.start()
            assert f"our r{number}" in ended(made.worker).received
            made.step(NOTHING._replace(computed=[f"our r{number}"]))
            for name, layer in NAMES.items():
                made.worker.wait(name)
                assert (made.there[: layer + 1, THERE] == 3).all()
            made.worker.end()
            thread.join()
            assert (made.worker.take_ended(), made.worker.invalid) == (NONE, set())
            assert made.outcome.result(PATIENCE_S) == "moved"


def test_a_layer_that_never_comes_breaks_the_request(portal, monkeypatch):
    monkeypatch.setattr(loads_module, "LOAD_S", 0)
    with pair(portal) as made:
        loading(made)
        made.step(COMPUTED)
        for name in NAMES:
            made.worker.wait(name)
        made.worker.end()
        found = made.worker.take_ended()
        assert (found.received, list(found.failed), made.worker.invalid) == (set(), ["our r"], set(THERE))
        assert "did not arrive within 0 s" in found.failed["our r"]
        # The engine computes it in the same blocks, and nothing is written there any more.
        made.there[:] = PATTERN
        made.compute(*range(1, LAYERS))
        assert made.outcome.result(PATIENCE_S) != "moved"
        made.step(NOTHING)
        assert (made.worker.take_ended(), made.worker.invalid) == (NONE, set())
        assert (made.there == PATTERN).all()


@pytest.mark.parametrize("held", [True, False], ids=["held", "waiting"])
def test_what_breaks_before_it_is_computed(portal, held):
    """Blocks that the engine holds are reported again when it computes them; others it has dropped by then."""
    with pair(portal) as made:
        loading(made)
        made.step(NOTHING)
        made.end_offer()
        found = list[EndedRequests]()

        def broken() -> bool:
            made.worker.begin(NOTHING._replace(held=["our r"] if held else []))
            found.append(made.worker.take_ended())
            return bool(found[-1].failed)

        until(broken)
        assert ("it is stopped" in found[-1].failed["our r"], made.worker.invalid) == (True, set(THERE))
        made.step(NOTHING)
        assert (made.worker.take_ended(), made.worker.invalid) == (NONE, set())
        made.step(COMPUTED)
        made.worker.wait("model.layers.0.attn")
        assert (made.worker.take_ended(), made.worker.invalid) == (NONE, set(THERE) if held else set())


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_at_any_moment_it_is_reported_when_nothing_is_written(portal, seed):
    """From the first call to the last layer; its blocks are filled at once, and stay so."""
    draw, early = random.Random(seed), 0
    with pair(portal) as made:
        for number in range(20):
            name, ours = f"r{number}", f"our r{number}"
            made.there[:] = 0
            made.begin(name)
            layers = draw.randint(0, LAYERS - 1)
            made.compute(*range(layers))
            time.sleep(draw.random() * 0.004)
            first = made.worker.take_ended()
            early += ours in first.received
            thread = threading.Thread(target=made.compute, args=range(layers, LAYERS))
            if draw.random() < 0.5:
                thread.start()
            made.step(NOTHING._replace(cancelled=[ours]))
            # Also of one that was received early: the engine hears of it once more.
            assert ended(made.worker) == NONE._replace(received={ours})
            made.there[:] = PATTERN
            if thread.ident is None:
                thread.start()
            thread.join()
            made.step(NOTHING)
            assert made.worker.take_ended() == NONE
            made.end_offer()
            assert (made.there == PATTERN).all()
            assert not made.worker._receiving
        assert 0 < early < 20


def test_what_is_read_is_received_when_all_is_here(portal):
    with pair(portal) as made:
        made.worker.reads = True
        made.begin()
        made.compute(0)
        until(lambda: bool(made.offer.active))
        assert made.worker.take_ended() == NONE
        made.compute(*range(1, LAYERS))
        assert ended(made.worker) == NONE._replace(received={"our r"})
        assert made.has(LAYERS)


def test_what_several_ranks_write_is_received_when_all_is_here(portal):
    """Counts alone do not tell then: those that one rank sends twice could stand for those of another."""
    with ExitStack() as stack:
        there = np.zeros((LAYERS, PAGES, 2, 64), np.uint8)
        made = Cache("decode")
        made.add(there, "layer page head item")
        worker = stack.enter_context(decode(made))
        offers, addresses = [], []

        async def offered(producer: Producer, task_status: Any) -> None:
            async with producer.offer("r", tokens=40, rows={0: PageRow(HERE)}) as offer:
                task_status.started(offer)
                while not offer.complete:
                    await offer.changed.wait()

        for rank in range(2):
            half = Cache(f"prefill {rank}", ranks=2)
            half.add(np.full((LAYERS, PAGES, 1, 64), 3, np.uint8), "layer page head item", first_head=rank)
            engine = stack.enter_context(portal.wrap_async_context_manager(opened("local")))
            producer = stack.enter_context(portal.wrap_async_context_manager(Producer(engine, half)))
            offers.append(portal.start_task(offered, producer))
            stack.callback(offers[-1][0].cancel)
            addresses.append(str(engine.address))
        worker.start(Steps([], [Wanted("our r", "r", addresses, 40, {0: BlockRow(THERE, 0)})], []))
        for layer in range(LAYERS - 1):
            for _, offer in offers:
                portal.call(offer.computed, layer)
        until(lambda: bool((there[: LAYERS - 1, THERE] == 3).all()))
        assert worker.take_ended() == NONE
        for _, offer in offers:
            portal.call(offer.computed, LAYERS - 1)
        assert ended(worker) == NONE._replace(received={"our r"})
        assert (there[:, THERE] == 3).all()
        for future, _ in offers:
            future.result(PATIENCE_S)


def test_close_ends_what_is_loading(portal):
    with pair(portal) as made:
        loading(made)
        aside(made.worker.close)
        made.there[:] = PATTERN
        made.compute(*range(1, LAYERS))
        assert made.outcome.result(PATIENCE_S) != "moved"
        assert (made.there == PATTERN).all()


@pytest.mark.parametrize("computed", [True, False], ids=["computing", "before"])
def test_a_producer_that_is_killed_between_two_layers_costs_no_block(computed):
    child = Child("support.kv.producer_process", "local", 0.15, 1)
    side = built(MODEL, Side(pages=CHILD_PAGES, tokens=4), "decode")
    names = {f"model.layers.{number}.attn": number for number in range(MODEL.layers)}
    try:
        with decode(side.caches[0], names) as worker:
            blocks = list(range(CHILD_PAGES))
            wanted = Wanted("our 0", "0", [str(child.address)], TOKENS, {0: BlockRow(blocks, 0)})
            worker.start(Steps([], [wanted], []))
            assert ended(worker) == NONE._replace(received={"our 0"})
            child.signal(signal.SIGKILL)
            steps = NOTHING._replace(computed=["our 0"])
            if not computed:
                steps = NOTHING._replace(cancelled=["our 0"])
            worker.begin(steps)
            if computed:
                for name in names:
                    worker.wait(name)
                worker.end()
            worker.start(steps)
            if computed:
                found = worker.take_ended()
                assert (list(found.failed), worker.invalid) == (["our 0"], set(blocks))
            else:
                assert ended(worker) == NONE._replace(received={"our 0"})
            for memory in side.caches[0].memories:
                memory[...] = PATTERN
            assert worker.take_ended() == NONE
            assert all((memory == PATTERN).all() for memory in side.caches[0].memories)
    finally:
        child.end()
