"""What tests of the GPU's kernels share: compiling them takes seconds."""

from __future__ import annotations

import pytest

from cuda_emulation import LIBRARY, Emulation, compiled


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation(compiled(tmp_path_factory.mktemp("emulation"), "kernels.so", *LIBRARY))
