"""How the tests run.

The plugins lie in `tests/support/plugins`: `blocking` fails a test that blocks its loop, `leaks` one that leaves
descriptors or threads behind, `loops` chooses the loop, `not_run` ends the run with what was skipped, `guest_cases`
leaves out cases in the guest, `combinations` those of `make test-all`, `failure_reports` ends a failed run with what
failed. `engines.opening`, `network.guest_switch` and `process.children` bring fixtures.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import numpy  # noqa: F401 - its thread pool starts on import: before any test counts threads
import pytest
from hypothesis import HealthCheck, settings

# Helpers assert, too: what a failed one says is then as much as a test does. Plugins may be imported already: that of
# `aiote prove` is.
ROOMS = [path.name for path in (Path(__file__).parent / "support").iterdir() if path.is_dir()]
pytest.register_assert_rewrite(*(f"support.{room}" for room in ROOMS if room not in ("plugins", "__pycache__")))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is in what a script starts in the background, and every child would inherit it: Ctrl-C is tested, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may need longer than the default for one connection of many; what is about this limit sets it.
os.environ.setdefault("AIOTE_CONNECT_TIMEOUT", "60")

if "RDMA_VM" in os.environ:
    # Before libfabric is opened: its queues for the default of 256 peers are larger than a soft device's may be.
    os.environ.setdefault("FI_UNIVERSE_SIZE", "16")

PLUGINS = ("blocking", "leaks", "loops", "not_run", "guest_cases", "combinations", "failure_reports")
pytest_plugins = [f"support.plugins.{name}" for name in PLUGINS]
pytest_plugins += ["support.engines.opening", "support.network.guest_switch", "support.process.children", "pytester"]


def pytest_collection_finish() -> None:
    """Keep three thousand tests out of every garbage collection, which would take long enough to count as blocking."""
    gc.collect()
    gc.freeze()


# No deadlines and no complaint about slow data: both would test the machine. A failure prints the blob that repeats it.
# `make test` tries the same examples every time and everywhere, so that whether a change passes is not drawn by lot;
# what searches for new ones is HYPOTHESIS_PROFILE=thorough.
settings.register_profile(
    "quick",
    deadline=None,
    print_blob=True,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("brief", settings.get_profile("quick"), max_examples=20)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "quick")
