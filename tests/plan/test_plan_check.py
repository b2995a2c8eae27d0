"""`tools/plan_check.py`: it measures NICs, runs each service in processes of its own, and states the plan's error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import plan_check

from aiote.plan import nics_of

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

ROOT = Path(__file__).parents[2]
SMALL = plan_check.Sizes(runs=2, layers=2, tokens=64, rows=64, batch=8)


def file_of(folder: Path, gib_s: float) -> str:
    """Write what `aiote bench --json` would have written."""
    usual = {"contestant": "aiote", "provider": "local", "library": "", "size": 8, "runs": 3}
    several = (("write", gib_s), ("latency", 10.0), ("rate", 2e5))
    path = folder / f"{gib_s}.json"
    path.write_text(json.dumps({"records": [{**usual, "op": op, "value": {"median": value}} for op, value in several]}))
    return str(path)


@pytest.mark.timeout(300)
def test_what_bench_writes_is_a_model_of_nics(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_check, "BENCHED", (("write", "64K"), ("latency", "8"), ("rate", "8")))
    nics = plan_check.benched(tmp_path, 0.01, 1)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["records"] for name in ("write", "rate")}
    assert nics.model.gbps == pytest.approx(found["write"][0]["value"]["median"] * 2**33 / 1e9)
    assert nics.model.operation_us == pytest.approx(1e6 / found["rate"][0]["value"]["median"])
    assert nics.source.startswith("measured, ")


@pytest.mark.timeout(300)
def test_each_service_is_run_and_has_its_error(tmp_path):
    nics, out = file_of(tmp_path, 2.0), tmp_path / "out.json"
    sizes = [f"--{name}={value}" for name, value in SMALL._asdict().items() if name != "rows"] + ["--rows", "64", "128"]
    command = [sys.executable, "-P", str(ROOT / "tools" / "plan_check.py"), "--nics", nics, *sizes, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["what"].partition(":")[0] for row in found["rows"]] == ["kvcache", "weights", "weights", "moe"]
    for row in found["rows"]:
        assert row["planned"] > 0
        assert row["measured"] > 0
        assert row["error"] == pytest.approx(row["planned"] / row["measured"] - 1)
    assert found["model"]["gbps"] == nics_of(nics).model.gbps
    assert done.stdout.count("\n| ") == 5


@pytest.mark.parametrize("planned", [check[2] for check in plan_check.CHECKS], ids=["kvcache", "weights", "moe"])
def test_the_plans_follow_the_measured_nics(tmp_path, planned):
    fast, slow = (planned(nics_of(file_of(tmp_path, rate)), SMALL) for rate in (2.0, 0.02))
    assert slow > 1.5 * fast


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "3"], "--rows: a multiple of 2"),
        (["--runs", "0"], "expected 1 or more"),
        (["--tokens", "64", "0"], "expected 1 or more"),
        (["--nics", "no.json"], "nics='no.json': expected one of"),
    ],
)
def test_wrong_arguments_of_the_check_get_a_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as raised:
        plan_check.main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
