"""The command `aiote doctor`: show what this machine lacks for RDMA and for aiote, and how to mend it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

import aiote
from aiote.rails.diagnosis import Facts, Finding, examine, gather
from aiote.rails.facts import OF_THE_MACHINE, with_efa

__all__ = ["as_dict", "command", "lines"]

Json = Annotated[bool, typer.Option("--json", help="Print the findings and the facts as JSON.")]
Sysfs = Annotated[
    Path | None,
    typer.Option("--sysfs", metavar="DIR", exists=True, file_okay=False, help="Examine a recorded tree, not /sys."),
]


def command(as_json: Json = False, sysfs: Sysfs = None) -> None:
    """Show what this machine lacks, each with the command that mends it; exit with 1 when something is wrong."""
    try:
        facts = with_efa(gather(library=aiote.EngineConfig().libfabric)) if sysfs is None else gather(str(sysfs))
    except aiote.UsageError as error:
        typer.echo(f"aiote: {error}", err=True)
        raise typer.Exit(2) from error
    findings = examine(facts)
    typer.echo(json.dumps(as_dict(findings, facts), indent=2) if as_json else "\n".join(lines(findings, facts)))
    raise typer.Exit(int(any(finding.level == "wrong" for finding in findings)))


def as_dict(findings: list[Finding], facts: Facts) -> dict[str, Any]:
    """Return findings and facts for a program; `left_out` names the facts that a recorded tree does not contain."""
    left_out = list(OF_THE_MACHINE) if facts.recorded else []
    return {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": {**dataclasses.asdict(facts), "left_out": left_out},
    }


def lines(findings: list[Finding], facts: Facts) -> list[str]:
    """Return the lines to print: a finding takes one line, its command the next."""
    shown = [
        line
        for finding in findings
        for line in (
            f"{finding.level:5}  {_plain(finding.about)}: {_plain(finding.what)}",
            f"       {_plain(finding.mend)}",
        )
    ]
    if facts.recorded:
        shown.append(f"A recorded tree, left out: {', '.join(OF_THE_MACHINE)}.")
    wrong = sum(finding.level == "wrong" for finding in findings)
    return [*shown, f"Wrong: {wrong}, hints: {len(findings) - wrong}." if wrong else "Nothing is wrong."]


def _plain(text: str) -> str:
    """Replace characters that a terminal might take for a command, or cannot show."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
