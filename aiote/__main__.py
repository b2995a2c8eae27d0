"""`python -m aiote`: the same command as `aiote`."""

from __future__ import annotations

import sys

from aiote.cli import main

if __name__ == "__main__":
    sys.exit(main())
