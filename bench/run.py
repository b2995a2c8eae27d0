"""Run a benchmark: `python bench/run.py NAME [ARGUMENTS]`. Without a name, list them.

Each is a program of its own in bench/entries; `make` has a target for most. What they share is in harness.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent
ENTRIES = {path.stem: path for path in sorted((HOME / "entries").glob("*.py"))}


def main() -> int:
    """Run what the arguments name, as if it had been started itself; or return 2 and say what there is."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in ENTRIES:
        out = sys.stdout if name in ("", "-h", "--help") else sys.stderr
        print(f"no such benchmark: {name}" if out is sys.stderr else __doc__, file=out)
        for entry, path in ENTRIES.items():
            first, _, _ = path.read_text().partition("\n")
            print(f"  {entry:18} {first.strip(chr(34))}", file=out)
        return 2 if out is sys.stderr else 0
    sys.argv = [str(ENTRIES[name]), *sys.argv[2:]]
    # `python -P` leaves this folder out; an entry's own is not on the path, where its name would hide a library's.
    sys.path[:0] = [str(HOME), str(HOME.parent / "tools")]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
