"""The ratios in the report of `aiote prove`: aiote beside plain C, perftest, and libfabric's fi_pingpong."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiote.bench.contestants import OWN
from aiote.cli import prove_suites
from aiote.cli.prove_report import Outcome

if TYPE_CHECKING:
    from aiote.cli.prove_run import Run

__all__ = ["CLAIM", "NAME", "beside", "pingpong_us", "ratios"]

NAME, CLAIM = "ratios", "figures: aiote beside the raw library"
COMPARED = {"write": "1M", "latency": "8"}
PINGPONG = "fi_pingpong"
ROW = re.compile(r"^8\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+([0-9.]+)\s+\S+$", re.MULTILINE)
"""fi_pingpong: bytes, #sent, #ack, total, time, MB/sec, usec/xfer, Mxfers/sec."""
STARTS_S = 10.0


def beside(run: Run) -> Outcome:
    """Measure aiote and the raw library in turns. If no tool fits, the outcome says why."""
    subject, started = run.subject, time.monotonic()
    if subject.what in ("sim", "cuda"):
        return Outcome(NAME, CLAIM, "not run", f"no tool measures {subject.what} beside aiote")
    if subject.what in ("local", "socket"):
        command = f"aiote bench compare --provider {subject.what}"
        return Outcome(NAME, CLAIM, "not run", f"they are about the host, not about a rail; {command} measures them")
    if subject.place is not None:
        return Outcome(NAME, CLAIM, "not run", "the tools start both sides; run the command without --connect for them")
    records: list[dict[str, Any]] = []
    for op, sizes in COMPARED.items():
        found = _compared(op, sizes, subject.provider, ",".join(subject.rails or []), run.left_s)
        if isinstance(found, str):
            # Another program's failure breaks no promise of aiote's.
            return Outcome(NAME, CLAIM, "not run", found, time.monotonic() - started)
        records += found
    figures, tools = ratios(records), sorted({record["contestant"] for record in records} - {"aiote"})
    if subject.provider not in OWN and shutil.which(PINGPONG):
        own = [record["value"]["median"] for record in records if _is(record, "aiote", "latency")]
        if (theirs := _pingpong(subject.provider, run.left_s)) and own:
            # fi_pingpong prints the mean of one way, aiote's figure is the median of there and back.
            figures["latency, aiote / fi_pingpong"] = own[0] / 2 / theirs
            tools.append(PINGPONG)
    if not figures:
        return Outcome(
            NAME, CLAIM, "not run", "no tool that measures this rail is installed", time.monotonic() - started
        )
    told = f"beside {', '.join(tools)}; above 1 is faster for write, slower for latency"
    return Outcome(NAME, CLAIM, "passed", told, time.monotonic() - started, figures)


def ratios(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return aiote's medians divided by those of each other contestant, by names that say which."""
    figures = {}
    for record in records:
        op, other = record["op"], record["contestant"]
        own = [each["value"]["median"] for each in records if _is(each, "aiote", op)]
        if other != "aiote" and own and record["value"]["median"]:
            figures[f"{op}, aiote / {other}"] = own[0] / record["value"]["median"]
    return figures


def _is(record: dict[str, Any], contestant: str, op: str) -> bool:
    return bool(record["contestant"] == contestant and record["op"] == op)


def _compared(op: str, sizes: str, provider: str, rails: str, limit_s: float) -> list[dict[str, Any]] | str:
    """Return the records of `aiote bench compare`, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        chosen = ["--provider", provider, "--sizes", sizes, "--runs", str(prove_suites.RUNS), "--json", str(file)]
        command = [sys.executable, "-P", "-m", "aiote", "bench", "compare", op, *chosen]
        command += ["--rails", rails] if rails else []
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=max(limit_s, 1.0)
            )
        except subprocess.TimeoutExpired:
            return prove_suites.OVER
        if done.returncode or not file.exists():
            return (done.stderr or done.stdout).strip()[-1000:]
        records: list[dict[str, Any]] = json.loads(file.read_text())["records"]
        return records


def _pingpong(provider: str, limit_s: float) -> float:
    """Run both sides of fi_pingpong here; return its microseconds of one way, or 0 if it does not run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = [PINGPONG, "-p", provider, "-e", "rdm", "-S", "8", "-I", "1000"]
    with subprocess.Popen([*common, "-B", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            ends = time.monotonic() + min(STARTS_S, max(limit_s, 1.0))
            while time.monotonic() < ends and server.poll() is None:
                client = subprocess.run(
                    [*common, "-P", port, "127.0.0.1"], capture_output=True, text=True, timeout=60, check=False
                )
                if client.returncode == 0:
                    return pingpong_us(client.stdout)
                time.sleep(0.2)
        except subprocess.TimeoutExpired:
            pass
        finally:
            server.kill()
    return 0.0


def pingpong_us(said: str) -> float:
    """Parse the microseconds of one way of 8 bytes from fi_pingpong's output; 0 if there are none."""
    rows = ROW.findall(said)
    return float(rows[-1]) if rows else 0.0
