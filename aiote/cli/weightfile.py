"""The command `aiote demo weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiote.demo import weights
from aiote.demo.faults import DemoError

__all__ = ["command"]


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    layers: Annotated[int, typer.Option(min=1, max=128, help="Layers of the model.")] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write seeded weights as a safetensors file, to try `aiote demo kvcache --weights` with."""
    try:
        if out.exists() and not force:
            raise DemoError(f"{out}: the file exists already; --force replaces it")
        model = weights.seeded(weights.seeded_config(layers), seed)
        weights.save(model, out)
    except DemoError as error:
        typer.echo(f"aiote: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{out}: {layers} layers, {out.stat().st_size} bytes")
