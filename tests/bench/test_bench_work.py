"""The line protocol, the pattern, and that a wrong byte is found wherever it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.bench.measured_loops import Arena
from aiote.bench.work import OPS, PAGE_STEP, Work, pattern

WORKS = st.builds(
    Work,
    op=st.sampled_from(OPS),
    size=st.integers(1, 64).map(lambda n: 8 * n),
    window=st.integers(1, 9),
    count=st.integers(1, 40),
    pages=st.integers(1, 20),
    seed=st.integers(0, 2**63),
)


class Engine:
    """As much of an engine as an arena asks for before anything is moved."""

    def register(self, array):
        return array


def arena(work: Work) -> Arena:
    return Arena(Engine(), 8 * (work.used // 8 + 1))


@given(WORKS)
def test_a_line_says_the_whole_work(work):
    assert Work.parse(work.line()) == work


@pytest.mark.parametrize("line", ["run", "run op=write", "run op=write size=x window=1 count=1", "run size=8", "run a"])
def test_a_line_that_says_no_work_is_refused(line):
    with pytest.raises(ValueError):
        Work.parse(line)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_the_pattern_is_the_protocol_s(seed, first):
    expected = [(seed * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9) % 2**64 for i in range(first, first + 5)]
    assert pattern(seed, 5, first).tolist() == expected


@given(st.integers(1, 4096))
def test_every_page_of_a_request_has_a_place_of_its_own(pages):
    if pages % PAGE_STEP:
        assert len({page * PAGE_STEP % pages for page in range(pages)}) == pages


def delivered(work: Work) -> Arena:
    """An arena as it looks when all has arrived."""
    there = arena(work)
    there.prepare(work, fills=False)
    sent = pattern(work.seed, work.used // 8)
    if work.op == "pages":
        words = there.words[: work.used // 8].reshape(work.slots, work.pages, -1)
        for page in range(work.pages):
            words[:, page * PAGE_STEP % work.pages] = sent.reshape(words.shape)[:, page]
    elif work.op == "send":
        # In another order than they were sent in.
        there.words[: work.used // 8] = sent.reshape(work.slots, -1)[::-1].ravel()
    else:
        there.words[: work.used // 8] = sent
    return there


@given(WORKS, st.data())
def test_one_wrong_word_is_found(work, data):
    there = delivered(work)
    assert there.verify(work)
    there.words[data.draw(st.integers(0, work.used // 8 - 1))] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    assert not there.verify(work)


def test_messages_that_never_came_are_not_verified():
    work = Work("send", 8, 2, 4)
    there = arena(work)
    there.prepare(work, fills=False)
    assert not there.verify(work)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (Work("write", 12, 1, 1), "whole words"),
        (Work("write", 8, 0, 1), "window"),
        (Work("write", 8, 1, 0), "count"),
        (Work("write", 1 << 20, 1, 1), "the arena has"),
    ],
)
def test_work_that_does_not_fit_is_refused(work, why):
    with pytest.raises(ValueError, match=why):
        Arena(Engine(), 4096).prepare(work, fills=True)
