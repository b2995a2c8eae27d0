"""`aiote prove` finds a promise that is broken, says what it did not run, and is never green without a device."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from aiote.cli import prove_raw, prove_run, prove_suites
from aiote.cli.app import app
from aiote.cli.prove_report import Outcome, Report, now
from aiote.machine.ports import read_ports
from aiote.testing import Fabric
from aiote.testing.contract import CHECKS, Broken, Check, EnginePair, FarSide, HostMemory, RailPull, adversity
from support.machine import LONG

ROOT = Path(__file__).parents[2]
QUICK = ("--no-bench", "--no-suites")
NAMES = [check.name for check in CHECKS]
PROCESSES = ["killed-peer", "stopped-peer"]
PULLED = "pulled-rail"
WITHOUT_FLAG = {**dict.fromkeys(NAMES, "passed"), PULLED: "not run"}
READS_MEMORY = ["writes", "counts-follow-data", "reads", "pages", "no-late-writes", "leases"]


def proven(folder: Path, what: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the command in a process of its own; return its status, its report, and the report's text."""
    path = folder / "report.json"
    command = [sys.executable, "-P", "-m", "aiote", "prove", what, *options, "--report", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.stderr == "", done.stdout
    return done.returncode, json.loads(path.read_text()), path.with_suffix(".txt").read_text()


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}


@pytest.mark.parametrize(
    "what",
    [
        "local",
        "socket",
        pytest.param("tcp", marks=pytest.mark.libfabric),
        pytest.param("verbs", marks=pytest.mark.needs_rdma),
    ],
)
def test_every_check_passes_over(what, tmp_path):
    status, report, text = proven(tmp_path, what, *QUICK)
    assert statuses(report) == WITHOUT_FLAG, text
    assert (status, report["exit_status"], report["provider"]) == (0, 0, what)
    assert {"system", "python", "aiote", "libfabric", "doctor"} <= report["machine"].keys()
    assert "PROVEN as far as it was run: 12 passed, 0 failed, 1 not run" in text
    assert "comes back: needs --pull-rail" in text


def test_over_the_simulated_network_everything_is_run_but_a_killed_process(tmp_path):
    status, report, _ = proven(tmp_path, "sim", *QUICK)
    assert statuses(report) == {**WITHOUT_FLAG, **dict.fromkeys(PROCESSES, "not run")}
    assert status == 0


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("sim", "passed"),
        ("socket", "passed"),
        pytest.param("tcp", "passed", marks=pytest.mark.libfabric),
        pytest.param("verbs", "passed", marks=pytest.mark.needs_rdma),
        ("local", "not run"),
    ],
)
def test_with_the_flag_a_rail_is_lost_over(what, found, tmp_path):
    status, report, text = proven(tmp_path, what, *QUICK, "--pull-rail")
    assert (status, statuses(report)[PULLED]) == (0, found), text
    detail = next(outcome["detail"] for outcome in report["outcomes"] if outcome["name"] == PULLED)
    assert "--pull-rail" not in detail


def test_a_rail_that_is_not_lost_is_found(monkeypatch):
    """A pull that loses nothing: the check waits for the engine to notice, and says that it did not."""

    @contextlib.asynccontextmanager
    async def idle(world: EnginePair) -> AsyncIterator[str]:
        yield "nothing was pulled"

    monkeypatch.setattr(adversity, "NOTICE_S", 0)
    with pytest.raises(Broken, match="did not notice"):
        ask(CHECKS[NAMES.index(PULLED)], HostMemory(), pull=idle)


@pytest.mark.libfabric
@pytest.mark.parametrize("what", ["cxi", "efa", "verbs"])
def test_a_missing_device_is_said_and_never_green(what, tmp_path):
    if what == "verbs" and read_ports():
        pytest.skip("this machine has RDMA devices")
    status, report, text = proven(tmp_path, what)
    assert set(statuses(report).values()) == {"not run"}
    assert (status, report["exit_status"]) == (2, 2)
    assert "NOTHING PROVEN: 0 passed, 0 failed" in text
    assert all(outcome["detail"] for outcome in report["outcomes"])


def test_a_check_that_fails_makes_the_exit_status_1(monkeypatch, tmp_path):
    async def broken(world: EnginePair) -> str:
        raise Broken("bytes were lost")

    async def stumbles(world: EnginePair) -> str:
        raise LookupError("what nobody thought of")

    told = [Check("one", "nothing is lost", broken), Check("two", "nothing else is", stumbles), CHECKS[0]]
    monkeypatch.setattr(prove_run, "CHECKS", told)
    path = tmp_path / "r.json"
    done = CliRunner().invoke(app, ["prove", "sim", *QUICK, "--report", str(path)])
    report = json.loads(path.read_text())
    assert (done.exit_code, list(statuses(report).values())) == (1, ["failed", "failed", "passed"])
    assert "failed   one" in done.output
    assert "bytes were lost" in done.output
    assert "LookupError: what nobody thought of" in done.output
    assert "sim: FAILED: 1 passed, 2 failed, 0 not run" in path.with_suffix(".txt").read_text()


class Damaged(HostMemory):
    """ArrayMemory whose last byte reads as another one."""

    def bytes_of(self, array: Any) -> Any:
        seen = super().bytes_of(array)
        seen[-1] ^= 0x80
        return seen


def ask(check: Check, memory: HostMemory, *, late: int = 0, pull: RailPull | None = None) -> str:
    """Run one check on two simulated engines; `late` more counts come at its end, on each immediate that it uses."""

    async def run() -> str:
        with Fabric(seed=1, rails=2) as fabric:
            async with fabric.open_engine() as left, fabric.open_engine() as right:
                await left.connect(right.address)
                kind = Late if late else EnginePair
                return await check.run(kind(left, FarSide(right, memory).ask, str(right.address), memory, pull=pull))

    return anyio.run(run)


class Late(EnginePair):
    """Engines of which one counts once more than it was told to."""

    async def settle(self, times: int = 5) -> None:
        await super().settle(times)
        for number in LATE:
            await self.left.write_imm(None, self.address, number)
        await super().settle(times)


LATE = [9, *random.Random(1).sample(range(1 << 28), 20)]
"""The immediates of both checks that count."""


@pytest.mark.parametrize("name", READS_MEMORY)
def test_bytes_that_are_wrong_are_found_by(name):
    with pytest.raises(Broken):
        ask(CHECKS[NAMES.index(name)], Damaged())


@pytest.mark.parametrize("name", ["exact-counts", "pages"])
def test_counts_that_are_too_many_are_found_by(name):
    assert ask(CHECKS[NAMES.index(name)], HostMemory())
    with pytest.raises(Broken, match="more"):
        ask(CHECKS[NAMES.index(name)], HostMemory(), late=1)


def test_a_suite_runs_the_tests_of_a_checkout_over_one_provider():
    outcome = prove_suites.suite("contract-suite", ROOT, "sim", 600, ["-k", "test_a_read_fetches_exactly"])
    assert (outcome.status, outcome.detail) == ("passed", "1 tests passed, 0 failed, 0 skipped")


def test_a_suite_that_has_no_test_of_a_provider_is_not_run():
    outcome = prove_suites.suite("contract-suite", ROOT, "nonesuch", 600)
    assert outcome.status == "not run"
    assert "--prove nonesuch" in outcome.detail
    without = prove_suites.suite("contract-suite", None, "sim", 600)
    assert (without.status, "--checkout" in without.detail) == ("not run", True)


@pytest.mark.needs_rdma
@pytest.mark.timeout(1000)
def test_a_benchmark_runs_over_verbs(monkeypatch):
    """At full length all of them, and the tests, until their time is over. The figures say nothing about a NIC."""
    monkeypatch.chdir(ROOT)
    rail = next(port.name for port in read_ports() if port.up)
    for op in prove_suites.BENCHED if LONG else ("latency",):
        measured = prove_suites.bench(op, "verbs", rail, 400)
        assert (measured.status, bool(measured.figures)) == ("passed", True), measured.detail
    for name in ("contract-suite", "engine-suite", "adversity-suite") if LONG else ():
        tested = prove_suites.suite(name, ROOT, "verbs", 200)
        assert tested.status == "passed" or tested.detail == prove_suites.OVER, tested.detail


def test_a_report_hides_keys_and_tells_other_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("AIOTE_CLUSTER_KEY", "a secret of sixteen bytes and more")
    monkeypatch.setenv("AIOTE_CONNECT_TIMEOUT", "77")
    _, report, text = proven(tmp_path, "cxi", *QUICK)
    assert "a secret" not in text + json.dumps(report)
    assert "AIOTE_CONNECT_TIMEOUT=77" in report["machine"]["settings"]


def test_nothing_run_is_not_success():
    report = Report("efa", "efa", {"doctor": []}, now())
    report.outcomes.append(Outcome("writes", "a write arrives", "not run", "no device"))
    assert report.exit_status == 2
    report.outcomes.append(Outcome("reads", "a read fetches", "passed"))
    assert report.exit_status == 0
    report.outcomes.append(Outcome("pages", "pages arrive", "failed"))
    assert report.exit_status == 1
    report.outcomes.pop()
    report.partial = "interrupted during pages"
    assert report.exit_status == 2
    assert "efa: PARTIAL: 1 passed, 0 failed, 1 not run (interrupted during pages)" in report.text()


def test_a_suite_that_outlasts_the_run_is_not_a_failure():
    outcome = prove_suites.suite("contract-suite", ROOT, "sim", 0.001)
    assert (outcome.status, outcome.detail) == ("not run", prove_suites.OVER)


def test_a_part_after_the_end_of_the_run_is_not_run():
    run = prove_run.Run(prove_run.Subject("sim", "sim", None, None, HostMemory()))
    first = next(prove_run.parts(run, None, bench=False, suites=False))
    run.started -= prove_run.BUDGET_S
    outcome = first.run(run)
    assert (outcome.status, outcome.detail) == ("not run", prove_suites.OVER)
    assert prove_run.Run(run.subject, full=True).left_s > prove_run.BUDGET_S


def test_ratios_are_of_the_same_work():
    records = [
        {"contestant": name, "op": op, "value": {"median": value}}
        for name, op, value in (("aiote", "write", 6.0), ("raw", "write", 8.0), ("aiote", "latency", 9.0))
    ]
    assert prove_raw.ratios(records) == {"write, aiote / raw": 0.75}


@pytest.mark.parametrize("what", ["local", "socket", "sim", "cuda"])
def test_without_a_tool_there_is_no_ratio(what):
    run = prove_run.Run(prove_run.Subject(what, what, None, None, HostMemory()))
    outcome = prove_raw.beside(run)
    assert (outcome.status, outcome.figures) == ("not run", {})


@pytest.mark.parametrize("provider", ["carrier-pigeon", "null"])
def test_a_tool_that_fails_breaks_no_promise(provider):
    outcome = prove_raw.beside(prove_run.Run(prove_run.Subject("tcp", provider, None, None, HostMemory())))
    assert outcome.status == "not run"
    assert outcome.detail


def test_the_output_of_fi_pingpong_is_read():
    head = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
    row = "8       1k      =1k      15k         1.60s      0.01     797.82       0.00\n"
    assert prove_raw.pingpong_us(head + row) == 797.82
    assert prove_raw.pingpong_us("fi_getinfo: -61\n") == 0
