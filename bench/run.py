"""Run a benchmark: `python bench/run.py NAME [ARGUMENTS]`. Without a name, list them.

Each is a program of its own in bench/entries; `make` has a target for most. What they share is in harness.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent
ENTRIES = {path.stem: path for path in sorted((HOME / "entries").glob("*.py"))}


def titled(name: str) -> str:
    """Return a line with the name of an entry and the first sentence of its docstring."""
    first, _, _ = ENTRIES[name].read_text().partition("\n")
    title = first.strip('"')
    return f"  {name:18} {title}"


def main() -> int:
    """Run what the arguments name, as if it had been started itself; or return 2 and say what there is."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__, *map(titled, ENTRIES), sep="\n")
        return 0
    if name not in ENTRIES:
        print(f"no such benchmark: {name}; there are:", *map(titled, ENTRIES), sep="\n", file=sys.stderr)
        return 2
    sys.argv = [str(ENTRIES[name]), *sys.argv[2:]]
    # `python -P` leaves this folder out; an entry's own is not on the path, where its name would hide a library's.
    sys.path[:0] = [str(HOME), str(HOME.parent / "tools")]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
