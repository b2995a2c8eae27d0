"""The one-process generation that a run is compared with: the same model, the same chunks, no engine.

One request after the other, each in full, first come, first served. `concurrency` requests are admitted at a time, as
in the run, and the time to first token is counted from admission, so both sides carry the same load.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aiote.demo import tokens
from aiote.demo.model import Model
from aiote.demo.pages import RequestCache
from aiote.demo.settings import Job, Settings

__all__ = ["LocalResult", "generate", "main", "serve"]


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The tokens of one request, and the checksum of its prompt's keys and values.

    `ttft_s` is from its admission to its first token, `finished_s` from the begin of all to its last.
    """

    request: int
    tokens: tuple[int, ...]
    checksum: int
    ttft_s: float
    finished_s: float

    def to_json(self) -> str:
        """Return the result as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> LocalResult:
        """Read a result back; raises ValueError, KeyError or TypeError if the line is none."""
        data = json.loads(line)
        return cls(**{**data, "tokens": tuple(data["tokens"])})


def generate(model: Model, prompt: Sequence[int], cache: RequestCache, settings: Settings) -> Iterator[int]:
    """Yield the tokens that follow a prompt, greedily, until the mark of end or `new_tokens` of them."""
    logits = model.prefill(prompt, cache, settings.chunk_tokens)
    for position in range(len(prompt), len(prompt) + settings.new_tokens):
        token = int(np.argmax(logits))
        yield token
        if token == tokens.END or position + 1 == len(prompt) + settings.new_tokens:
            return
        logits = model.step(token, position, cache)


def serve(model: Model, prompts: Sequence[bytes], settings: Settings) -> Iterator[LocalResult]:
    """Generate for each prompt in turn."""
    layout, memory = settings.layout(model.config), settings.memory(model.config)
    finished: list[float] = []
    begun = time.perf_counter()
    for request, prompt in enumerate(map(tokens.encode, prompts)):
        admitted = begun if request < settings.concurrency else finished[request - settings.concurrency]
        cache = RequestCache(memory, range(layout.pages_for(len(prompt) + settings.new_tokens - 1)))
        answer: list[int] = []
        first = 0.0
        for token in generate(model, prompt, cache, settings):
            first = first or time.perf_counter()
            answer.append(token)
        finished.append(time.perf_counter())
        checksum = cache.checksum(len(prompt))
        yield LocalResult(request, tuple(answer), checksum, first - admitted, finished[-1] - begun)


def main(job: Job) -> None:
    """Serve the job's prompts and print each result as a line of JSON."""
    for result in serve(job.settings.model(), job.prompts, job.settings):
        print(result.to_json(), flush=True)
