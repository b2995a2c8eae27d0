"""What the benchmarks share: their folders, who takes part, a network without BBR, and where records go."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from install_peers import ROOT, WORKERS, ways_of

from aiote.bench.congestion import NamespaceError, congestion_control, enter_namespace
from aiote.bench.contestants import Contestant

__all__ = ["BUILD", "ROOT", "WORKERS", "chosen", "enter_reno", "keep", "peers", "say", "ways_of"]

BUILD = ROOT / "build"


def say(text: str) -> None:
    """Say something about a run, beside its tables."""
    print(text, file=sys.stderr, flush=True)


def peers(job: str = "transfers", folder: str = "") -> list[Contestant]:
    """Return what `install_peers.py` has installed of other libraries for a job; what is missing it says."""
    return [Contestant.other(way) for way in ways_of(job, folder)]


def chosen(everyone: Sequence[Contestant], only: str) -> list[Contestant]:
    """Return those whose names begin with one of the words in `only`, which commas part; all where it is empty."""
    words = tuple(filter(None, only.split(",")))
    return [one for one in everyone if not words or one.name.startswith(words)]


def enter_reno() -> None:
    """Enter a network namespace with reno, where one can be made: BBR halves loopback."""
    try:
        enter_namespace()
    except NamespaceError as error:
        say(f"TCP is under {congestion_control()}: {error}")


def keep(path: Path, told: Any) -> None:
    """Write what is measured so far, so that what fails later costs only its own rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")
