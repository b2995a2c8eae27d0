"""Start the program, as `python tools/paper` and as `python -m paper`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that holds this package

from paper.page import main

if __name__ == "__main__":
    sys.exit(main())
