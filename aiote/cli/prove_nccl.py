"""The link's own speed in the report of `aiote prove`: NVIDIA's nccl-tests between two GPUs, where they are installed.

For `verbs` and `efa` NCCL may use neither NVLink nor shared memory, so that the bytes cross the NICs; for `cuda` it may
choose. NCCL moves GPU memory both ways at once, aiote's benchmark host memory one way: the ratio compares aiote with
the link, and not two programs that do the same work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiote.cli import prove_suites
from aiote.cli.prove_report import Outcome
from aiote.machine.ports import choose_ports, read_ports

if TYPE_CHECKING:
    from aiote.cli.prove_run import Run, Subject

__all__ = ["CLAIM", "NAME", "SUBJECTS", "NcclError", "bandwidths", "link", "network"]

NAME, CLAIM = "link", "figures: NCCL over the same link"
SUBJECTS = ("cuda", "efa", "verbs")
PROGRAMS = ("sendrecv_perf", "alltoall_perf")
SIZES = ("-b", "1M", "-e", "64M", "-f", "64", "-g", "2")
"""1 MiB and 64 MiB, between two GPUs of one process."""
COMPARED = 1 << 20
NETWORKS = {"efa": "Libfabric", "verbs": "IB"}
"""A part of the names of NCCL's networks that cross these NICs. Without a plugin for EFA NCCL takes sockets."""
GIB_IN_GB = (1 << 30) / 1e9
RUN_S = 120.0


class NcclError(Exception):
    """A program failed, or printed no usable figure; the text says why."""


def link(run: Run) -> Outcome:
    """Run the installed programs. Without a figure the outcome is "not run", with the reason: no promise is broken."""
    started = time.monotonic()
    figures: dict[str, float] = {}
    told: list[str] = []
    if run.subject.place is not None:
        return Outcome(NAME, CLAIM, "not run", "between machines nccl-tests need MPI; run them by hand")
    installed = [program for program in PROGRAMS if shutil.which(program)]
    if not installed:
        return Outcome(NAME, CLAIM, "not run", "nccl-tests (sendrecv_perf, alltoall_perf) are not installed")
    for program in installed:
        try:
            said, over = _output(program, run)
            figures |= {f"{program}, {size} B, GB/s": value for size, value in bandwidths(said).items()}
            told.append(f"{program} over NCCL's network {over}" if run.subject.what in NETWORKS else program)
        except NcclError as error:
            told.append(f"{program}: {error}")
    own, whole = run.written.get(COMPARED), figures.get(f"sendrecv_perf, {COMPARED} B, GB/s")
    if own and whole:
        figures["write of 1 MiB, aiote / sendrecv_perf"] = own * GIB_IN_GB / whole
    return Outcome(
        NAME, CLAIM, "passed" if figures else "not run", "; ".join(told), time.monotonic() - started, figures
    )


def _output(program: str, run: Run) -> tuple[str, str]:
    """Run a program; return what it printed, and NCCL's network. Raises NcclError, also if that was not the NICs."""
    what = run.subject.what
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl"
        told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}  # apart, so that it splits no row of the table
        try:
            done = subprocess.run(
                [program, *SIZES],
                env={**os.environ, **told, **_settings(run.subject)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(min(RUN_S, run.left_s), 1.0),
            )
        except subprocess.TimeoutExpired as error:
            raise NcclError(prove_suites.OVER if run.left_s <= 0 else f"was not over after {RUN_S:g} s") from error
        over = network(log.read_text(errors="replace")) if log.exists() else ""
    if done.returncode:
        raise NcclError(f"ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    if NETWORKS.get(what, "") not in over:
        raise NcclError(f"NCCL used its network {over!r}, which does not cross these NICs")
    return done.stdout, over


def _settings(subject: Subject) -> dict[str, str]:
    """Return NCCL's variables for a subject: bytes between the GPUs cross the NICs that are proven."""
    if subject.what not in NETWORKS:
        return {}
    named = {}
    if subject.what == "verbs":
        names = (*(subject.rails or ()), *(subject.peer_rails or ()))
        nics = sorted({f"{port.device}:{port.number}" for port in choose_ports(names, "", read_ports())})
        named["NCCL_IB_HCA"] = "=" + ",".join(nics)
    return {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", **named}


def network(said: str) -> str:
    """Return the name of the network that NCCL chose, by its log; an empty string if it has none."""
    found = re.findall(r"NCCL INFO Using network (.+)$", said, re.MULTILINE)
    return str(found[-1]).strip() if found else ""


def bandwidths(said: str) -> dict[int, float]:
    """Parse the output of a program of nccl-tests: GB/s of the bus by the bytes, out of place.

    The columns are counted from the right, because old versions leave "redop" and "root" blank. Raises NcclError if
    there are no figures, or if the program found wrong bytes.
    """
    column, found = 0, dict[int, float]()
    for line in said.splitlines():
        fields = line.lstrip("# ").split()
        if line.startswith("#") and fields[:2] == ["size", "count"] and "busbw" in fields:
            column = fields.index("busbw") - len(fields)
        elif column and fields and fields[0].isdigit() and len(fields) >= 1 - column:
            try:
                found[int(fields[0])] = float(fields[column])
            except ValueError:
                continue
    wrong = re.search(r"^# Out of bounds values : \d+ FAILED", said, re.MULTILINE)
    if wrong:
        raise NcclError(f"found wrong bytes: {wrong[0].lstrip('# ')}")
    if not any(found.values()):
        raise NcclError(f"no figures in its output: {said.strip()[-200:]!r}")
    return found
