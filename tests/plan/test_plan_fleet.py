"""`tools/plan_fleet.py`: docs/planner.md has the tables that it prints, as far as these are the same on any machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import plan_fleet

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def test_the_page_has_the_rounds_of_large_groups(capsys):
    plan_fleet.moe((128,))
    rows = [line.rpartition("|")[0].rpartition("|")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == len(plan_fleet.EP_NICS)
    assert [row for row in rows if row.strip() not in PAGE] == []


def test_the_page_has_the_pages_of_all_groups(capsys):
    plan_fleet._pages(500)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 5
    assert [row for row in rows if row not in PAGE] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["moe", "--ranks", "12", "16"], "ranks=12: expected a multiple of node=8"),
        (["weights", "--ranks", "1000", "64"], "expected a multiple of 1024 and one of 64 for weights"),
        (["prices"], "invalid choice: 'prices'"),
    ],
)
def test_wrong_arguments_of_a_fleet_get_a_sentence(capsys, monkeypatch, arguments, said):
    monkeypatch.setattr(sys, "argv", ["plan_fleet.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        plan_fleet.main()
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
