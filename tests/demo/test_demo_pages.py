"""Pages: nobody gets a page twice, every page of a prompt is written once a layer, and the cache is what was stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiote.cli.demo.faults import DemoError
from aiote.cli.demo.pages import PageAllocator, PageLayout, PagesExhausted, RequestCache, expected_counts, plan

POOL = 12


class AllocatorMachine(RuleBasedStateMachine):
    """Hands pages to requests and takes them back, beside a plain list of who has what."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(POOL, seed=3)
        self.out: list[list[int]] = []

    @rule(count=st.integers(0, POOL + 2))
    def take(self, count):
        left = POOL - sum(map(len, self.out))
        if count > left:
            with pytest.raises(PagesExhausted, match=f"{count} pages wanted, {left} of {POOL} free"):
                self.allocator.take(count)
        else:
            self.out.append(self.allocator.take(count))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data):
        self.allocator.give(self.out.pop(data.draw(st.integers(0, len(self.out) - 1))))

    @rule(page=st.integers(0, POOL - 1))
    def give_what_is_not_held(self, page):
        if all(page not in pages for pages in self.out):
            with pytest.raises(DemoError, match="given back"):
                self.allocator.give([page])

    @precondition(lambda self: any(self.out))
    @rule()
    def give_twice_at_once(self):
        page = next(pages for pages in self.out if pages)[0]
        with pytest.raises(DemoError, match="given back"):
            self.allocator.give([page, page])

    @invariant()
    def no_page_is_out_twice(self):
        held = [page for pages in self.out for page in pages]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(POOL))
        assert self.allocator.held == len(held)
        assert self.allocator.free == POOL - len(held)
        assert self.allocator.peak >= len(held)

    def teardown(self):
        for pages in self.out:
            self.allocator.give(pages)
        assert sorted(self.allocator.take(POOL)) == list(range(POOL))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(stateful_step_count=20)


def test_a_seed_scatters_the_first_pages():
    assert PageAllocator(50).take(5) == [0, 1, 2, 3, 4]
    scattered = PageAllocator(50, seed=1).take(50)
    assert scattered != sorted(scattered)
    assert sorted(scattered) == list(range(50))


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 6))
def test_chunks_cover_a_prompt_and_its_pages_once(tokens, page_tokens, chunk_pages):
    chunks = plan(tokens, chunk_pages * page_tokens, page_tokens)
    assert [t for c in chunks for t in range(c.start, c.stop)] == list(range(tokens))
    pages = [p for c in chunks for p in range(c.first_page, c.end_page)]
    assert pages == list(range(-(-tokens // page_tokens)))
    for chunk in chunks:
        assert {t // page_tokens for t in range(chunk.start, chunk.stop)} == set(
            range(chunk.first_page, chunk.end_page)
        )
        assert chunk.pages == chunk.end_page - chunk.first_page


@pytest.mark.parametrize(("tokens", "chunk", "page"), [(10, 10, 4), (10, 2, 4), (10, 0, 4), (10, 4, 0), (0, 4, 4)])
def test_a_plan_that_cannot_be_is_refused(tokens, chunk, page):
    with pytest.raises(DemoError, match=r"whole number of pages|at least one token"):
        plan(tokens, chunk, page)


@given(
    tokens=st.integers(1, 60),
    layers=st.integers(1, 3),
    page_tokens=st.integers(1, 5),
    chunk_pages=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    spare=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_every_byte_of_the_pages_is_written_once(tokens, layers, page_tokens, chunk_pages, kv_heads, spare, seed):
    """Play the writes of a prefill on bytes: source pages arrive whole, in table order, and nothing else is touched."""
    needed = -(-tokens // page_tokens)
    source = PageLayout(layers, needed + 1, kv_heads, page_tokens, 2)
    target = PageLayout(layers, needed + spare, kv_heads, page_tokens, 2)
    size = source.page_bytes
    assert size == target.page_bytes == target.allocate()[0, 0].nbytes
    assert target.total_bytes == target.allocate().nbytes
    mine = PageAllocator(source.pages, seed=seed + 1).take(needed)
    theirs = PageAllocator(target.pages, seed=seed).take(needed)
    written = np.zeros(target.total_bytes, dtype=np.uint8)
    origin = np.full(target.total_bytes, -1)
    counts = 1
    for chunk in plan(tokens, chunk_pages * page_tokens, page_tokens):
        for layer in range(layers):
            read, read_offset = source.place(layer, chunk, mine)
            put, put_offset = target.place(layer, chunk, theirs)
            for i, j in zip(read, put, strict=True):
                at = put_offset + j * size
                written[at : at + size] += 1
                origin[at : at + size] = np.arange(size) + read_offset + i * size
                counts += 1
    assert counts == expected_counts(layers, tokens, page_tokens)
    expected, pages = target.allocate(), source.allocate()
    numbers = np.arange(pages.size, dtype=np.float32).reshape(pages.shape)
    expected[...] = -1
    expected[:, theirs] = numbers[:, mine]
    touched = written.reshape(-1, 4)[:, 0] == 1
    assert set(np.unique(written)) <= {0, 1}
    assert (touched == (expected.ravel() >= 0)).all()
    assert (origin.reshape(-1, 4)[touched, 0] // 4 == expected.ravel()[touched]).all()


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 99))
def test_the_cache_reads_what_was_written(pieces, page_tokens, seed):
    total = sum(pieces)
    layout = PageLayout(2, 40, 3, page_tokens, 4)
    pool = layout.allocate()
    cache = RequestCache(pool, PageAllocator(40, seed=seed).take(layout.pages_for(total)))
    rng = np.random.default_rng(seed)
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
    again = RequestCache(layout.allocate(), range(layout.pages_for(total)))
    for layer in range(2):
        again.write(layer, 0, dense[layer, :, 0], dense[layer, :, 1])
    assert cache.checksum(total) == again.checksum(total)
    again.write(1, total - 1, dense[1, -1:, 0], dense[1, -1:, 1] + 1)
    assert cache.checksum(total) != again.checksum(total)
    assert cache.checksum(total - 1) == again.checksum(total - 1)
    assert total <= cache.capacity < total + page_tokens
