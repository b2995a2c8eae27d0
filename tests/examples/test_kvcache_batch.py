"""The continuous batch of examples/kvcache, and how its tokens are drawn."""

from __future__ import annotations

import itertools
import sys

import anyio
import numpy as np
import pytest

from aiote.demo import RequestCache, Settings
from aiote.demo import tokens as vocabulary
from support.process.examples import EXAMPLES, PATIENCE_S

SETTINGS = Settings("sim", 2, 0, None, 8, 64, 24, 4, 256)
MODEL = SETTINGS.model()
PROMPTS = [b"the first", b"the second, which is a little longer", b"3"]
NEW_TOKENS = 24


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import generating
    import sampling

    return generating, sampling


class Requests:
    """Prompts that are computed, each in pages of its own, and what follows them."""

    def __init__(self, modules):
        self.generating, self.sampling = modules
        config = MODEL.config
        self.memory = np.zeros((config.layers, 128, 2, config.kv_heads, 8, config.head_size), np.float32)
        self._pages = itertools.count()

    def begin(self, text, **how):
        prompt = vocabulary.encode(text)
        pages = [next(self._pages) for _ in range(-(-(len(prompt) + NEW_TOKENS) // 8))]
        cache = RequestCache(self.memory, pages)
        logits = MODEL.prefill(prompt, cache, SETTINGS.chunk_tokens)
        one = self.generating.Generation(cache, self.sampling.Sampling(**how), len(prompt), NEW_TOKENS)
        one.take(logits)
        return one


async def generated(one):
    return [token.id async for token in one]


@pytest.fixture(params=[{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def how(request):
    return request.param


@pytest.fixture
def alone(modules, how):
    """Return what each prompt gives when it is alone in the batch."""

    async def one_by_one():
        requests, batch, found = Requests(modules), modules[0].Decode(MODEL), []
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            for text in PROMPTS:
                batch.join(one := requests.begin(text, **how))
                found.append(await generated(one))
            group.cancel_scope.cancel()
        assert batch.largest == 1
        return found

    return anyio.run(one_by_one)


@pytest.mark.anyio
async def test_requests_that_join_a_running_batch_get_their_own_tokens(modules, how, alone):
    requests, batch = Requests(modules), modules[0].Decode(MODEL)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            first, second, third = (requests.begin(text, **how) for text in PROMPTS)
            batch.join(first)
            found = [(await anext(first)).id for _ in range(3)]
            # The first is in the middle of its answer, and is not waited for.
            batch.join(second)
            others = [(await anext(second)).id for _ in range(3)]
            assert not first.finish
            batch.join(third)
            last = await generated(third)
            assert [found + await generated(first), others + await generated(second), last] == alone
            group.cancel_scope.cancel()
    assert batch.largest == 3
    assert batch.steps < sum(len(tokens) - 1 for tokens in alone), "steps were shared"
    assert not batch.running


@pytest.mark.anyio
async def test_one_that_leaves_harms_nobody(modules, alone, how):
    requests, batch = Requests(modules), modules[0].Decode(MODEL)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            first, second = (requests.begin(text, **how) for text in PROMPTS[:2])
            batch.join(first)
            batch.join(second)
            await anext(second)
            await anext(second)
            await batch.leave(second)
            # Its pages may be anybody's from now on.
            for layer in range(MODEL.config.layers):
                second.cache.write(layer, 0, *np.full((2, 30, 2, 32), np.nan, np.float32))
            assert await generated(first) == alone[0]
            group.cancel_scope.cancel()


def test_a_draw_depends_on_seed_and_position_alone(modules):
    _, sampling = modules
    logits = np.random.default_rng(0).standard_normal(vocabulary.VOCABULARY).astype(np.float32)
    how = sampling.Sampling(temperature=1.0, seed=3)
    drawn = [sampling.choose(logits, position, how).id for position in range(50)]
    assert drawn == [sampling.choose(logits, position, how).id for position in range(50)]
    assert len(set(drawn)) > 20


def test_draws_have_the_probabilities_of_the_model(modules):
    _, sampling = modules
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    count = 4000

    def shares(**more):
        how = sampling.Sampling(temperature=1.0, seed=1, **more)
        drawn = [sampling.choose(logits, position, how).id for position in range(count)]
        return np.bincount(drawn, minlength=4) / count

    # Four standard deviations of the widest share.
    assert np.abs(shares() - np.exp(logits)).max() < 4 * 0.5 / count**0.5
    # 0.7: the first two have 0.8 together, the first alone has less.
    assert np.abs(shares(top_p=0.7) - np.array([0.625, 0.375, 0, 0])).max() < 4 * 0.5 / count**0.5
    assert shares(top_p=0.1).tolist() == [1, 0, 0, 0]


def test_log_probabilities_are_those_of_the_logits(modules):
    _, sampling = modules
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float64)) + 7
    token = sampling.choose(logits, 0, sampling.Sampling(logprobs=2))
    assert token.id == 0
    assert np.exp(token.logprob) == pytest.approx(0.5)
    assert [one for one, _ in token.top] == [0, 1]
    assert np.exp([value for _, value in token.top]) == pytest.approx([0.5, 0.3])
