"""A run that fails ends with what failed and why, the seed, the load, and how to repeat it; so does `make test`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from test_reports import Load, Outcome, concluded, read  # noqa: E402

SOURCE = """
import pytest

@pytest.mark.parametrize("seed", [4711])
def test_of_a_seed(seed):
    counted = 3
    assert counted == 4, "a count is wrong"

def test_whose_fixture_fails(tmp_path_nonsense):
    pass

@pytest.mark.parametrize("name", ["it's", "two words"])
def test_of_a_name(name):
    assert name == "it's"

def test_in_virtual_time():
    error = ValueError("too late")
    error.add_note("in virtual time, with seed 99")
    raise error
"""


@pytest.fixture
def failed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> tuple[pytest.RunResult, Path]:
    """Run some tests that fail; return what was printed, and the report."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("AIOTE_LIBFABRIC", "/a place/libfabric.so.1")
    pytester.makeconftest("pytest_plugins = ['support.plugins.combinations', 'support.plugins.failure_reports']")
    pytester.makepyfile(test_it=SOURCE)
    report = pytester.path / "report.xml"
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}")
    return result, report


def test_the_end_of_a_run_tells_of_each_failure(failed):
    text = failed[0].outlines
    end = text[next(number for number, line in enumerate(text) if "what failed: 4" in line) :]
    assert "FAILED test_it.py::test_of_a_seed[4711]" in end
    assert any("a count is wrong" in line for line in end)
    assert [line.split()[1] for line in end if line.startswith("  seed:")] == ["4711", "99"]
    assert sum(line.startswith("  load:") for line in end) == 4
    (again,) = [line for line in end if line.startswith("  again:") and "test_of_a_name" in line]
    assert again.endswith("-P -m pytest 'test_it.py::test_of_a_name[two words]'")
    assert "AIOTE_LIBFABRIC='/a place/libfabric.so.1'" in again


def test_make_test_ends_with_the_same(failed, capsys):
    report = read(failed[1])
    assert report.counts == (1, 4, 0)
    assert report.combinations == (3, 3)
    with Load() as load:
        outcomes = [Outcome("a run", False, "", report=report), Outcome("another", True, "")]
    assert concluded(outcomes, load) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "total: 1 passed, 4 failed, 0 skipped"
    assert "3 of 3 ran" in said
    for name in ("test_of_a_seed[4711]", "test_whose_fixture_fails", "test_of_a_name[two words]"):
        assert f"FAILED test_it.py::{name}" in said
    assert said.index("a count is wrong") > said.index("load: ")
    assert "seed: 99" in " ".join(said.split())


@pytest.mark.parametrize("content", [None, "", "<testsuites><testsu"])
def test_a_missing_or_truncated_report_counts_nothing(content, tmp_path):
    path = tmp_path / "report.xml"
    if content is not None:
        path.write_text(content)
    assert read(path).counts == (0, 0, 0)
