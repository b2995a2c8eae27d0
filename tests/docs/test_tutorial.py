"""The tutorial's programs and commands run as they are written, and print what the page shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.engines.opening import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
PROGRAMS = dict(re.findall(r"Save this as `([\w.]+)`:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PORT = "7001"


@pytest.fixture
def start(tmp_path):
    """Start a command of the page in a folder with its programs, on a port that is free here."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    bin_folder = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOTE_")}
    begun: list[subprocess.Popen[str]] = []

    def run(command: str) -> subprocess.Popen[str]:
        environment = kept | {"PATH": f"{bin_folder}:{kept['PATH']}", "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            command.replace(PORT, port),
            shell=True,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    def output(process: subprocess.Popen[str], before: str = "") -> str:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert err == ""
        return (before + out).replace(port, PORT)

    yield run, output
    for process in begun:
        process.kill()
        process.communicate()


def test_every_block_of_the_tutorial_is_run():
    """A block of another kind, or with another introduction, would be shown and never run."""
    assert re.findall(r"^```(\w+)$", PAGE, re.MULTILINE).count("python") == len(PROGRAMS) == 3
    assert PAGE.count("\n```console\n") == len(COMMANDS)
    assert [command for command, _ in COMMANDS if PORT in command] == [command for command, _ in COMMANDS[2:]]


@pytest.mark.parametrize(
    ("command", "shown"), [*COMMANDS[:2], *COMMANDS[4:]], ids=lambda text: text.split("\n")[0][:40]
)
def test_a_command_alone_prints_what_the_page_shows(start, command, shown):
    run, output = start
    assert output(run(command)) == shown


def test_the_two_processes_print_what_the_page_shows(start):
    run, output = start
    (prefill, of_prefill), (decode, of_decode) = COMMANDS[2:4]
    there = run(prefill)
    ready = there.stdout.readline()
    assert output(run(decode)) == of_decode
    assert output(there, ready) == of_prefill
