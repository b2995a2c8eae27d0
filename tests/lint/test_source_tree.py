"""The source tree explains itself where it is imported without having been compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dependencies", [True, False])
@pytest.mark.parametrize("module", ["aiote", "aiote_native", "aiote.cli"])
def test_import_of_the_uncompiled_tree_explains_what_to_do(module, dependencies, tmp_path):
    for package in ("aiote", "aiote_native"):
        (tmp_path / package).symlink_to(ROOT / package)
    # `-S`: nothing compiled is found behind the tree, however this environment was made.
    site = [path for path in sys.path if dependencies and "site-packages" in path]
    code = f"import sys; sys.path[1:1] = {site!r}; import {module}"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert "not compiled" in done.stderr
    assert "make venv" in done.stderr
    assert "During handling" not in done.stderr
