"""The parent's part of a run, with children that only pretend: what it makes of what they say, or do not say."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from aiote.demo import DemoError, Settings, run
from aiote.demo.children import NAMES
from support.engines.opening import PATIENCE_S

SETTINGS = Settings("sim", 1, 0, None, 4, 8, 2, 1, 8)
REPORT = {"report": {"pages_held": 0, "pages_total": 8}}
ANSWER = [{"request": 0, "token": 7}, {"request": 0, "token": 8}, {"request": 0, "checksum": 5}]


class Pretender:
    """A child that answers with `answer` when it is asked, and says `last` when it is told to end."""

    def __init__(self, role: str, answer: list[dict], last: list[dict]) -> None:
        self.role, self.name, self.complaint = role, NAMES[role], ""
        self.ready = {"ready": "aiote://127.0.0.1:1", "model": "0"}
        self.process = SimpleNamespace(pid=17, returncode=None)
        self._answer, self._last = answer, last
        self.said, self.heard = anyio.create_memory_object_stream[dict](20)
        self.said.send_nowait(self.ready)

    def facts(self):
        return self.heard

    async def ask(self, **facts) -> None:
        for fact in self._answer:
            await self.said.send(fact)

    async def end(self, number, limit) -> None:
        if self.process.returncode is None:
            for fact in self._last:
                await self.said.send(fact)
            self.said.close()

    async def wait(self) -> int:
        self.process.returncode = 0 if self._last else 9
        return self.process.returncode


@pytest.fixture
def traces_of(monkeypatch):
    """Run with a decoder that says this, and return the traces."""

    async def traces(answer, last=(REPORT,)):
        @asynccontextmanager
        async def spawn(role, settings):
            decodes = role == "decode"
            child = Pretender(role, answer if decodes else [], list(last) if decodes else [REPORT])
            with child.said, child.heard:
                yield child

        monkeypatch.setattr(run, "spawn", spawn)
        monkeypatch.setattr(run.aiote, "open_engine", opened)
        observer = SimpleNamespace(started=lambda *_: None, pages=lambda *_: None, token=lambda: None)
        with anyio.fail_after(PATIENCE_S):
            return (await run.run(SETTINGS, [b"x"], observer)).traces

    return traces


@asynccontextmanager
async def opened(provider):
    yield SimpleNamespace(rails=())


async def test_tokens_and_checksum_of_an_answer_are_kept(traces_of):
    (trace,) = await traces_of(ANSWER)
    assert (trace.tokens, trace.checksum, trace.reason, trace.is_open) == ([7, 8], 5, "", False)


async def test_a_malformed_message_ends_a_run(traces_of):
    with pytest.raises(ExceptionGroup) as told:
        await traces_of([{"request": 0, "tokens": 7}])
    assert told.group_contains(DemoError, match="the decoder wrote .*not a message")


async def test_a_child_that_does_not_report_fails_the_run(traces_of):
    with pytest.raises(run.RunFailed, match=r"the decoder \(pid 17\) died while no request was being answered"):
        await traces_of(ANSWER, last=())


async def test_a_request_that_failed_fails_the_run(traces_of):
    with pytest.raises(run.RunFailed, match=r"request 1 failed: no room; the decoder freed its pages \(0 of 8 held\)"):
        await traces_of([{"request": 0, "failed": "no room"}])
