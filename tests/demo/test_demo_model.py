"""The model: against a dense reference in float64, chunked against whole, and step by step against prefill."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aiote.demo import one_process, tokens, weights
from aiote.demo.model import Model, ModelConfig
from aiote.demo.request_cache import RequestCache
from aiote.demo.settings import Settings

CONFIG = ModelConfig(layers=3, heads=6, kv_heads=2, head_size=8, width=48, hidden=64, vocabulary=tokens.VOCABULARY)
PROMPT = tokens.encode(b"The beads stopped. He did not wait for the morning, and put the drawers back.")
PAGE = 4


@pytest.fixture(scope="module")
def model() -> Model:
    return weights.seeded(CONFIG, 7)


def cache_for(count: int, *, seed: int | None = None) -> RequestCache:
    settings = Settings("tcp", CONFIG.layers, 0, None, PAGE, 16, 1, 1, 64)
    numbers = np.arange(64) if seed is None else np.random.default_rng(seed).permutation(64)
    return RequestCache(settings.memory(CONFIG), numbers[: settings.pages_for(count)])


def dense_logits(model: Model, prompt: list[int]) -> np.ndarray:
    """Compute the last position's logits head by head and position by position, in float64."""
    config, w = model.config, model.weights
    x = w.embedding[prompt].astype(np.float64)
    angles = np.outer(np.arange(len(prompt)), 10000.0 ** -(np.arange(config.head_size // 2) / (config.head_size // 2)))

    def norm(rows, gain):
        return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * gain

    def rope(rows):
        half = config.head_size // 2
        turned = (rows[:, :half] + 1j * rows[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)

    for layer in w.layers:
        h = norm(x, layer.attention_norm)
        mixed = np.zeros_like(x)
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            query, key = rope(h @ layer.query[:, head]), rope(h @ layer.key[:, shared])
            value = h @ layer.value[:, shared]
            for t in range(len(prompt)):
                scores = key[: t + 1] @ query[t] / np.sqrt(config.head_size)
                share = np.exp(scores - scores.max())
                mixed[t] += (share / share.sum()) @ value[: t + 1] @ layer.output[head]
        x = x + mixed
        h = norm(x, layer.mlp_norm)
        gate = h @ layer.gate
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up)) @ layer.down
    return norm(x[-1:], w.final_norm)[0] @ w.head


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3))


def test_paged_attention_equals_a_dense_reference(model):
    logits = model.prefill(PROMPT, cache_for(len(PROMPT), seed=5), 16)
    assert logits.dtype == np.float32
    assert close(logits, dense_logits(model, PROMPT))
    assert not close(logits, dense_logits(model, [*PROMPT[:10], 0, *PROMPT[11:]]))


@pytest.mark.parametrize("chunk", [4, 12, 64])
def test_chunked_prefill_is_close_to_one_chunk(model, chunk):
    whole, pieces = cache_for(len(PROMPT)), cache_for(len(PROMPT), seed=1)
    a = model.prefill(PROMPT, whole, 4096)
    b = model.prefill(PROMPT, pieces, chunk)
    assert close(a, b)
    for layer in range(CONFIG.layers):
        for x, y in zip(whole.read(layer, len(PROMPT)), pieces.read(layer, len(PROMPT)), strict=True):
            assert close(x, y)


def test_a_step_after_prefill_equals_a_longer_prefill(model):
    cache = cache_for(len(PROMPT))
    model.prefill(PROMPT[:-3], cache, 16)
    for position in range(len(PROMPT) - 3, len(PROMPT)):
        logits = model.step(PROMPT[position], position, cache)
        assert close(logits, dense_logits(model, PROMPT[: position + 1]))


def test_where_pages_lie_changes_no_bit(model):
    first = model.prefill(PROMPT, cache_for(len(PROMPT)), 16)
    for seed in range(3):
        assert np.array_equal(first, model.prefill(PROMPT, cache_for(len(PROMPT), seed=seed), 16))


def test_every_page_influences_the_logits(model):
    """A run tells a wrong page by wrong tokens, so no page may be without influence on the logits."""
    cache = cache_for(len(PROMPT) + 1)
    model.prefill(PROMPT, cache, 16)
    before = model.step(65, len(PROMPT), cache)
    zeros = np.zeros((PAGE, CONFIG.kv_heads, CONFIG.head_size), dtype=np.float32)
    for layer in range(CONFIG.layers):
        for start in range(0, len(PROMPT) - PAGE, PAGE):
            stored = [part[:, start : start + PAGE].transpose(1, 0, 2) for part in cache.read(layer, len(PROMPT))]
            cache.write(layer, start, zeros, zeros)
            assert np.abs(model.step(65, len(PROMPT), cache) - before).max() > 1e-4
            cache.write(layer, start, *stored)
    assert np.array_equal(model.step(65, len(PROMPT), cache), before)


def test_a_seeded_model_generates_varied_text():
    model = weights.seeded(weights.seeded_config(3), 0)
    settings = Settings("tcp", 3, 0, None, 16, 64, 48, 1, 0).with_pool_for(120)
    texts = [b"The tube was quick. " * 4, b"She did not ring a bell, and did not wait. "]
    answers = [result.tokens for result in one_process.serve(model, texts, settings)]
    assert all(len(answer) == 48 for answer in answers)
    assert all(len(set(answer)) >= 8 for answer in answers)
    assert answers[0] != answers[1]
    assert all(32 <= token < 127 for answer in answers for token in answer)


def test_the_mark_of_end_ends_an_answer(model):
    head = model.weights.head.copy()
    head[:, tokens.END] *= 1000
    chatty = Model(CONFIG, dataclasses.replace(model.weights, head=head))
    settings = Settings("tcp", 3, 0, None, PAGE, 16, 100, 1, 64)
    answer = list(one_process.generate(chatty, PROMPT, cache_for(len(PROMPT) + 100), settings))
    assert answer[-1] == tokens.END
    assert tokens.END not in answer[:-1]
    assert len(answer) < 100


def test_requests_in_one_process_are_timed_from_admission(model):
    settings = Settings("tcp", 3, 0, None, PAGE, 16, 5, 2, 0).with_pool_for(40)
    results = list(one_process.serve(model, [b"one", b"two, longer", b"three"], settings))
    assert [result.request for result in results] == [0, 1, 2]
    assert results[0].ttft_s < results[1].ttft_s
    assert results[0].finished_s < results[1].finished_s < results[2].finished_s
    assert results[2].ttft_s < results[2].finished_s - results[0].finished_s
    lines = [json.dumps(dataclasses.asdict(result)) for result in results]
    assert [one_process.LocalResult(**json.loads(line)) for line in lines] == results
