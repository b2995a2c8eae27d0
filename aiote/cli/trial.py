"""Try each provider on this machine: open one engine over it, each in a process of its own.

A process of its own, because a library may crash or hang where it lacks something.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import aiote

__all__ = ["PROVIDERS", "Trial", "tried"]

PROVIDERS = ("local", "socket", "verbs", "verbs;ofi_rxm", "tcp", "shm", "efa", "cxi")
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A provider, and either the names of the rails that an engine has over it or the `reason` why it has none."""

    provider: str
    rails: tuple[str, ...]
    reason: str


def tried(providers: tuple[str, ...] = PROVIDERS, patience_s: float = PATIENCE_S) -> list[Trial]:
    """Try these providers, all at once; one that takes longer than `patience_s` seconds is not usable."""
    begun = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "aiote.cli.trial", provider],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for provider in providers
    ]
    deadline = time.monotonic() + patience_s
    return [_ended(each, name, deadline, patience_s) for each, name in zip(begun, providers, strict=True)]


def _ended(child: subprocess.Popen[bytes], provider: str, deadline: float, patience_s: float) -> Trial:
    with child:
        try:
            said, _ = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            return Trial(provider, (), f"it was not open after {patience_s:g} s")
    if child.returncode:
        how = f"by signal {-child.returncode}" if child.returncode < 0 else f"with status {child.returncode}"
        return Trial(provider, (), f"the process that tried it ended {how}")
    found = json.loads(said)
    return Trial(provider, tuple(found["rails"]), found["reason"])


async def _open(provider: str) -> dict[str, object]:
    try:
        async with aiote.open_engine(provider, status_page=False) as engine:
            return {"rails": [rail.name for rail in engine.rails], "reason": ""}
    except aiote.AioteError as error:
        return {"rails": [], "reason": str(error)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(asyncio.run(_open(sys.argv[1]))))
