"""cupy and a GPU, or a word that they are needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def needed() -> Any:
    """Return cupy; end the program where there is none, or no GPU for it."""
    name = Path(sys.argv[0]).name
    try:
        import cupy
    except ImportError:
        sys.exit(f"{name}: this needs cupy and a GPU: pip install 'aiote[cuda]'")
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # the runtime's own, which needs a driver to be imported
        sys.exit(f"{name}: this needs a GPU: {error}")
    if not found:
        sys.exit(f"{name}: this needs a GPU, and cupy finds none")
    return cupy
