"""A pytest plugin: the run ends by saying, loudly, what this machine could not run and which libfabric it used."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.gpu import nvrtc
from support.network import namespaces


def _gpu() -> str:
    return "" if Path("/dev/nvidiactl").exists() else "no NVIDIA GPU (/dev/nvidiactl)"


def _rdma() -> str:
    return "" if any(Path("/dev/infiniband").glob("uverbs*")) else "no RDMA device (/dev/infiniband/uverbs*)"


def _etcd() -> str:
    if shutil.which("etcd") is None:
        return "no etcd (Debian: etcd-server)"
    return "" if importlib.util.find_spec("httpx") else "no httpx (the extra etcd)"


def _torch() -> str:
    return "" if importlib.util.find_spec("torch") else "no torch (make test-connectors installs it)"


def _ray() -> str:
    return "" if importlib.util.find_spec("ray") else "no ray (pip install ray)"


def _cupy() -> str:
    return "" if importlib.util.find_spec("cupy") else "no cupy (the extra cuda)"


def _compute_sanitizer() -> str:
    return "" if shutil.which("compute-sanitizer") else "no compute-sanitizer (of the CUDA toolkit)"


def _cxx() -> str:
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    return "" if shutil.which(compiler) else f"no C++ compiler {compiler} (Debian: g++)"


def _nvrtc() -> str:
    return "" if nvrtc.library() else "no NVRTC (pip install nvidia-cuda-nvrtc-cu12)"


def _browser() -> str:
    return "" if shutil.which("chromium") else "no chromium (Debian: chromium)"


# marker -> what is missing, an empty string where nothing
NEEDS: dict[str, Callable[[], str]] = {
    "needs_gpu": _gpu,
    "needs_rdma": _rdma,
    "needs_etcd": _etcd,
    "needs_torch": _torch,
    "needs_ray": _ray,
    "needs_cupy": _cupy,
    "needs_compute_sanitizer": _compute_sanitizer,
    "needs_cxx": _cxx,
    "needs_nvrtc": _nvrtc,
    "needs_browser": _browser,
    "needs_namespaces": namespaces.missing,
    "needs_netem": namespaces.missing_netem,
}


def library() -> str:
    """Return one line on the libfabric in use, or why there is none."""
    try:
        from aiote.rails import library_summary

        return library_summary()
    except Exception as error:
        return f"none: {type(error).__name__}: {error}"


def _over(item: pytest.Item, provider: str) -> bool:
    """Whether a parameter of the test is a provider of that name, layered ones included, or a rail that has it."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    named = (getattr(value, "provider", value) for value in values)
    return any(isinstance(name, str) and name.partition(";")[0] == provider for name in named)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _over(item, "verbs"):
            item.add_marker(pytest.mark.needs_rdma)
        if any(_over(item, provider) for provider in ("sim", "local", "socket")):
            item.add_marker(pytest.mark.own_rails)
    for marker, missing in NEEDS.items():
        concerned = [item for item in items if item.get_closest_marker(marker)]
        if concerned and (reason := missing()):
            for item in concerned:
                item.add_marker(pytest.mark.skip(reason=reason))


def _reasons(reports: list[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    reasons = Counter[str]()
    for report in reports:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = _reasons(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section(f"NOT RUN ON THIS MACHINE: {skipped.total()}", sep="!", yellow=True, bold=True)
        for reason, count in skipped.most_common():
            terminalreporter.write_line(f"{count:5} x  {reason}", yellow=True)
    else:
        terminalreporter.section("nothing was skipped on this machine", sep="-")
    terminalreporter.write_line(f"libfabric: {library()}")
