"""The batch of a prefill server of examples/kvcache: who is computed when, and that nobody notices the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import anyio
import numpy as np
import pytest

from aiote.demo import RequestCache, Settings, plan
from support.process.examples import EXAMPLES, PATIENCE_S

CHUNK = 32
STEP = 80
SETTINGS = Settings("sim", 2, 0, None, 8, CHUNK, 1, 8, 256)
MODEL = SETTINGS.model()
LENGTHS = (150, 3, 97, 32, 1, 64, 151)


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import caching
    import computing

    return caching, computing


class Prompts:
    """A batch, its cache, and prompts in pages of their own; `steps` says who was in each step."""

    def __init__(self, modules, step_tokens=STEP, slower=0.0):
        caching, self.computing = modules
        self.cache = caching.ModelCache("prefill 0", SETTINGS)
        self.batch = self.computing.Prefill(MODEL, self.cache, step_tokens=step_tokens, slower=slower)
        self.steps, self.told, self.pages = [], [], 0
        choose = self.batch.choose

        def noted():
            self.steps.append(chosen := choose())
            return chosen

        self.batch.choose = noted

    def add(self, number, top=None):
        """Join a prompt."""
        tokens = np.random.default_rng(number).integers(0, 256, LENGTHS[number], dtype=np.uint32)
        count = self.cache.pages_for(len(tokens))
        cache = RequestCache(self.cache.memory, range(self.pages, self.pages + count))
        self.pages += count
        offer = SimpleNamespace(stopped="", computed=lambda *what: self.told.append((number, *what)))
        one = self.computing.Prompt(tokens, plan(len(tokens), CHUNK), offer, cache)
        one.top, one.slot = top, number
        self.batch.join(one)
        return one

    def found(self, one):
        """Return what a prompt has left: its pages' checksum, and its last logits."""
        return one.cache.checksum(len(one.tokens)), self.cache.logits[one.slot].tobytes()


async def run(batch, *over):
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            for one in over:
                await one.over.wait()
            group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_prompts_that_are_computed_together_have_the_bits_of_each_alone(modules):
    alone = []
    for number in range(len(LENGTHS)):
        prompts = Prompts(modules)
        one = prompts.add(number, top=2)
        await run(prompts.batch, one)
        alone.append((*prompts.found(one), one.scores().values.tobytes(), one.scores().ids.tobytes()))
        assert prompts.batch.largest == 1
    prompts = Prompts(modules)
    together = [prompts.add(number, top=2) for number in range(len(LENGTHS))]
    await run(prompts.batch, *together)
    assert [
        (*prompts.found(one), one.scores().values.tobytes(), one.scores().ids.tobytes()) for one in together
    ] == alone
    assert prompts.batch.steps < sum(-(-length // CHUNK) for length in LENGTHS), "steps were shared"
    assert prompts.batch.tokens == sum(LENGTHS)
    assert not prompts.batch.running


@pytest.mark.anyio
@pytest.mark.parametrize("step_tokens", [1, CHUNK, STEP, 10_000])
async def test_a_step_has_no_more_tokens_than_it_may(modules, step_tokens):
    prompts = Prompts(modules, step_tokens)
    ones = [prompts.add(number) for number in range(len(LENGTHS))]
    left = {one: list(one.parts) for one in ones}
    await run(prompts.batch, *ones)
    for step in prompts.steps:
        sizes = [len(left[one].pop(0)) for one in step]
        assert len(step) == len(set(step))
        assert len(sizes) == 1 or sum(sizes) <= step_tokens
    assert not any(left.values())
    # Each layer of each chunk was told once, in order, and the logits last.
    for number, length in enumerate(LENGTHS):
        told = [what for who, *what in prompts.told if who == number]
        assert told == [[layer, part.stop] for part in plan(length, CHUNK) for layer in (0, 1)] + [[2]]


@pytest.mark.anyio
async def test_a_short_prompt_does_not_wait_for_the_end_of_long_ones(modules):
    prompts = Prompts(modules, CHUNK)
    first, last = prompts.add(0), prompts.add(6)
    short = prompts.add(1)
    await run(prompts.batch, short)
    assert first.parts
    assert last.parts
    assert [short in step for step in prompts.steps[:3]] == [False, False, True], "one chunk of each before it"


@pytest.mark.anyio
async def test_one_that_leaves_waits_for_its_step_and_is_in_no_other(modules):
    prompts = Prompts(modules, slower=3600.0)
    first, second = prompts.add(0), prompts.add(2)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            stepping = anyio.CancelScope()

            async def step():
                with stepping:
                    await prompts.batch.run()

            group.start_soon(step)
            while not prompts.steps:
                await anyio.lowlevel.checkpoint()
            left = anyio.Event()

            async def leave():
                await prompts.batch.leave(first)
                left.set()

            group.start_soon(leave)
            await anyio.wait_all_tasks_blocked()
            assert not left.is_set(), "a step reads its pages"
            stepping.cancel()
            await left.wait()
    prompts.batch._slower = 0.0
    parts = len(first.parts)
    await run(prompts.batch, second)
    assert len(first.parts) == parts
    assert not prompts.batch.running


@pytest.mark.anyio
async def test_a_prompt_that_nobody_wants_any_more_is_not_computed_to_its_end(modules):
    prompts = Prompts(modules)
    first, second = prompts.add(0), prompts.add(2)
    first.offer.stopped = "its reader has left"
    await run(prompts.batch, first, second)
    assert len(first.parts) == len(plan(LENGTHS[0], CHUNK)) - 1
    assert not second.parts
