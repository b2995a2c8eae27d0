"""The scheduler's side of KV transfers: the state of each request. Knows neither vLLM nor an engine.

| a request       | is recognized by                                 | goes to the workers as                          |
|-----------------|--------------------------------------------------|-------------------------------------------------|
| to be offered   | `do_remote_decode`                               | see `prompts`; blocks are kept until workers    |
|                 |                                                  | report                                          |
| to be received  | `do_remote_prefill`, and it has blocks           | `Wanted`, once; blocks are kept likewise        |
| ended meanwhile | vLLM's abort                                     | its name in `cancelled`; likewise               |
| not wanted      | `do_remote_prefill`, and it is complete, or was  | `Wanted` without rows, so that the other side   |
|                 | aborted                                          | need not wait for it                            |
| waiting         | `do_remote_prefill`, from its arrival on, until  | its name in `renewed`, every `interval` seconds |
|                 | it is received, ended, or not wanted             |                                                 |

The parameters are those of NIXL's connector, with one more key: `aiote` has the location of the pages. Clients send
them, so they are not trusted: malformed parameters are treated as absent, and the prompt is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

import aiote

from .prompts import BlockRow, Blocks, LayerSteps, PromptTable, Text

__all__ = ["BlockRow", "Offered", "RequestTable", "Steps", "Wanted"]

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]


class PageLocation(msgspec.Struct, frozen=True):
    """The location of a request's pages: the workers' addresses, and the first token that they have of each group."""

    addresses: Annotated[list[Text], Meta(min_length=1, max_length=4096)]
    first_tokens: Annotated[list[Count], Meta(max_length=1024)] = []


class Remote(msgspec.Struct, frozen=True):
    """The needed part of the parameters of a request whose cache is in another engine, or is computed there.

    A proxy that asks both engines at once does not know the number of tokens, and leaves it out: it is the prompt's.
    """

    remote_request_id: Text
    aiote: PageLocation
    remote_num_tokens: Count | None = None


class Offered(NamedTuple):
    """A request whose cache is computed and offered."""

    request: str
    tokens: int
    rows: dict[int, BlockRow]
    name: str = ""
    """The name under which it is offered, if that is not `request`."""


class Wanted(NamedTuple):
    """A request whose cache is to be received. Without rows it is not wanted, which the workers tell the other side."""

    request: str
    remote_request: str
    addresses: list[str]
    tokens: int
    rows: dict[int, BlockRow]


class Steps(NamedTuple):
    """The news for the workers since the last step."""

    offered: list[Offered]
    wanted: list[Wanted]
    cancelled: list[str]
    renewed: dict[str, list[str]] | None = None
    """Requests that still wait for their cache, by the address of the worker that keeps it, with that side's names."""
    layers: LayerSteps | None = None
    computed: Sequence[str] = ()
    """Requests that were received early, and that this step computes for the first time."""
    held: Sequence[str] = ()
    """Requests that were received early, and have blocks that they share with others, but are not computed yet."""


class RequestTable:
    """The requests of one engine whose caches are received from, or offered to, other engines.

    block_tokens: how many tokens a block of each group has. interval: seconds between two messages to the other side
    that a request is still wanted. layered: whether prompts are offered while they are computed. early: whether the
    workers report a request as received before all its layers are here. `addresses` are those of this engine's workers,
    once they are known; `prompts` are those that it computes for other engines; `uncomputed` are the requests that were
    received early and that no step has computed yet.
    """

    def __init__(
        self,
        engine_id: str,
        block_tokens: dict[int, int],
        *,
        produces: bool,
        settings: dict[str, Any],
        interval: float = 5.0,
        layered: bool = False,
        early: bool = False,
    ) -> None:
        self.addresses: list[str] = []
        self.receiving: set[str] = set()
        self.uncomputed: set[str] = set()
        self._loading: set[str] = set()
        self._early = early
        self.prompts = PromptTable(block_tokens, layered=layered)
        self._block_tokens = block_tokens
        self._produces = produces
        self._engine_settings = {"remote_engine_id": engine_id, **settings}
        self._steps = Steps([], [], [])
        self._waiting: dict[str, Remote] = {}
        self._interval, self._renewed_at = interval, 0.0

    def take_steps(self, now: float) -> Steps:
        """Return the news for the workers since the last call."""
        steps, self._steps = self._steps, Steps([], [], [])
        due = bool(self._waiting or self.prompts.has_names) and now >= self._renewed_at + self._interval
        if (layers := self.prompts.take_steps(renew=due)) is not None:
            steps = steps._replace(layers=layers)
        if not due:
            return steps
        self._renewed_at, renewed = now, dict[str, list[str]]()
        for remote in self._waiting.values():
            for address in remote.aiote.addresses:
                renewed.setdefault(address, []).append(remote.remote_request_id)
        return steps._replace(renewed=renewed or None)

    # A request whose cache comes from another engine.

    def record_arrived(self, request: str, params: dict[str, Any] | None, now: float) -> None:
        """Record that a request has arrived, and waits for blocks."""
        remote = _remote(params)
        if remote is not None:
            if not self._waiting:
                self._renewed_at = now
            self._waiting[request] = remote

    def external(self, params: dict[str, Any] | None, prompt: int, computed: int) -> int:
        """Return how many tokens of a prompt can be received beyond the `computed` ones, which are here already."""
        remote = _remote(params)
        return max(0, _count_there(remote, prompt) - computed) if remote else 0

    def record_allocated(
        self, request: str, params: dict[str, Any] | None, prompt: int, blocks: Blocks, count: int
    ) -> None:
        """Record that a request has its blocks; request the last `count` tokens of its cache from the other side."""
        remote = _remote(params)
        if remote is None or params is None:
            return
        # Receive it only once: if the request is preempted, or its cache does not come, it is computed here.
        params["do_remote_prefill"] = False
        if not count:
            self._release(request, remote)
            return
        tokens = _count_there(remote, prompt)
        rows = {}
        for place, (group, size) in enumerate(self._block_tokens.items()):
            has, firsts = blocks[group], remote.aiote.first_tokens
            first = firsts[place] if place < len(firsts) else 0
            start = max((tokens - count) // size, _count_skipped(has), -(-first // size))
            rows[group] = BlockRow(list(has[start : -(-tokens // size)]), start)
        self.receiving.add(request)
        wanted = Wanted(request, remote.remote_request_id, remote.aiote.addresses, tokens, rows)
        self._steps.wanted.append(wanted)

    def record_received(self, request: str) -> None:
        """Record that the workers have reported a request, whatever its outcome."""
        if self._early and request in self.receiving:
            self._loading.add(request)
            self.uncomputed.add(request)
        self.receiving.discard(request)
        self._waiting.pop(request, None)

    def record_computation(self, computed: Sequence[str], held: Sequence[str]) -> None:
        """Record which of the `uncomputed` requests a step computes, and which have blocks but are not computed."""
        self.uncomputed.difference_update(computed)
        self._steps = self._steps._replace(computed=computed, held=held)

    def record_left(self, request: str, *, has_output: bool) -> bool:
        """Record that a request ends, perhaps before a step that waited for its layers is over: it then has no output.
        Return whether layers may still arrive, so that its blocks are kept until the workers report it once more.
        """
        self.uncomputed.discard(request)
        if request not in self._loading:
            return False
        self._loading.discard(request)
        if not has_output:
            self._steps.cancelled.append(request)
        return not has_output

    def _release(self, request: str, remote: Remote) -> None:
        """Make the workers tell the other side that this engine does not want a request's cache."""
        self._waiting.pop(request, None)
        there, tokens = remote.aiote.addresses, remote.remote_num_tokens or 0
        self._steps.wanted.append(Wanted(request, remote.remote_request_id, there, tokens, {}))

    # A request whose cache goes to another engine, and the end of any request.

    def record_finished(
        self, request: str, params: dict[str, Any] | None, tokens: int, blocks: Blocks
    ) -> dict[str, Any] | None:
        """Record that a request has ended, successfully if it has `tokens`; return the parameters for its receiver.

        If parameters are returned, or if `prompts` holds the request, vLLM keeps its blocks until the workers report
        it. Otherwise it frees them as usual.
        """
        self._waiting.pop(request, None)
        wanted_here = self._produces and self.addresses and tokens and any(blocks)
        name, offered = self.prompts.record_finished(request, well=bool(wanted_here))
        if self._cancel_receiving(request) or params is None:
            return None
        remote = _remote(params)
        if remote is not None:
            params["do_remote_prefill"] = False
            self._release(request, remote)
            return None
        if not (params.get("do_remote_decode") and wanted_here):
            return None
        name, tokens = name or request, offered or tokens
        rows, firsts = {}, []
        for group, size in self._block_tokens.items():
            start = _count_skipped(blocks[group])
            rows[group] = BlockRow(list(blocks[group][start : -(-tokens // size)]), start)
            firsts.append(start * size)
        if not offered:
            self._steps.offered.append(Offered(request, tokens, rows, name if name != request else ""))
        at = aiote.Address.parse(self.addresses[0])
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [row.blocks for row in rows.values()],
            "remote_request_id": name,
            "remote_num_tokens": tokens,
            "remote_host": at.host,
            "remote_port": at.port,
            **self._engine_settings,
            # NIXL's connector tells routers by this key that the prompt has to be computed first.
            "transfer_mode": "pull",
            "aiote": {"addresses": self.addresses, "first_tokens": firsts},
        }

    def _cancel_receiving(self, request: str) -> bool:
        """Make the workers cancel a request that they receive; return whether they do. Its blocks are free when they
        report it, so that report does not mean that the request has begun.
        """
        if request not in self.receiving:
            return False
        self.receiving.discard(request)
        self._steps.cancelled.append(request)
        return True


def _remote(params: dict[str, Any] | None) -> Remote | None:
    """Return the location of a request's cache, if it is in another engine and the parameters are well-formed."""
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        return msgspec.convert(params, Remote)
    except msgspec.ValidationError:
        return None


def _count_there(remote: Remote, prompt: int) -> int:
    """Return how many tokens of a prompt the other engine has, or will have."""
    return prompt if remote.remote_num_tokens is None else min(prompt, remote.remote_num_tokens)


def _count_skipped(blocks: Sequence[int]) -> int:
    """Return how many leading blocks a sliding window has left behind."""
    return next((place for place, block in enumerate(blocks) if block), len(blocks))
