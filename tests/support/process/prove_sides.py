"""Both sides of `aiote prove` over two machines, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

QUICK = ("--no-bench", "--no-suites")
KEY, OTHER_KEY = "a secret of sixteen bytes and more", "another secret of sixteen bytes"
AIOTE = [sys.executable, "-P", "-m", "aiote", "prove"]


@contextlib.contextmanager
def listening(
    what: str, *options: str, at: str = "127.0.0.1:0", key: str = KEY, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a listener; yield it and the place that it says."""
    command = [*before, *AIOTE, what, "--listen", at, *options]
    environment = {**os.environ, "AIOTE_CLUSTER_KEY": key}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        try:
            said = one.stdout.readline()
            assert said.startswith("listening at"), one.stderr.read()
            yield one, said.split()[-1]
        finally:
            one.kill()


def connected(
    folder: Path,
    what: str,
    there: str,
    *options: str,
    key: str = KEY,
    before: Sequence[str] = (),
    after: str = "",
    act: Callable[[subprocess.Popen[str]], object] = id,
) -> tuple[int, dict[str, Any], str]:
    """Run the connecting side, `act` on it once the check `after` has passed; return status, report, errors."""
    path = folder / "report.json"
    command = [*before, *AIOTE, what, "--connect", there, *QUICK, *options, "--report", str(path)]
    environment = {**os.environ, "AIOTE_CLUSTER_KEY": key}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if after and line.startswith(f"passed   {after}"):
                act(run)
        said = run.stderr.read()
    return run.returncode, json.loads(path.read_text()) if path.exists() else {}, said


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}
