"""The results of `aiote prove`, as text and as JSON: the machine, each check, each figure."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import aiote
from aiote.config import variables_set
from aiote.rails.diagnosis import examine, gather
from aiote.rails.library import library_summary

__all__ = ["FORMAT", "Outcome", "Report", "machine"]

FORMAT = 1
OTHERS = ("FI_", "IBV_", "CUDA_", "RDMA_VM")
"""Prefixes of environment variables that change how libraries behave, and so the results."""
Status = Literal["passed", "failed", "not run"]
LIBRARIES = ("anyio", "cupy-cuda12x", "cupy-cuda13x", "msgspec", "numpy", "torch")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check. `detail`: the observation, or why it failed or was not run; names in `figures` have
    units.
    """

    name: str
    claim: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the outcome as one line of text."""
        figures = "".join(f"; {name} {value:.4g}" for name, value in self.figures.items())
        told = f": {self.detail}" if self.detail else ""
        return f"{self.status:8} {self.name:20} {self.claim}{told}{figures}"


@dataclass(slots=True)
class Report:
    """The results of one run. `missing` says why there was no device, or is empty."""

    what: str
    provider: str
    machine: dict[str, Any]
    started: str
    outcomes: list[Outcome] = field(default_factory=list)
    missing: str = ""

    def count(self, status: Status) -> int:
        """Return how many checks ended with a status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_status(self) -> int:
        """1 if a check failed, 2 if no check passed, because then there is no proof; else 0."""
        return 1 if self.count("failed") else 0 if self.count("passed") else 2

    def conclusion(self) -> str:
        """Return the last line of the report."""
        counted = ", ".join(f"{self.count(each)} {each}" for each in ("passed", "failed", "not run"))
        verdict = {0: "PROVEN as far as it was run", 1: "FAILED", 2: "NOTHING PROVEN"}[self.exit_status]
        return f"{self.what}: {verdict}: {counted}" + (f" ({self.missing})" if self.missing else "")

    def text(self) -> str:
        """Return the report as text."""
        facts = [f"{name}: {value}" for name, value in self.machine.items() if not isinstance(value, list)]
        findings = [f"doctor: {each['level']}: {each['what']}" for each in self.machine["doctor"]]
        lines = [f"aiote prove {self.what}, {self.started}, provider {self.provider}", *facts, *findings, ""]
        return "\n".join([*lines, *(outcome.line() for outcome in self.outcomes), "", self.conclusion(), ""])

    def write(self, path: Path) -> Path:
        """Write the JSON to `path` and the text beside it; return the text's path."""
        told = {
            "format": FORMAT,
            **dataclasses.asdict(self),
            "conclusion": self.conclusion(),
            "exit_status": self.exit_status,
        }
        path.write_text(json.dumps(told, indent=1) + "\n")
        beside = path.with_suffix(".txt")
        beside.write_text(self.text())
        return beside


def machine() -> dict[str, Any]:
    """Return what the results depend on: processor, kernel, versions, devices, and the findings of `aiote doctor`."""
    facts = gather(library=aiote.EngineConfig().libfabric)
    return {
        "host": socket.gethostname(),
        "system": " ".join((platform.system(), platform.release(), platform.machine())),
        "processors": os.cpu_count() or 0,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "aiote": metadata.version("aiote"),
        "libfabric": library_summary(aiote.EngineConfig().libfabric),
        "libraries": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name))),
        "rdma devices": ", ".join(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))) or "none",
        "nvidia driver": _first_line(Path("/proc/driver/nvidia/version")) or "none",
        "settings": " ".join(f"{name}={value}" for name, value in _settings().items()) or "none",
        "doctor": [dataclasses.asdict(finding) for finding in examine(facts)],
    }


def now() -> str:
    """Return the current UTC time in the report's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _settings() -> dict[str, str]:
    others = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(OTHERS)}
    return {**variables_set(), **others}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""
