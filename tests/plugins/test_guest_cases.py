"""What is left out in the guest is a case of a test that stays, and of no other provider."""

from __future__ import annotations

import sys

import pytest

from support import TESTS

INI = "[pytest]\naddopts = --strict-markers\nmarkers =\n  verbs_once\n"
SOURCE = """
import pytest

from support import TESTS

@pytest.mark.parametrize("provider", ["tcp", "verbs"])
@pytest.mark.parametrize("progress", ["adaptive", "thread"])
@pytest.mark.verbs_once("kind", "says")
@pytest.mark.parametrize(("kind", "says"), [("a", 1), ("b", 2), ("c", 3)])
def test_spared(provider, progress, kind, says):
    pass

@pytest.mark.parametrize("kind", ["a", "b"])
@pytest.mark.parametrize("provider", ["verbs"])
def test_whole(provider, kind):
    pass
"""


@pytest.mark.parametrize("guest", [True, False], ids=["guest", "elsewhere"])
def test_the_first_value_of_the_parameters_stays(guest, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("RDMA_VM", "1")
    if not guest:
        monkeypatch.delenv("RDMA_VM")
    pytester.makeini(INI)
    pytester.makeconftest("pytest_plugins = ['support.plugins.guest_cases']")
    pytester.makepyfile(SOURCE)
    result = pytester.run(sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")
    found = [line.partition("::")[2] for line in result.outlines if "::" in line]
    over_tcp = [f"test_spared[{kind}-{way}-tcp]" for kind in ("a-1", "b-2", "c-3") for way in ("adaptive", "thread")]
    spared = ["test_spared[a-1-adaptive-verbs]", "test_spared[a-1-thread-verbs]"]
    whole = ["test_whole[verbs-a]", "test_whole[verbs-b]"]
    if guest:
        assert sorted(found) == sorted(over_tcp + spared + whole)
    else:
        assert len(found) == 14
