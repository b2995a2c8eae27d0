"""What tests of the GPU's kernels share: compiling them takes many seconds, once for all runs of pytest."""

from __future__ import annotations

import pytest

from support.gpu.emulation import LIBRARY, Emulation, compiled


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    return Emulation(compiled("kernels.so", *LIBRARY))
