"""The timer that a loop watches as a descriptor: it fires once, when it was last told to."""

from __future__ import annotations

import asyncio
import os
import select
import time

import pytest

import aiote
from aiote_native.system.base import NativeAlarm


def readable(alarm: NativeAlarm, seconds: float) -> bool:
    return bool(select.select([alarm.fd], [], [], seconds)[0])


@pytest.fixture
def alarm():
    made = NativeAlarm()
    yield made
    made.close()


@pytest.mark.parametrize("seconds", [0.02, 0.0, -5.0, 1e-9])
def test_an_alarm_fires_once_and_never_too_early(alarm, seconds):
    begun = time.monotonic()
    alarm.set(seconds)
    assert readable(alarm, 30)
    assert time.monotonic() - begun >= seconds
    alarm.clear()
    assert not readable(alarm, 0.05)


def test_the_time_set_last_holds(alarm):
    alarm.set(0)
    assert readable(alarm, 30)
    alarm.set(3600)
    assert not readable(alarm, 0.05)
    alarm.set(0.01)
    assert readable(alarm, 30)


@pytest.mark.parametrize("seconds", [1e11, 1e300, float("inf")])
def test_what_is_too_far_away_for_a_timer_does_not_fire_at_once(alarm, seconds):
    alarm.set(seconds)
    assert not readable(alarm, 0.05)


def test_what_was_not_set_never_fires_and_clearing_does_not_wait(alarm):
    alarm.clear()
    assert not readable(alarm, 0.05)


def test_closing_frees_the_descriptor_once(alarm):
    number = alarm.fd
    alarm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    alarm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        alarm.set(1)
    with pytest.raises(RuntimeError, match="open already"):
        NativeAlarm.__init__(made := NativeAlarm())
    made.close()


class Counting(asyncio.SelectorEventLoop):
    """A loop that counts how often it was told to wake by the clock."""

    timed = 0

    def call_at(self, *args, **kwargs):
        self.timed += 1
        return super().call_at(*args, **kwargs)


@pytest.mark.libfabric
def test_heartbeats_set_no_timer_of_the_loop_s():
    """With one, asyncio asks the clock three times a turn; where time is a system call that is most of a round trip."""

    async def beats() -> int:
        loop = asyncio.get_running_loop()
        settings = aiote.EngineConfig(heartbeat_interval=0.01)
        async with (
            aiote.open_engine("tcp", config=settings) as left,
            aiote.open_engine("tcp", config=settings) as right,
        ):
            await left.connect(right.address)
            before = loop.timed
            await asyncio.sleep(0.2)
            return loop.timed - before - 1

    with asyncio.Runner(loop_factory=Counting) as runner:
        assert runner.run(beats()) == 0
