"""docs/testing.md: its example runs as it stands, and its table says what the models give."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiote.testing.contract import CHECKS
from aiote.testing.tables import cells
from support.plugins.inner_pytest import INI

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
WORST = 0.07
AUTO = "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"


def test_the_example_runs(pytester: pytest.Pytester):
    text, _ = BLOCKS
    pytester.makepyfile(text)
    pytester.makeini(INI + AUTO)
    result = pytester.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=29)


def test_the_contract_s_checks_run_as_the_page_shows():
    done = subprocess.run([sys.executable, "-P", "-c", BLOCKS[1]], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    lost = ("killed-peer", "stopped-peer", "pulled-rail")
    assert said == [f"{check.name} {'not run' if check.name in lost else 'passed'}" for check in CHECKS]


def test_the_table_says_what_the_models_give():
    """Each published figure, the model's, and how much that is off."""
    rows = re.findall(
        r"^\| (\w+ \w+) \| (\d) x ([^|]+) \| (\d+) KiB \| (\d+) \| ([\d.]+) \| ([+-]\d+) % \|$", PAGE, re.M
    )
    told = {(row[0], row[2], int(row[3])): row for row in rows}
    simulated = list(cells())
    assert len(simulated) == len(told) == 16
    for cell in simulated:
        row = told[cell.what, cell.model.name, cell.size >> 10]
        assert (int(row[1]), int(row[4])) == (cell.rails, cell.published)
        assert float(row[5]) == pytest.approx(cell.simulated, rel=0.005)
        assert int(row[6]) == round(100 * cell.error)
        assert abs(cell.error) < WORST
