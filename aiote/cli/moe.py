"""The command `aiote demo moe`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from aiote.demo import tokens
from aiote.demo.faults import DemoError, leaves
from aiote.demo.moe_model import LOCAL, PROMPTS, RANKS, MoeSettings
from aiote.demo.moe_run import MoeRun
from aiote.errors import AioteError, UsageError

__all__ = ["command"]

_COLOURS = {"starting": "dim", "whole": "green", "killed": "red"}

Provider = Annotated[str, typer.Option(help="The provider: auto chooses the best; or local, socket, tcp, shm.")]
NewTokens = Annotated[int, typer.Option("--tokens", min=8, max=256, help="Tokens of each rank in each act.")]
Layers = Annotated[int, typer.Option(min=1, max=16, help="Layers of the model.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of its weights.")]
Kill = Annotated[int, typer.Option("--kill", min=0, max=RANKS - 1, help="The rank that is killed.")]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines only, as without a terminal.")]


def command(
    provider: Provider = "auto",
    new_tokens: NewTokens = 32,
    layers: Layers = 4,
    seed: Seed = 0,
    kill: Kill = RANKS - 1,
    plain: Plain = False,
) -> None:
    """Generate with the experts of a small model in four processes; one is killed, and another takes its place.

    Every token, and all bits of its logits, are compared with those of one process that has the same experts.
    """
    console = Console(highlight=False)
    moe = MoeRun(MoeSettings(provider, layers, new_tokens, seed), kill, partial(console.print, soft_wrap=True))
    live = Live(get_renderable=lambda: _table(moe), console=console, refresh_per_second=12)
    lines_only = plain or not console.is_terminal or console.is_dumb_terminal
    causes: list[BaseException] = []
    try:
        with nullcontext() if lines_only else live:
            anyio.run(moe.run)
    except* (DemoError, AioteError) as group:
        causes = list(leaves(group))
    # Not inside the handler: an exception raised under `except*` becomes part of a group, which would hide the exit
    # status.
    if causes:
        typer.echo(f"aiote: {'; '.join(dict.fromkeys(str(cause) for cause in causes))}", err=True)
        # The engine refused an argument, such as an unknown provider.
        raise typer.Exit(2 if all(isinstance(cause, UsageError) for cause in causes) else 1)


def _table(moe: MoeRun) -> Table:
    """Return the current ranks. A token is red if it differs from that of one process with all experts."""
    table = Table("rank", "process", "experts", Column("state", min_width=9), Column("text", ratio=1), expand=True)
    for rank in moe.ranks:
        whole = moe.whole[rank.number] if moe.whole else []
        text = Text(tokens.readable(PROMPTS[rank.number]), style="dim")
        for place, (token, _) in enumerate(rank.tokens):
            known = place < len(whole) and whole[place][0] == token
            text.append(tokens.readable([token]), style="green" if known else "bold red")
        first = rank.number * LOCAL
        state = Text(rank.state, style=_COLOURS.get(rank.state, "yellow"))
        table.add_row(str(rank.number), str(rank.child.process.pid), f"{first}-{first + LOCAL - 1}", state, text)
    return table
