"""The results of `aiote prove`, as text and as JSON: the machine, each check, each figure.

A report contains no name and no address of a host, a device or a user: `aiote.cli.prove_private` replaces them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import aiote
from aiote.cli.prove_private import hidden_setting, names_here, private
from aiote.config import variables_set
from aiote.diagnosis.facts import with_efa
from aiote.diagnosis.findings import examine, gather
from aiote.rails.library import library_summary

__all__ = ["FORMAT", "Outcome", "Report", "Status", "boot", "machine", "now"]

FORMAT = 2
"""1 had the name of the host, and no `memory`, `far`, `partial` and `limit_s`."""
OTHERS = ("FI_", "IBV_", "CUDA_", "NCCL_", "EFA_STANDIN", "RDMA_VM")
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
    """The results of one run. `missing` says why there was no device, `partial` why the run ended early; both may be
    empty. `far` is the machine of the second engine, if that is another one. `names` must not be in what is written.
    """

    what: str
    provider: str
    machine: dict[str, Any]
    started: str
    memory: str = "host"
    outcomes: list[Outcome] = field(default_factory=list)
    missing: str = ""
    partial: str = ""
    far: dict[str, Any] | None = None
    limit_s: float = 0.0
    names: Iterable[str] = ()

    def count(self, status: Status) -> int:
        """Return how many checks ended with a status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_status(self) -> int:
        """1 if a check failed; 2 if the run ended early or no check passed, because then there is no proof; else 0."""
        return 1 if self.count("failed") else 0 if self.count("passed") and not self.partial else 2

    def conclusion(self) -> str:
        """Return the last line of the report."""
        counted = ", ".join(f"{self.count(each)} {each}" for each in ("passed", "failed", "not run"))
        verdict = {0: "PROVEN as far as it was run", 1: "FAILED", 2: "NOTHING PROVEN"}[self.exit_status]
        if self.partial:
            verdict = "PARTIAL, AND FAILED" if self.exit_status == 1 else "PARTIAL"
        reasons = "; ".join(filter(None, (self.partial, self.missing)))
        return f"{self.what}: {verdict}: {counted}" + (f" ({reasons})" if reasons else "")

    def told(self) -> dict[str, Any]:
        """Return the report as plain data, without names and addresses."""
        plain = dataclasses.asdict(dataclasses.replace(self, names=()))
        del plain["names"]
        names = names_here(self.names)
        for outcome in plain["outcomes"]:
            outcome["detail"] = private(outcome["detail"], names)
        more = {each: private(plain[each], names) for each in ("machine", "far", "missing", "partial")}
        ends = {"conclusion": private(self.conclusion(), names), "exit_status": self.exit_status}
        return {"format": FORMAT, **plain, **more, **ends}

    def text(self) -> str:
        """Return the report as text, without names and addresses."""
        told = self.told()
        lines = [
            f"aiote prove {self.what}, {self.started}, provider {self.provider}, memory of {self.memory}",
            *_facts(told["machine"]),
        ]
        if told["far"]:
            lines += ["", "The second engine's machine:", *_facts(told["far"])]
        outcomes = [Outcome(**outcome).line() for outcome in told["outcomes"]]
        return "\n".join([*lines, "", *outcomes, "", told["conclusion"], ""])

    def write(self, path: Path) -> Path:
        """Write the JSON to `path` and the text beside it; return the text's path."""
        path.write_text(json.dumps(self.told(), indent=1) + "\n")
        beside = path.with_suffix(".txt")
        beside.write_text(self.text())
        return beside


def _facts(told: dict[str, Any]) -> list[str]:
    facts = [f"{name}: {value}" for name, value in told.items() if not isinstance(value, list)]
    return [*facts, *(f"doctor: {each['level']}: {each['about']}: {each['what']}" for each in told.get("doctor", ()))]


def machine() -> dict[str, Any]:
    """Return what the results depend on: processor, kernel, versions, devices, and the findings of `aiote doctor`."""
    facts = with_efa(gather(library=aiote.EngineConfig().libfabric))
    told = {
        "system": " ".join((platform.system(), platform.release(), platform.machine())),
        "processors": os.cpu_count() or 0,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "aiote": metadata.version("aiote"),
        "libfabric": library_summary(aiote.EngineConfig().libfabric),
        "libraries": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name))),
        "rdma devices": "; ".join(map(_device, sorted(Path("/sys/class/infiniband").glob("*")))) or "none",
        "nvidia driver": _first_line(Path("/proc/driver/nvidia/version")) or "none",
        "settings": " ".join(f"{name}={value}" for name, value in _settings().items()) or "none",
        "doctor": [dataclasses.asdict(finding) for finding in examine(facts)],
    }
    cleaned: dict[str, Any] = private(told, names_here())
    return cleaned


def _device(path: Path) -> str:
    """Describe an RDMA device: driver, model, firmware, and the rate and the link layer of its first port."""
    with contextlib.suppress(OSError):
        port, driver = path / "ports" / "1", path / "device" / "driver"
        files = (path / "hca_type", path / "fw_ver", port / "rate", port / "link_layer")
        # soft-RoCE and soft-iWARP are below no device of a bus.
        facts = [driver.resolve().name if driver.exists() else "software", *map(_first_line, files)]
        return f"{path.name}: {', '.join(filter(None, facts))}"
    return path.name


def boot() -> str:
    """Return the random number of this kernel's start: two processes with the same one are on one machine."""
    return _first_line(Path("/proc/sys/kernel/random/boot_id"))


def now() -> str:
    """Return the current UTC time in the report's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _settings() -> dict[str, str]:
    others = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(OTHERS)}
    return {name: hidden_setting(name, value) for name, value in {**variables_set(), **others}.items()}


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
