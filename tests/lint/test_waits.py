"""No test depends on the machine's speed: it waits for conditions, and its limits are for what hangs.

`waits` says what is looked for; `waits.toml` names the few that are right, each with the reason why.
"""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path

import pytest

from support import ROOT, TESTS
from support.checkout.waits import FoundWait, Waits

RIGHT = tomllib.loads(Path(__file__).with_name("waits.toml").read_text())
MOST = 50
"""A list that grows is a habit, not an exception."""


@pytest.fixture(scope="module")
def waits() -> list[FoundWait]:
    """The places in the tests and their programs, which take seconds to be found."""
    return Waits(TESTS, ROOT / "programs").found()


def found(folder: Path) -> list[str]:
    return [place.what for place in Waits(folder).found()]


def test_waits_are_for_conditions(waits):
    reasons = {f"{file}::{where}" for file, places in RIGHT.items() for where in places}
    wrong = [f"{one.file}:{one.line}: {one.what}" for one in waits if one.key not in reasons]
    assert not wrong, "wait for a condition, or say in waits.toml why not:\n" + "\n".join(wrong)


def test_the_list_is_short_and_up_to_date(waits):
    places = {place.key for place in waits}
    listed = {f"{file}::{where}": reason for file, places in RIGHT.items() for where, reason in places.items()}
    assert sorted(set(listed) - places) == [], "not found any more"
    assert all(len(reason.split()) >= 4 for reason in listed.values()), "each has a reason"
    assert len(listed) <= MOST


WRONG = {
    "a sleep": "async def test_a(): await anyio.sleep(0.05)",
    "a method": "class One:\n    def two(self): time.sleep(1)",
    "an imported sleep": "from time import sleep\ndef test_a(): sleep(1)",
    "a sleep of a constant": "import asyncio\nQUIET_S = 0.2\nasync def test_a(): await asyncio.sleep(2 * QUIET_S)",
    "the helper that sleeps": "async def test_a(): await quiet()",
    "a loop on the clock": "def test_a():\n    while time.monotonic() < until:\n        time.sleep(0.01)",
    "a loop for ever": "def test_a():\n    while True:\n        time.sleep(0.01)",
    "a counted loop": "def test_a():\n    for _ in range(3):\n        time.sleep(0.01)",
    "a callback in a loop": "def test_a():\n    while not over():\n        def tick(): time.sleep(0.01)",
    "a guard": "async def test_a():\n    with anyio.fail_after(1): await ready()",
    "a guard by keyword": "async def test_a(): await asyncio.wait_for(ready(), timeout=1.5)",
    "a guard by position": "async def test_a(): await asyncio.wait_for(ready(), 1)",
    "a scope that nobody looks at": "async def test_a():\n    with anyio.move_on_after(0.1): await ready()",
    "a scope that must not be over": (
        "async def a():\n    with anyio.move_on_after(1) as scope: await ready()\n    assert not scope.cancelled_caught"
    ),
    "a thread": "def test_a(): thread.join(0.5)",
    "a socket": "def test_a(): one.settimeout(1)",
    "a process": "def test_a(): subprocess.run(['true'], timeout=1)",
    "a setting": "def test_a(): opened('tcp', heartbeat_timeout=0.5)",
    "a table of settings": "SHORT = {'connect_timeout': 0.3}",
    "a setting from a table": "LIMITS = {'of': 0.5}\ndef test_a(): opened('tcp', drain_timeout=LIMITS['of'])",
    "a default": "def opened(stall_limit: float = 1.0): pass",
    "an imported constant": "from other import SOON_S\ndef test_a(): opened('tcp', heartbeat_timeout=SOON_S)",
    "a conditional one": "SLOWER = 8 if guest else 1\ndef test_a(): opened('tcp', heartbeat_timeout=0.5 * SLOWER)",
    "a constant replaced": "def test_a(monkeypatch): monkeypatch.setattr(module, 'WATCH_S', 0.2)",
    "an upper bound": "def test_a():\n    begun = time.monotonic()\n    assert time.monotonic() - begun < 3",
    "a script": "SCRIPT = '''\n    import time\n    time.sleep(0.1)\n'''",
    "a script with values": "def test_a(n):\n    run_script(f'''\n    import time\n    time.sleep({n})\n''')",
    "beside virtual time": (
        "from aiote.testing import run\nasync def main(): await asyncio.sleep(1)\n"
        "def test_a(): run(main())\nasync def test_b(): await main()"
    ),
}

FINE = {
    "a checkpoint": "async def test_a(): await anyio.sleep(0)",
    "polling": "async def until(condition):\n    while not condition():\n        await anyio.sleep(0.001)",
    "polling with a deadline": "def a():\n    while not ready() and time.monotonic() < until:\n        time.sleep(0.1)",
    "polling with a way out": "def test_a():\n    while True:\n        if ready(): break\n        time.sleep(0.1)",
    "polling for an error": "def test_a():\n    with pytest.raises(Gone):\n        while True: time.sleep(0.1)",
    "a drawn moment": "def test_a(): time.sleep(draw.uniform(0, 0.05))",
    "for ever": "async def test_a(): await asyncio.sleep(1000)",
    "a method of another": "async def test_a(): await engine.sleep(1)",
    "a generous guard": "PATIENCE_S = 60\nasync def test_a():\n    with anyio.fail_after(PATIENCE_S): await ready()",
    "a limit that has to be over": "def a():\n    with pytest.raises(TimeoutError), anyio.fail_after(0.01): wait()",
    "one inside of it": "async def a():\n  with pytest.raises(TimeoutError):\n    async with asyncio.timeout(1): pass",
    "a scope that has to be over": (
        "async def a():\n    with anyio.move_on_after(0.1) as scope: await ready()\n    assert scope.cancelled_caught"
    ),
    "at once": "async def test_a():\n    async with asyncio.timeout(0): await ready()",
    "no seconds": "def test_a(): ', '.join(words)",
    "a lower bound": "def test_a(): assert time.monotonic() - begun >= 0.1",
    "a bound for what hangs": "def test_a(): assert time.monotonic() - begun < 60",
    "text": "TEXT = 'sleep(1) is what (1; 2) it says'",
    "a mark": "@pytest.mark.virtual_time(seed=1)\nasync def test_a(): await asyncio.sleep(1)",
    "a module's mark": "pytestmark = pytest.mark.virtual_time\nasync def test_a(): await asyncio.sleep(1)",
    "what is run": (
        "from aiote.testing import run\n"
        "async def wait(): await asyncio.sleep(1)\n"
        "def test_a():\n    async def main(fabric): await wait()\n    run(main, seed=1)"
    ),
    "a driver": (
        "from aiote.testing import run\ndef virtually(main): run(main, seed=3)\n"
        "def test_a():\n    async def main(fabric): await asyncio.sleep(1)\n    virtually(main)"
    ),
    "a class": (
        "from aiote.testing import run\nclass Storm:\n    async def blow(self): await asyncio.sleep(1)\n"
        "def test_a():\n    seen: list[Storm] = []\n    run(lambda fabric: Storm(fabric).blow())"
    ),
    "its settings": (
        "from aiote.testing import run\nLIMITS = {'stall_limit': 1}\n"
        "def test_a():\n    async def main(fabric): opened(**LIMITS)\n    run(main)"
    ),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wait_for_a_duration_is_found(tmp_path, text):
    (tmp_path / "other.py").write_text("SOON_S = 0.5")
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    assert len(found(tmp_path)) == 1


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_a_wait_for_a_condition_is_not(tmp_path, text):
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("what", "key"), [("a method", "One"), ("a table of settings", "SHORT"), ("a script", "SCRIPT")]
)
def test_a_place_is_named_by_what_it_stands_in(tmp_path, what, key):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test_it.py").write_text(WRONG[what])
    assert [one.key for one in Waits(tmp_path).found()] == [f"a/test_it.py::{key}"]
