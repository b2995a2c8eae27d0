"""What all processes of the demo agree on: the model's sizes, the text that it learns, and what parent and child say.

The parent asks a line of JSON at a time, and each child answers with one:

    all         {}                           -> {"layout": ...} of a trainer, {"started": rank} of an inference rank
    inference   {"sources": [name: [shape, dtype]]}   -> {"recording": ...}
    all         {"recordings": {rank: ...}}  -> {"ready": address}
    trainers    {"train": steps}             -> {"loss": ..., "digests": [by inference rank], "logits": [[...]]}
    inference   {"generate": characters}     -> {"version": ..., "text": ..., "digests": ..., "logits": [[...]]}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import anyio

from aiote.demo import leave_with_parent

TEXT = (
    "A trainer writes the weights by night, and no rank gathers what it need not hold. "
    "The other side computes by day, and runs no code while bytes arrive. "
    "So what was learned is what is said. "
)
PROMPT = TEXT[:12]
FIRST, LETTERS, PADDED = 32, 95, 128  # printable ASCII; inference ranks have their tables padded to whole 64s
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, EXPERTS, ACTIVE, INNER = 64, 2, 4, 1, 16, 8, 2, 64
TRAINERS, EXPERT_RANKS, SERVERS = 4, 2, 2
WINDOW = 32


def encode(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [ord(letter) - FIRST for letter in text]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens."""
    return "".join(chr(token + FIRST) for token in tokens)


def digests(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return what names the bytes of every parameter, of stacked experts one by one."""
    found = {}
    for name, parameter in parameters.items():
        several = enumerate(parameter) if parameter.ndim == 3 else [("", parameter)]
        for number, one in several:
            data = one.detach().numpy().tobytes()
            found[f"{name}[{number}]"] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return found


def join(role: str, rank: int, ranks: int, folder: str) -> None:
    """Join the process group of a role: gloo, on this host."""
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{role}", rank=rank, world_size=ranks)


class Asked:
    """What the parent asks, in order."""

    def __init__(self) -> None:
        self._sending, self._lines = anyio.create_memory_object_stream[bytes](math.inf)
        self._loop = _call_soon()
        leave_with_parent(sys.stdin.fileno(), lambda line: self._loop(self._sending.send_nowait, line))

    async def next(self) -> dict[str, Any]:
        """Return the next one."""
        asked: dict[str, Any] = json.loads(await self._lines.receive())
        return asked


def _call_soon() -> Callable[..., object]:
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe
