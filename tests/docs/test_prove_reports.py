"""The tables of reports say what the reports say, and only whole reports without names get there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from aiote.cli.prove_report import Outcome, Report

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
SPEC = importlib.util.spec_from_file_location("prove_reports", ROOT / "tools" / "prove_reports.py")
tool = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tool  # dataclasses look there
SPEC.loader.exec_module(tool)

MACHINE = {"aiote": "0.2.0", "rdma devices": "mlx5_0: mlx5_core, MT4129", "nvidia driver": "none", "doctor": []}


def report(what="verbs", started="2027-01-02T03:04:05Z", status="passed", **more):
    told = Report(what, what, {**MACHINE, **more.pop("machine", {})}, started, **more)
    told.outcomes.append(Outcome("writes", "a write changes only its target", status))
    return told


def test_the_pages_are_as_the_reports_say():
    assert [path for path, text in tool.pages().items() if path.read_text() != text] == []


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout with both pages, and no reports."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/hardware.md"):
        (tmp_path / name).write_text(f"before\n{tool.START}old\n{tool.END}after\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def test_one_command_adds_a_report_to_both_pages(checkout, tmp_path, capsys):
    path = tmp_path / "sent.json"
    report(far={**MACHINE, "host": "another"}).write(path)
    assert tool.main(["check"]) == 1
    assert tool.main(["add", str(path)]) == 0
    assert tool.main(["check"]) == 0
    assert (checkout / "docs/reports/verbs-2027-01-02T030405Z.json").exists()
    page = (checkout / "docs/hardware.md").read_text()
    assert "| on two machines | mlx5_0: mlx5_core, MT4129 | 1 | 0 | 0 |" in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "passed 2027-01-02, on two machines" in (checkout / "README.md").read_text()
    capsys.readouterr()


def row_of(*reports, rail="`verbs` (libibverbs"):
    """Return the cells of a rail: on hardware, on software, on a simulator."""
    told = [each.told() for each in reports]
    line = next(line for line in tool.readme_table(told).splitlines() if rail in line)
    return [cell.strip() for cell in line.split("|")[2:5]]


def test_software_is_not_hardware():
    soft = report(machine={"rdma devices": "rxe0: software, soft-RoCE"})
    assert row_of(soft) == ["never", "soft-RoCE in a guest; passed 2027-01-02, in one process", ""]
    assert row_of(soft, report(status="failed"))[0] == "FAILED 2027-01-02, in one process"


@pytest.mark.parametrize(
    ("what", "rail", "device"),
    [
        ("efa", "`efa` of libfabric", {"rdma devices": "rdmap<address>: efa, 100 Gb/sec"}),
        ("cuda", "GPU memory", {"nvidia driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module"}),
    ],
)
def test_a_stand_in_is_not_hardware(what, rail, device, checkout, tmp_path):
    without, passed = row_of(rail=rail), "passed 2027-01-02, in one process"
    imitated = report(what, machine={"rdma devices": "none"})
    assert row_of(imitated, rail=rail) == [*without[:2], f"{without[2]}; {passed}"]
    assert row_of(report(what, machine=device), rail=rail) == [passed, *without[1:]]
    imitated.write(tmp_path / "sent.json")
    assert tool.main(["add", str(tmp_path / "sent.json")]) == 0
    assert "| a stand-in | 1 | 0 | 0 |" in (checkout / "docs/hardware.md").read_text()


def test_the_newest_whole_report_counts():
    last = report(started="2027-03-01T00:00:00Z")
    partial = report(started="2027-04-01T00:00:00Z", partial="interrupted during pages")
    untried = report(started="2027-05-01T00:00:00Z", status="not run")
    assert row_of(report(), last, partial, untried)[0] == "passed 2027-03-01, in one process"


@pytest.mark.parametrize("change", [{"machine": {"host": "10.31.7.254"}}, {"format": 1}, {"what": 7}])
def test_other_files_are_refused(change, checkout, tmp_path, capsys):
    path = tmp_path / "sent.json"
    path.write_text(json.dumps({**report().told(), **change}))
    assert tool.main(["add", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (checkout / "docs" / "reports").exists()
