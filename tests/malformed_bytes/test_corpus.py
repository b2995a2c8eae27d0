"""The fuzz targets without a fuzzer: over the seeds, over every input that ever broke one, over changed seeds."""

from __future__ import annotations

import hmac
import runpy
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core import control_frames as frames
from aiote.core import fields
from aiote.core.control import SESSION, MessageReceived, Role
from support.fuzz.seeds import example, seeds
from support.fuzz.targets import TARGETS, Step, Talk, control, message, program

HERE = Path(__file__).parent
SEEDS = seeds()
INPUTS = sorted(path for kind in ("corpus", "crashes") for path in (HERE / kind).glob("*/*"))
MAX_BYTES = 1 << 20
"""What no target needs for an input of a few hundred bytes, whatever lengths those announce."""


def test_the_corpus_is_what_the_seeds_are():
    """A message that was added or changed has its seeds after `python tools/fuzz.py --seeds`."""
    folders = {target: (HERE / "corpus" / target).iterdir() for target in SEEDS}
    found = {target: {path.name: path.read_bytes() for path in paths} for target, paths in folders.items()}
    tool = runpy.run_path(str(HERE.parents[1] / "tools" / "fuzz.py"))
    assert (tool["CORPUS"], tool["CRASHES"]) == (HERE / "corpus", HERE / "crashes")
    if found != SEEDS:
        pytest.fail("the seeds are not those of today's messages; renew them: python tools/fuzz.py --seeds", False)
    assert set(SEEDS) == set(TARGETS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_breaks_nothing_and_costs_little(path):
    data = path.read_bytes()
    TARGETS[path.parent.name](data)
    tracemalloc.start()
    try:
        TARGETS[path.parent.name](data)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("role", Role)
def test_every_message_is_heard_and_said_in_the_seeds(role, monkeypatch):
    """Behind the tag, in both roles: else the fuzzer would have to guess its way there."""
    heard, said = set(), set()
    for name in ("say", "send"):
        monkeypatch.setattr(Talk, name, noting(getattr(Talk, name), heard, said))
    for name, data in SEEDS["control"].items():
        if name.startswith(role.name.lower()):
            control(data)
    kinds = {kind for row in SESSION.values() for kind in row}
    assert heard == said == kinds
    assert kinds <= set(frames._NUMBERS)


def noting(method, heard, said):
    def call(self, data, *more):
        events = method(self, data, *more)
        if events is None:
            said.add(type(frames.decode(data)))
        else:
            heard.update(type(event.message) for event in events if isinstance(event, MessageReceived))
        return events

    return call


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, bytes]:
    """A seed with some bytes replaced, cut out, doubled or put in."""
    target = draw(st.sampled_from(sorted(TARGETS)))
    data = bytearray(draw(st.sampled_from(sorted(SEEDS[target].values()))))
    for _ in range(draw(st.integers(1, 4))):
        at, count = draw(st.integers(0, len(data))), draw(st.integers(0, 4))
        data[at : at + count] = draw(st.binary(max_size=4) | st.just(bytes(data[at : at + 40])))
    return target, bytes(data)


@given(changed())
def test_changed_seeds_break_nothing(case):
    target, data = case
    TARGETS[target](data)


def test_a_length_field_reserves_nothing():
    """The largest lengths that a frame, a blob, a text and a count can announce, with nothing behind them."""
    inputs = [
        program(Role.ACCEPTOR, True, (Step.GREET, b""), (Step.DECIDE, b""), (Step.PROVE, b""), (Step.RAW, length))
        for length in (b"\xff\xff\xff\xff", b"\0\1\0\0", b"\0\0\xff\xff")
    ]
    for data in inputs:
        tracemalloc.start()
        control(data)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES // 4
        tracemalloc.stop()


# The targets notice what they are there for.


def test_a_way_in_without_the_key_is_noticed(monkeypatch):
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: True)
    for name in ("acceptor-without-proof", "initiator-impostor"):
        with pytest.raises(AssertionError, match="without a proof|nobody gave"):
            control(SEEDS["control"][name])


def test_a_second_encoding_is_noticed(monkeypatch):
    body = frames.encode(example(frames.Challenge))
    message(body[:-1] + b"\2")
    monkeypatch.setattr(fields.Flag, "unpack", lambda _self, cursor: cursor.take_bytes(1) != b"\0")
    with pytest.raises(AssertionError):
        message(body[:-1] + b"\2")


def test_a_frame_that_is_held_beyond_its_limit_is_noticed(monkeypatch):
    monkeypatch.setattr(frames.FrameReader, "next", lambda _self, _limit: None)
    with pytest.raises(AssertionError):
        control(program(Role.ACCEPTOR, False, (Step.RAW, bytes(2000))))
