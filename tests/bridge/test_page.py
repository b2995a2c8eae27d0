"""The page on the bridge says what is there: its program runs, and its table names what there is."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "bridge.md").read_text()

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


async def test_the_program_of_the_page_runs():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with aiote.open_engine() as engine:
        descriptor = base64.b64encode(engine.register(b"hello" + bytes(4091), "read").descriptor).decode()
        command = [sys.executable, "-P", "-W", "error", "-", descriptor]
        done = await asyncio.to_thread(
            subprocess.run, command, input=program, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_methods_that_the_table_of_the_page_names_exist():
    named = re.findall(r"^\| `(?:await )?bridge\.(\w+)\(", PAGE, re.MULTILINE)
    assert named == ["write", "write_pages", "attach", "call", "submit", "run", "register", "register_async"]
    assert all(callable(getattr(bridges.Bridge, name)) for name in named)
