"""The command `aiote demo kvcache`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, NoReturn

import anyio
import typer
from rich.console import Console

from aiote.cli.report import Bars, RunSummary, summarize
from aiote.demo import prompts
from aiote.demo import run as runs
from aiote.demo.faults import DemoError, leaves
from aiote.demo.model import ModelConfig
from aiote.demo.one_process import run_reference
from aiote.demo.settings import Settings
from aiote.demo.tokens import encode
from aiote.errors import AioteError, UsageError

__all__ = ["command"]

_LAYERS = 6

Prompt = Annotated[str | None, typer.Argument(help="The text to continue.", show_default="one that ships")]
PromptFile = Annotated[
    str | None, typer.Option(metavar="FILE", help='Read the prompt from a file; "-" is standard input.')
]
Provider = Annotated[str, typer.Option(help="The provider: auto chooses the best; or local, socket, tcp, shm.")]
Requests = Annotated[int, typer.Option(min=1, max=1000, help="How many prompts, varied from the given one.")]
Concurrency = Annotated[int, typer.Option(min=1, max=64, help="How many of them at a time.")]
NewTokens = Annotated[int, typer.Option(min=1, max=4096, help="How many tokens to generate for each.")]
Layers = Annotated[
    int | None, typer.Option(min=1, max=128, help="Layers of the seeded model.", show_default=str(_LAYERS))
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of its weights.", show_default="0")]
WeightsFile = Annotated[str | None, typer.Option(metavar="FILE", help="A safetensors file; see `aiote demo weights`.")]
PageTokens = Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a page.")]
ChunkTokens = Annotated[
    int, typer.Option(min=1, max=16384, help="Tokens in a chunk of the prefill; a multiple of --page-tokens.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Kill = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Kill the prefiller after this fraction of the pages."),
]


def command(
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    provider: Provider = "auto",
    requests: Requests = 4,
    concurrency: Concurrency = 2,
    new_tokens: NewTokens = 32,
    layers: Layers = None,
    seed: Seed = None,
    weights: WeightsFile = None,
    page_tokens: PageTokens = 16,
    chunk_tokens: ChunkTokens = 256,
    as_json: Json = False,
    kill_prefiller_after: Kill = None,
) -> None:
    """Generate with prefill and decode in two processes. The prefiller writes the KV cache to the decoder.

    The tokens are compared with those of a one-process generation; the exit status is 0 only if all are equal.
    """
    try:
        texts = prompts.vary(prompts.read(prompt, prompt_file), requests)
        settings = Settings(
            provider=provider,
            layers=_layers(layers, seed, weights),
            seed=seed or 0,
            weights=weights,
            page_tokens=page_tokens,
            chunk_tokens=chunk_tokens,
            new_tokens=new_tokens,
            concurrency=min(concurrency, requests),
            pool_pages=0,
        ).with_pool_for(max(len(encode(text)) for text in texts))
        config = settings.config()
    except DemoError as error:
        _fail(str(error), as_json, code=2)
    summary = _run(settings, config, texts, kill_prefiller_after, as_json)
    if as_json:
        print(json.dumps(summary.as_dict()))
    else:
        summary.show(Console())
    if summary.wrong:
        typer.echo(f"aiote: {summary.wrong}", err=True)
        raise typer.Exit(1)


def _run(
    settings: Settings, config: ModelConfig, texts: Sequence[bytes], kill_prefiller_after: float | None, as_json: bool
) -> RunSummary:
    """Run the demo and compare its results. If the run fails, end the command."""

    async def both() -> RunSummary:
        with Bars(Console(stderr=True), len(texts)) as bars:
            result = await runs.run(settings, texts, bars, kill_prefiller_after=kill_prefiller_after)
            bars.reference_started()
            references = await run_reference(settings, texts, bars.reference)
        return summarize(settings, config, result, references)

    causes: list[BaseException] = []
    try:
        return anyio.run(both)
    except* (DemoError, AioteError) as group:
        causes = list(leaves(group))
    # Not inside the handler: an exception raised under `except*` becomes part of a group, which would hide the exit
    # status.
    message = "; ".join(dict.fromkeys(str(cause) for cause in causes))
    details = next((cause.details for cause in causes if isinstance(cause, runs.RunFailed)), {})
    # The engine refused an argument, such as an unknown provider.
    code = 2 if all(isinstance(cause, UsageError) for cause in causes) else 1
    _fail(message, as_json, code=code, details=details)


def _layers(layers: int | None, seed: int | None, weights: str | None) -> int:
    if weights is not None and (layers is not None or seed is not None):
        raise DemoError(
            "--weights defines the whole model, so --layers and --seed conflict with it; give one or the other"
        )
    return layers or _LAYERS


def _fail(message: str, as_json: bool, *, code: int = 1, details: dict[str, object] | None = None) -> NoReturn:
    typer.echo(f"aiote: {message}", err=True)
    if as_json:
        print(json.dumps({"ok": False, "error": message, **(details or {})}))
    raise typer.Exit(code)
