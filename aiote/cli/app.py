"""The tree of commands. Import this module only after checking that typer and rich are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from aiote.cli import bench, doctor, info, kvcache, moe, plan, plan_kvcache, plan_moe, prove, top, weightfile

__all__ = ["run"]

app = typer.Typer(
    name="aiote",
    help="Move bytes between the memories of machines, from asyncio.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
demo = typer.Typer(help="See the engine at work on real input.", no_args_is_help=True)
app.add_typer(demo, name="demo")
app.add_typer(bench.app, name="bench")
plans = typer.Typer(help="Plan transfers: show what would be moved.", no_args_is_help=True)
app.add_typer(plans, name="plan")
app.command("info")(info.command)
app.command("doctor")(doctor.command)
app.command("top")(top.command)
app.command("prove")(prove.command)
demo.command("kvcache")(kvcache.command)
demo.command("moe")(moe.command)
demo.command("weights")(weightfile.command)
plans.command("weights")(plan.weights)
plans.command("kvcache")(plan_kvcache.kvcache)
plans.command("moe")(plan_moe.moe)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"aiote {metadata.version('aiote')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Move bytes between the memories of machines, from asyncio."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status. After an interrupt, return 130, as shells do, or raise
    KeyboardInterrupt.
    """
    try:
        app(args=list(arguments), prog_name="aiote")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0
