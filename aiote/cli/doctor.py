"""The command `aiote doctor`: try each provider, and show what this machine lacks for RDMA and for aiote."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import aiote
from aiote.cli.trial import Trial, tried
from aiote.diagnosis.facts import OF_THE_MACHINE, with_efa
from aiote.diagnosis.findings import Facts, Finding, examine, gather

__all__ = ["as_dict", "command", "lines"]

Json = Annotated[bool, typer.Option("--json", help="Print the findings and the facts as JSON.")]
Sysfs = Annotated[
    Path | None,
    typer.Option("--sysfs", metavar="DIR", exists=True, file_okay=False, help="Examine a recorded tree, not /sys."),
]


def command(as_json: Json = False, sysfs: Sysfs = None) -> None:
    """Say of each provider whether it is usable, or why not; then show what this machine lacks, each with the command
    that mends it. Exit with 1 when something is wrong, with 2 when an argument or a setting is.
    """
    try:
        facts = with_efa(gather(library=aiote.EngineConfig().libfabric)) if sysfs is None else gather(str(sysfs))
    except aiote.UsageError as error:
        typer.echo(f"aiote: {error}", err=True)
        raise typer.Exit(2) from error
    findings, trials = examine(facts), [] if facts.recorded else tried()
    told = (
        json.dumps(as_dict(findings, facts, trials), indent=2) if as_json else "\n".join(lines(findings, facts, trials))
    )
    typer.echo(told)
    raise typer.Exit(int(any(finding.level == "wrong" for finding in findings)))


def as_dict(findings: list[Finding], facts: Facts, trials: Sequence[Trial] = ()) -> dict[str, Any]:
    """Return providers, findings and facts for a program; `left_out` names the facts that a recorded tree does not
    contain.
    """
    left_out = list(OF_THE_MACHINE) if facts.recorded else []
    return {
        "providers": [{**dataclasses.asdict(trial), "usable": bool(trial.rails)} for trial in trials],
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": {**dataclasses.asdict(facts), "left_out": left_out},
    }


def lines(findings: list[Finding], facts: Facts, trials: Sequence[Trial] = ()) -> list[str]:
    """Return the lines to print: a provider takes one line, a finding one, its command the next."""
    shown = [f"{'yes' if trial.rails else 'no':5}  {_plain(_usable(trial))}" for trial in trials]
    shown += [
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


def _usable(trial: Trial) -> str:
    if trial.rails:
        return f"{trial.provider} is usable: {', '.join(trial.rails)}"
    return f"{trial.provider} is not usable: {trial.reason}"


def _plain(text: str) -> str:
    """Replace characters that a terminal might take for a command, or cannot show."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
