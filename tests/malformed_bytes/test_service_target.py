"""The fuzz target of services: its seeds come everywhere, and it notices what it is there for."""

from __future__ import annotations

import pytest

from aiote.service import frames
from aiote.service.endpoint import CallEndpoint
from aiote.service.memory import LentMemory
from aiote.service.running import Running
from aiote.service.values import Values
from support.fuzz.service import METHODS, Say, service, service_seeds, step, steps

SEEDS = service_seeds()


def test_the_seeds_say_every_frame_and_end_calls_in_every_way(monkeypatch):
    taken, ends = set(), set()
    dispatch, refuse, end = CallEndpoint._dispatch, CallEndpoint.refuse, Running._end

    def note(self, link, frame):
        dispatch(self, link, frame)
        taken.add(type(frame))

    def note_refused(self, link, frame, status, text=""):
        ends.add(status)
        refuse(self, link, frame, status, text)

    def note_end(self, status, parcel=None):
        ends.add((self.frame.method, status))
        end(self, status, parcel)

    monkeypatch.setattr(CallEndpoint, "_dispatch", note)
    monkeypatch.setattr(CallEndpoint, "refuse", note_refused)
    monkeypatch.setattr(Running, "_end", note_end)
    for data in SEEDS.values():
        service(data)
    assert taken == set(frames.Frame.__args__)
    status = frames.CallStatus
    assert ends >= {(method, status.DONE) for method in METHODS if "wait" not in method and "nothing" not in method}
    assert ends >= {status.CANCELLED, ("Fuzzed/1.wait", status.CANCELLED), ("Fuzzed/1.add", status.INVALID)}
    assert {say for data in SEEDS.values() for say, _ in steps(data)} == set(Say)


def test_an_error_of_ours_is_noticed(monkeypatch):
    def fail(self, frame):
        raise RuntimeError("ours")

    monkeypatch.setattr(Values, "on_free", fail)
    with pytest.raises(RuntimeError, match="ours"):
        service(SEEDS["free"])


def test_memory_that_stays_lent_is_noticed(monkeypatch):
    async def keep(self):
        pass

    monkeypatch.setattr(LentMemory, "close", keep)
    with pytest.raises(TimeoutError):
        service(SEEDS["ask"])


def test_a_call_that_stays_is_noticed(monkeypatch):
    monkeypatch.setattr(Running, "cancel", lambda self: None)
    with pytest.raises(TimeoutError):
        service(step(Say.GREET) + step(Say.CALL, b"\x12\x90"))
