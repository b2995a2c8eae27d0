"""What docs/connectors.md says of Ray runs as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.connectors.recipes import recipe

LIMIT_S = 300


def test_the_recipe_runs_as_a_script(tmp_path: Path):
    script = tmp_path / "switched.py"
    script.write_text(recipe("Ray"))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "[1000.0, 0.0]" in done.stdout
