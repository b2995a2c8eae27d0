"""What parent and child say to each other: what is said arrives; what is no fact is refused."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.demo import Child, DemoError, Settings, prompts, tell, weights
from aiote.demo.children import how_it_ended, spawn
from support.engines.opening import PATIENCE_S

values = st.integers() | st.text(max_size=30) | st.lists(st.integers(0, 257), max_size=20) | st.none()
facts = st.dictionaries(st.text(max_size=8), values, max_size=4)


def told(said: list[dict]) -> bytes:
    """Return what a process prints that tells these facts."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for fact in said:
            tell(**fact)
    return out.getvalue().encode()


def heard(*pieces: bytes) -> list[dict]:
    """Return the facts of a child that printed this, in pieces."""

    async def stream():
        for piece in pieces:
            yield piece

    async def listen():
        return [fact async for fact in Child("decode", "decoder", SimpleNamespace(stdout=stream())).facts()]

    return anyio.run(listen)


@given(st.lists(facts, max_size=4), st.data())
def test_facts_arrive_however_they_are_split(said, data):
    text = told(said)
    at = data.draw(st.integers(0, len(text)))
    assert heard(text[:at], text[at:]) == said


@given(st.lists(facts, min_size=1, max_size=4), st.data())
def test_a_line_that_a_killed_child_did_not_finish_is_dropped(said, data):
    whole, last = told(said[:-1]), told(said[-1:])
    assert heard(whole + last[: data.draw(st.integers(0, len(last) - 1))]) == said[:-1]


@given(st.binary(max_size=80))
def test_arbitrary_bytes_give_facts_or_an_error_that_names_the_child(data):
    try:
        found = heard(data + b"\n")
    except DemoError as error:
        assert "the decoder wrote" in str(error)
        return
    assert all(isinstance(fact, dict) for fact in found)


@pytest.mark.parametrize("line", [b"", b"17", b"[]", b'{"a": 1}}', b'{"a": 1', b"\xff"])
def test_a_malformed_fact_is_refused(line):
    with pytest.raises(DemoError, match="not a JSON object"):
        heard(line + b"\n")


ECHO = """
import json, os, sys, threading
from aiote.demo import leave_with_parent, tell
leave_with_parent(0, lambda line: tell(heard=json.loads(line)))
tell(ready=True)
threading.Event().wait()
"""


@pytest.mark.anyio
async def test_a_child_hears_the_longest_prompt_and_leaves_with_its_parent():
    text = prompts.vary(bytes(prompts.MOST_BYTES), 1000)[-1]
    address = str(aiote.Address("localhost.invalid", 65535, bytes([255] * 16), 2**64 - 1))
    asked = {"request": 999, "prompt": list(text), "prefiller": address}
    with anyio.fail_after(PATIENCE_S):
        child = await Child.start("decode", "decoder", [sys.executable, "-P", "-c", ECHO], os.environ)
        async with child.process:
            said = child.facts()
            assert await anext(said) == child.ready == {"ready": True}
            await child.ask(**asked)
            assert await anext(said) == {"heard": asked}
            await child.process.stdin.aclose()
            assert how_it_ended(await child.process.wait()) == "killed by SIGTERM"
            await child.ask(**asked)  # nobody hears it


@pytest.mark.anyio
async def test_a_command_that_is_not_there_is_named():
    with pytest.raises(DemoError, match="cannot start the decoder"):
        await Child.start("decode", "decoder", ["/nonexistent/python"], os.environ)


SMALL = Settings("tcp", 1, 0, None, 4, 8, 2, 1, 8)


@pytest.mark.libfabric
@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("prefill", {"request": 1}),
        ("decode", {}),
        ("decode", {"request": 1, "prompt": 1, "prefiller": "aiote://127.0.0.1:1"}),
    ],
)
async def test_a_malformed_request_ends_a_child(role, line):
    with anyio.fail_after(PATIENCE_S):
        async with spawn(role, SMALL) as child:
            said = child.facts()
            await anext(said)
            await child.ask(**line)
            assert [fact async for fact in said] == []
            assert await child.wait() == 1
            assert "Error: " in child.complaint


@pytest.mark.libfabric
async def test_a_child_that_is_told_to_drain_reports():
    with anyio.fail_after(PATIENCE_S):
        async with spawn("prefill", SMALL) as prefill, spawn("decode", SMALL) as decode:
            for child in (prefill, decode):
                said = child.facts()
                ready = await anext(said)
                assert ready["model"] == weights.fingerprint(SMALL.model())
                assert str(aiote.Address.parse(ready["ready"])) == ready["ready"]
                await child.end(signal.SIGTERM)
                (last,) = [fact async for fact in said]
                assert (last["report"]["pages_held"], last["report"]["pages_total"]) == (0, 8)
                assert await child.wait() == 0


@given(st.text(), st.integers(), st.none() | st.text(), st.integers(1, 99), st.integers(1, 99), st.integers())
def test_settings_round_trip(text, number, path, page, pages, other):
    settings = Settings(text, number, other, path, page, page * pages, number, other, number)
    assert "\n" not in settings.to_json()
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"provider": "tcp"}'])
def test_bad_settings_are_refused(line):
    with pytest.raises((ValueError, TypeError)):
        Settings.from_json(line)
