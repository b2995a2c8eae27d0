"""The scheduler's side of KV transfers: what becomes of each request. Knows neither vLLM nor an engine.

| a request       | is known by                                      | goes to the workers as                          |
|-----------------|--------------------------------------------------|-------------------------------------------------|
| to be offered   | `do_remote_decode`, and has ended well           | `Offered`; its blocks are kept until they say   |
| to be received  | `do_remote_prefill`, and has blocks for it       | `Wanted`, once; the same                        |
| ended meanwhile | vLLM, by an abort                                | its name in `cancelled`; the same               |
| not wanted      | `do_remote_prefill`, and has all, or was aborted | `Wanted` without rows: nobody need wait for it  |
| waiting         | `do_remote_prefill`, from its arrival on, until  | its name in `renewed`, every `interval` seconds |
|                 | it is received, ended, or not wanted             |                                                 |

The parameters are those that NIXL's connector gives and takes, with one key more: `aiote` says where the pages are.
Clients send them, so nothing is relied on that they say: what is malformed is not there, and the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

import aiote

__all__ = ["Offered", "RequestTable", "Row", "Steps", "Wanted"]

Text: TypeAlias = Annotated[str, Meta(max_length=256)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
Blocks: TypeAlias = Sequence[Sequence[int]]
"""The numbers of a request's blocks, for each group. Block 0 stands for blocks that a window has gone past."""


class Place(msgspec.Struct, frozen=True):
    """Where a request's pages are: the addresses of its workers, and the first token of each group that they have."""

    addresses: Annotated[list[Text], Meta(min_length=1, max_length=4096)]
    first_tokens: Annotated[list[Count], Meta(max_length=1024)]


class Remote(msgspec.Struct, frozen=True):
    """What is needed of the parameters of a request whose cache is elsewhere."""

    remote_request_id: Text
    remote_num_tokens: Count
    aiote: Place


class Row(NamedTuple):
    """Blocks of one group, from this place in the request on."""

    blocks: list[int]
    start: int


class Offered(NamedTuple):
    """A request whose cache is computed and offered."""

    request: str
    tokens: int
    rows: dict[int, Row]


class Wanted(NamedTuple):
    """A request whose cache is to be received, or, without rows, is not wanted: the other side is told."""

    request: str
    remote_request: str
    addresses: list[str]
    tokens: int
    rows: dict[int, Row]


class Steps(NamedTuple):
    """What is new for the workers."""

    offered: list[Offered]
    wanted: list[Wanted]
    cancelled: list[str]
    renewed: dict[str, list[str]] | None = None
    """Requests that have not come yet, as they are called there, by the workers that keep them."""


class RequestTable:
    """The requests of one engine that come from elsewhere or go there.

    block_tokens: how many tokens a block of each group has. interval: after how many seconds the other side hears that
    a request is still wanted. `addresses` are those of the workers, once they are known.
    """

    def __init__(
        self,
        engine_id: str,
        block_tokens: dict[int, int],
        *,
        produces: bool,
        settings: dict[str, Any],
        interval: float = 5.0,
    ) -> None:
        self.addresses: list[str] = []
        self.receiving: set[str] = set()
        self._block_tokens = block_tokens
        self._produces = produces
        self._told = {"remote_engine_id": engine_id, **settings}
        self._steps = Steps([], [], [])
        self._waiting: dict[str, Remote] = {}
        self._interval, self._renewed_at = interval, 0.0

    def take(self, now: float) -> Steps:
        """Return what is new since the last time."""
        steps, self._steps = self._steps, Steps([], [], [])
        if not self._waiting or now < self._renewed_at + self._interval:
            return steps
        self._renewed_at, renewed = now, dict[str, list[str]]()
        for remote in self._waiting.values():
            for address in remote.aiote.addresses:
                renewed.setdefault(address, []).append(remote.remote_request_id)
        return steps._replace(renewed=renewed)

    # A request that comes from elsewhere.

    def arrived(self, request: str, params: dict[str, Any] | None, now: float) -> None:
        """Take note that a request has come, and waits for blocks."""
        remote = _remote(params)
        if remote is not None:
            if not self._waiting:
                self._renewed_at = now
            self._waiting[request] = remote

    def external(self, params: dict[str, Any] | None, prompt: int, computed: int) -> int:
        """Return how many tokens of a prompt can be received beyond those that are here already."""
        remote = _remote(params)
        return max(0, min(prompt, remote.remote_num_tokens) - computed) if remote else 0

    def allocated(self, request: str, params: dict[str, Any] | None, prompt: int, blocks: Blocks, count: int) -> None:
        """Take note that a request has its blocks, and is to receive `count` tokens, at the end of what comes."""
        remote = _remote(params)
        if remote is None or params is None:
            return
        # Once is all: a request that is preempted, or whose cache did not come, is computed here.
        params["do_remote_prefill"] = False
        if not count:
            self._release(request, remote)
            return
        tokens = min(prompt, remote.remote_num_tokens)
        rows = {}
        for place, (group, size) in enumerate(self._block_tokens.items()):
            has, firsts = blocks[group], remote.aiote.first_tokens
            first = firsts[place] if place < len(firsts) else 0
            start = max((tokens - count) // size, _skipped(has), -(-first // size))
            rows[group] = Row(list(has[start : -(-tokens // size)]), start)
        self.receiving.add(request)
        wanted = Wanted(request, remote.remote_request_id, remote.aiote.addresses, tokens, rows)
        self._steps.wanted.append(wanted)

    def received(self, request: str) -> None:
        """Take note that the workers have reported a request, whatever came of it."""
        self.receiving.discard(request)
        self._waiting.pop(request, None)

    def _release(self, request: str, remote: Remote) -> None:
        """Have the other side told that nobody will ask for a request."""
        self._waiting.pop(request, None)
        there = remote.aiote.addresses
        self._steps.wanted.append(Wanted(request, remote.remote_request_id, there, remote.remote_num_tokens, {}))

    # One that goes elsewhere, and the end of either.

    def finished(
        self, request: str, params: dict[str, Any] | None, tokens: int, blocks: Blocks
    ) -> dict[str, Any] | None:
        """Take note that a request has ended, well if it has `tokens`; return what the one who receives it is told.

        Its blocks are then to be kept until the workers report it; without an answer they are not.
        """
        self._waiting.pop(request, None)
        if request in self.receiving:
            self._steps.cancelled.append(request)
            return None
        if params is None:
            return None
        remote = _remote(params)
        if remote is not None:
            params["do_remote_prefill"] = False
            self._release(request, remote)
            return None
        if not (params.get("do_remote_decode") and self._produces and self.addresses and tokens and any(blocks)):
            return None
        rows, firsts = {}, []
        for group, size in self._block_tokens.items():
            start = _skipped(blocks[group])
            rows[group] = Row(list(blocks[group][start : -(-tokens // size)]), start)
            firsts.append(start * size)
        self._steps.offered.append(Offered(request, tokens, rows))
        at = aiote.Address.parse(self.addresses[0])
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [row.blocks for row in rows.values()],
            "remote_request_id": request,
            "remote_num_tokens": tokens,
            "remote_host": at.host,
            "remote_port": at.port,
            **self._told,
            # What routers are told of NIXL's connector: that prefilling comes first.
            "transfer_mode": "pull",
            "aiote": {"addresses": self.addresses, "first_tokens": firsts},
        }


def _remote(params: dict[str, Any] | None) -> Remote | None:
    """Return where the cache of a request is, if it is elsewhere and can be had."""
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        return msgspec.convert(params, Remote)
    except msgspec.ValidationError:
        return None


def _skipped(blocks: Sequence[int]) -> int:
    """Return how many blocks a window has gone past: they are the first ones."""
    return next((place for place, block in enumerate(blocks) if block), len(blocks))
