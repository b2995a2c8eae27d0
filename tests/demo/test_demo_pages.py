"""Pages: a cache gives back what was stored in it, wherever its pages lie, and a prompt is cut without a gap."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiote.demo.model import ModelConfig
from aiote.demo.request_cache import RequestCache, plan
from aiote.demo.settings import Settings

PAGES = 40


@given(st.integers(1, 300), st.integers(1, 60))
def test_chunks_cover_a_prompt_once(tokens, chunk_tokens):
    chunks = plan(tokens, chunk_tokens)
    assert [token for chunk in chunks for token in chunk] == list(range(tokens))
    assert all(len(chunk) == chunk_tokens for chunk in chunks[:-1])


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 99))
def test_the_cache_reads_what_was_written(pieces, page_tokens, seed):
    total = sum(pieces)
    config = ModelConfig(layers=2, heads=3, kv_heads=3, head_size=4, width=8, hidden=8, vocabulary=8)
    settings = Settings("tcp", 2, 0, None, page_tokens, page_tokens, 1, 1, PAGES)
    needed = settings.pages_for(total)
    memory = settings.memory(config)
    assert memory.nbytes == PAGES * page_tokens * 2 * 2 * 3 * 4 * 4
    rng = np.random.default_rng(seed)
    table = rng.permutation(PAGES)[:needed]
    cache = RequestCache(memory, table)
    dense = rng.standard_normal((2, total, 2, 3, 4), dtype=np.float32)
    start = 0
    for piece in pieces:
        for layer in range(2):
            part = dense[layer, start : start + piece]
            cache.write(layer, start, part[:, 0], part[:, 1])
        start += piece
        keys, values = cache.read(1, start)
        assert np.array_equal(keys, dense[1, :start, 0].transpose(1, 0, 2))
        assert np.array_equal(values, dense[1, :start, 1].transpose(1, 0, 2))
    again = RequestCache(settings.memory(config), range(needed))
    for layer in range(2):
        again.write(layer, 0, dense[layer, :, 0], dense[layer, :, 1])
    assert not memory[:, np.setdiff1d(np.arange(PAGES), table)].any()
    assert cache.checksum(total) == again.checksum(total)
    again.write(1, total - 1, dense[1, -1:, 0], dense[1, -1:, 1] + 1)
    assert cache.checksum(total) != again.checksum(total)
    assert cache.checksum(total - 1) == again.checksum(total - 1)
    assert total <= cache.capacity < total + page_tokens
