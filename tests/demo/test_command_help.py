"""The command line explains itself: every command, in short and in long form, with the defaults of its options."""

from __future__ import annotations

import itertools

import pytest
import typer
from typer.testing import CliRunner

from aiote.cli.app import app

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def commands(group: typer.Typer) -> list[tuple[str, ...]]:
    """Return the words of every command, groups included."""
    root = typer.main.get_command(group)

    def below(command, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = getattr(command, "commands", {})
        return [words, *itertools.chain(*(below(one, (*words, name)) for name, one in inner.items()))]

    return below(root, ())


def said(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), env=WIDE)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("words", commands(app), ids=" ".join)
def test_short_and_long_help_say_the_same(words):
    assert said(*words, "-h") == said(*words, "--help")


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        (("demo", "kvcache"), ["[default: (one that ships)]", "[default: (6)]", "[default: auto]", "[default: 32]"]),
        (("demo", "weights"), ["[default: 6]", "[default: 0]"]),
        (
            ("bench", "compare"),
            ["[default: (the one that engines take)]", "[default: (by work)]", "[default: tcp,shm]"],
        ),
        (("bench", "write"), ["[default: (127.0.0.1:18515)]"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_help_shows_the_defaults(words, defaults):
    text = said(*words, "--help").replace("│ │ ", "")
    for default in defaults:
        assert default in text


def test_completion_can_be_installed():
    text = said("--help")
    assert "--install-completion" in text
    assert "--show-completion" in text
