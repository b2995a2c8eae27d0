"""What an engine says to `logging`: its events, at their levels, and nothing of its own accord."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from aiote.observe.events import Events
from aiote.observe.logs import EVENTS
from support.engines.opening import linked, until


async def test_events_of_an_engine_are_logged_with_their_details(caplog):
    caplog.set_level(logging.INFO, logger="aiote")
    async with linked("sim") as (left, right):
        await right.aclose()
        await until(lambda: not left.peers)
        address = str(left.address)
    by_event = {record.aiote["event"]: record for record in caplog.records if record.aiote.get("address", address)}
    assert {"engine.opened", "peer.connected", "peer.lost", "engine.closed"} <= set(by_event)
    lost = by_event["peer.lost"]
    assert (lost.name, lost.levelname) == ("aiote.peers", "WARNING")
    assert lost.getMessage().endswith(lost.aiote["reason"])


@pytest.mark.parametrize("name", EVENTS)
def test_each_event_s_text_is_made_of_its_details(name, caplog):
    caplog.set_level(logging.DEBUG, logger="aiote")
    logger, level, _ = EVENTS[name]
    Events().emit(name, **dict.fromkeys(("address", "rails", "peer", "reason", "rail", "device"), "it"))
    (record,) = caplog.records
    assert (record.name, record.levelno) == (logger, level)
    assert "it" in record.getMessage()


def test_what_nobody_wants_is_not_made(monkeypatch):
    monkeypatch.setattr(logging.Logger, "makeRecord", lambda *_: pytest.fail("a record"))
    events = Events()
    logging.getLogger("aiote").setLevel(logging.CRITICAL)
    try:
        events.emit("peer.lost", peer="it", reason="it")
    finally:
        logging.getLogger("aiote").setLevel(logging.NOTSET)
    assert events.counted["peer.lost"] == 1


def test_a_handler_that_fails_reaches_neither_engine_nor_listeners(monkeypatch):
    reported, heard = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *error: reported.append(error[0]))
    monkeypatch.setattr(logging.NullHandler, "handle", lambda *_: 1 / 0)
    events = Events()
    events.listen(heard.append)
    events.emit("peer.lost", peer="it", reason="it")
    assert reported == [ZeroDivisionError]
    assert [event.name for event in heard] == ["peer.lost"]


def test_a_program_that_configures_nothing_prints_nothing():
    program = (
        "import logging\nfrom aiote.observe.events import Events\n"
        "Events().emit('peer.lost', peer='it', reason='it')\nassert not logging.getLogger().handlers\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
