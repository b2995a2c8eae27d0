"""Run targets of the Makefile in a fresh clone, in this order: what one installs must not change what another says.

The clone is of the last commit; what is not committed is not in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from environment import ROOT, usual_environment

STEPS = {"demo-weights": "--updates 2", "docs": "", "check": ""}
"""Targets and their ARGS; the last one must pass after all the others."""


def main() -> int:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="order-", dir=ROOT / "build") as clone:
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        python = os.path.realpath(sys.executable)  # the interpreter that this environment was made from
        for target, arguments in STEPS.items():
            print(f"--- make {target}, in a clone", flush=True)
            command = [os.environ.get("MAKE", "make"), "--no-print-directory", "-C", clone, target]
            settings = [f"PYTHON={python}", "VENV=.venv", f"ARGS={arguments}"]
            # As by hand: `make test-all` asks for its own tests at full length.
            environment, nothing = usual_environment(), subprocess.DEVNULL
            if status := subprocess.run([*command, *settings], env=environment, stdin=nothing).returncode:
                print(f"FAILED: make {target} ended with status {status}; these ran in this order: {', '.join(STEPS)}")
                return 1
    print(f"passed, one after the other: {', '.join(STEPS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
