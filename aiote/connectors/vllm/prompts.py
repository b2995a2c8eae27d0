"""The scheduler's side of prompts that are computed for other engines. Knows neither vLLM nor an engine.

| a prompt            | layer by layer                               | whole                                      |
|---------------------|----------------------------------------------|--------------------------------------------|
| is queued           | its name is told to the workers, so that a reader that comes early waits                  |
| is in a step        | `Computing`: it is offered, up to its blocks | -                                          |
| is preempted        | `suspended`: its blocks are free             | -                                          |
| has ended well      | `ended`: the workers report it once it moved | `Offered`                                  |
| was aborted         | `withdrawn`: the workers report it once no   | `withdrawn`, if it has a name of its own:  |
|                     | NIC reads it                                 | its readers are refused                    |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

__all__ = ["BlockRow", "Blocks", "Computing", "LayerSteps", "PromptTable"]

Text: TypeAlias = Annotated[str, Meta(max_length=256)]
Blocks: TypeAlias = Sequence[Sequence[int]]
"""The numbers of a request's blocks, for each group. Block 0 replaces blocks that a sliding window has left behind."""


class BlockRow(NamedTuple):
    """Consecutive blocks of one group; `start` is the index of the first one in the request."""

    blocks: list[int]
    start: int


class Computing(NamedTuple):
    """A prompt of `tokens` tokens that is offered while it is computed; after this step `computed` of them are."""

    request: str
    name: str
    tokens: int
    computed: int
    rows: dict[int, BlockRow]


class LayerSteps(NamedTuple):
    """The news for the workers about prompts that are computed for other engines.

    suspended: preempted requests, whose blocks go to others in this step. ended: requests that have ended well.
    withdrawn: the names of requests that were aborted; each with its request, or "" if it was never offered. queued:
    the names of prompts that are not offered yet, every `interval` seconds.
    """

    computing: list[Computing]
    suspended: list[str]
    ended: list[str]
    withdrawn: dict[str, str]
    queued: list[str]


class Named(msgspec.Struct, frozen=True):
    """The name that a proxy has chosen for a prompt, to tell both engines of it at once."""

    transfer_id: Text | None = None


@dataclass
class Prompt:
    """A prompt to be offered. `announced` is the number of its tokens that the workers know to be computed."""

    name: str
    tokens: int
    chosen: bool
    announced: int = 0


class PromptTable:
    """The prompts of one engine that are computed for other engines.

    block_tokens: how many tokens a block of each group has. layered: whether prompts are offered while they are
    computed.
    """

    def __init__(self, block_tokens: dict[int, int], *, layered: bool) -> None:
        self.layered = layered
        self._block_tokens = block_tokens
        self._queued: dict[str, Prompt] = {}
        self._offered: dict[str, Prompt] = {}
        self._steps = LayerSteps([], [], [], {}, [])

    @property
    def has_names(self) -> bool:
        """Whether a prompt is not offered yet whose readers may ask for it."""
        return any(prompt.chosen for prompt in self._queued.values())

    def record_arrived(self, request: str, params: dict[str, Any] | None, tokens: int) -> None:
        """Record that a prompt of `tokens` tokens has arrived. Ignore one that is not for another engine."""
        if params and params.get("do_remote_decode"):
            chosen = _chosen_name(params)
            self._queued[request] = Prompt(chosen or request, tokens, bool(chosen))

    def is_computing(self, request: str) -> bool:
        """Return whether the workers need to know of a step that computes this request."""
        if request in self._queued:
            return self.layered
        prompt = self._offered.get(request)
        return prompt is not None and prompt.announced < prompt.tokens

    def record_step(self, request: str, computed: int, blocks: Blocks) -> None:
        """Record that a step computes a request up to token `computed`, in these blocks."""
        if not self.layered:
            return
        prompt = self._queued.pop(request, None) or self._offered.get(request)
        if prompt is None or not any(blocks):
            return
        self._offered[request] = prompt
        computed = min(computed, prompt.tokens)
        if computed > prompt.announced:
            prompt.announced = computed
            rows = {
                group: BlockRow(list(blocks[group][: -(-prompt.tokens // size)]), 0)
                for group, size in self._block_tokens.items()
            }
            self._steps.computing.append(Computing(request, prompt.name, prompt.tokens, computed, rows))

    def record_preempted(self, request: str) -> None:
        """Record that a request has lost its blocks. It is computed again later."""
        prompt = self._offered.get(request)
        if prompt is not None:
            prompt.announced = 0
            self._steps.suspended.append(request)

    def holds(self, request: str) -> bool:
        """Return whether the workers offer a request's blocks, so that these are kept until the workers report it."""
        return request in self._offered

    def record_finished(self, request: str, *, well: bool) -> tuple[str, int]:
        """Record the end of a request; return the name that its readers use, and its tokens if it was offered (or 0).

        The name is "" for a request that was not for another engine, or has not ended well.
        """
        offered, queued = self._offered.pop(request, None), self._queued.pop(request, None)
        prompt = offered or queued
        if prompt is None:
            return "", 0
        if not well:
            if offered or prompt.chosen:
                self._steps.withdrawn[prompt.name] = request if offered else ""
            return "", 0
        if offered:
            self._steps.ended.append(request)
        return prompt.name, prompt.tokens if offered else 0

    def take_steps(self, *, renew: bool) -> LayerSteps | None:
        """Return the news for the workers since the last call, or None. renew: add the names of queued prompts."""
        steps, self._steps = self._steps, LayerSteps([], [], [], {}, [])
        if renew:
            steps = steps._replace(queued=[prompt.name for prompt in self._queued.values() if prompt.chosen])
        return steps if any(steps) else None


def _chosen_name(params: dict[str, Any]) -> str:
    try:
        return msgspec.convert(params, Named).transfer_id or ""
    except msgspec.ValidationError:
        return ""
