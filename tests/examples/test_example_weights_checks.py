"""What the demo of weight updates compares after each of them: a wrong byte, logit, text or version ends it."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiote.demo import DemoError

MOE = Path(__file__).parents[2] / "examples" / "weights" / "moe"


@pytest.fixture
def run(monkeypatch) -> ModuleType:
    """Return the demo's module, which needs no torch itself."""
    monkeypatch.syspath_prepend(str(MOE))
    spec = importlib.util.spec_from_file_location("weights_moe_run", MOE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "task")
    return module


def said() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what two trainers and two inference ranks say in a version where all is well."""
    digests = [{"w[0]": "a", "w[1]": "b"}, {"w[0]": "c", "w[1]": "d"}]
    halves = [[{f"w[{e}]": each[f"w[{e}]"]} for each in digests] for e in range(2)]
    trained = [{"digests": half, "logits": [[1.0, 2.0]]} for half in halves]
    served = [{"digests": each, "logits": [[1.0, 2.00001]], "text": "x", "version": 7} for each in digests]
    return trained, served


def test_what_is_right_passes(run):
    assert run.checked(*said(), 7) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (
            1,
            {"digests": {"w[0]": "c", "w[1]": "x"}},
            r"inference rank 1 has other bytes than the trainers in version 7: \['w\[1\]'\]",
        ),
        (
            0,
            {"digests": {"w[0]": "a"}},
            r"inference rank 0 has other bytes than the trainers in version 7: \['w\[1\]'\]",
        ),
        (0, {"digests": {"w[0]": "a", "w[1]": "b", "v[]": "e"}}, "inference rank 0 has other bytes"),
        (1, {"version": 6}, "inference rank 1 has other bytes"),
        (1, {"text": "y"}, "generate different texts"),
        (0, {"logits": [[1.0, 2.001]]}, "logits of version 7 differ by 0.00"),
        (0, {"logits": [[1.0, float("nan")]]}, "logits of version 7 differ by nan"),
    ],
)
def test_what_is_wrong_is_named(run, rank, change, words):
    trained, served = copy.deepcopy(said())
    served[rank] |= change
    with pytest.raises(DemoError, match=words):
        run.checked(trained, served, 7)


def test_without_torch_it_says_what_to_do(run, monkeypatch, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.ended(None) == 2
    assert "needs torch: make demo-weights installs it" in capsys.readouterr().err
