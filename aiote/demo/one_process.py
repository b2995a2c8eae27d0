"""The one-process generation that a run is compared with: the same model, the same chunks, no engine.

It runs in a process of its own, as the others do, with one BLAS thread.

It serves one request after the other, each completely, first come, first served. `concurrency` requests are admitted at
a time, as in the run, and the time to first token is counted from admission, so both sides carry the same load.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aiote.demo import tokens
from aiote.demo.children import how_it_ended, spawn
from aiote.demo.faults import DemoError
from aiote.demo.life import tell
from aiote.demo.model import Model
from aiote.demo.request_cache import RequestCache
from aiote.demo.settings import Settings

__all__ = ["LocalResult", "generate", "main", "run_reference", "serve"]


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The tokens of one request, and the checksum of its prompt's keys and values.

    `ttft_s` is the time from its admission to its first token, `finished_s` from the beginning of all to its last
    token.
    """

    request: int
    tokens: list[int]
    checksum: int
    ttft_s: float
    finished_s: float


def generate(model: Model, prompt: Sequence[int], cache: RequestCache, settings: Settings) -> Iterator[int]:
    """Yield the tokens that follow a prompt, greedily, up to the end mark or `new_tokens` of them."""
    logits = model.prefill(prompt, cache, settings.chunk_tokens)
    for position in range(len(prompt), len(prompt) + settings.new_tokens):
        token = int(np.argmax(logits))
        yield token
        if token == tokens.END or position + 1 == len(prompt) + settings.new_tokens:
            return
        logits = model.step(token, position, cache)


def serve(model: Model, prompts: Sequence[bytes], settings: Settings) -> Iterator[LocalResult]:
    """Generate for each prompt in turn."""
    memory = settings.memory(model.config)
    finished: list[float] = []
    begun = time.perf_counter()
    for request, prompt in enumerate(map(tokens.encode, prompts)):
        admitted = begun if request < settings.concurrency else finished[request - settings.concurrency]
        cache = RequestCache(memory, range(settings.pages_for(len(prompt) + settings.new_tokens - 1)))
        answer: list[int] = []
        first = 0.0
        for token in generate(model, prompt, cache, settings):
            first = first or time.perf_counter()
            answer.append(token)
        finished.append(time.perf_counter())
        checksum = cache.checksum(len(prompt))
        yield LocalResult(request, answer, checksum, first - admitted, finished[-1] - begun)


def main(settings: Settings, prompts: Sequence[bytes]) -> None:
    """Serve prompts and print each result. Runs in the child."""
    for result in serve(settings.model(), prompts, settings):
        tell(**dataclasses.asdict(result))


async def run_reference(settings: Settings, prompts: Sequence[bytes], each: Callable[[], None]) -> list[LocalResult]:
    """Generate for the prompts in one process and return the results in order; `each` is called after every request.

    Raises DemoError if that process ends early or writes something else.
    """
    results: list[LocalResult] = []
    async with spawn("local", settings) as child:
        await child.ask(prompts=[list(prompt) for prompt in prompts])
        async for fact in child.facts():
            results.append(LocalResult(**fact))
            each()
        code = await child.wait()
        if code or [result.request for result in results] != list(range(len(prompts))):
            raise DemoError(
                f"the {child.name} (pid {child.process.pid}) ended after {len(results)} of {len(prompts)} requests "
                f"({how_it_ended(code)}): {child.complaint or 'it gave no reason'}"
            )
    return results
