"""Measure aiote beside the same loops in plain C: first with default settings, then with processes that spin.

usage: run.py compare [--peers] [arguments of `aiote bench compare`]

The first half is over `local` and `socket`, where nothing is pinned and all sleep as engines do; its records go to
build/bench-default.json. In the second half each process spins on a processor of its own: over `local`, `socket`, and
tcp and shm of the newest libfabric here and of the system's; its records go to build/bench.json. With `--mode`,
`--provider`, `--library` or `--connect` there is one run of just that. With `--peers` the libraries that
`install_peers.py install` has installed take part, the files are build/bench-peers*.json, and one libfabric is enough.
`--json` and `--plot` name other files; those of the first half have `-default` after their names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import BUILD, say, ways_of
from run_tests import system_library, wheel_library

from aiote.bench.contestants import OWN

ONE = ("--mode", "--provider", "--library", "--connect", "--help")
"""Options that choose one run."""


def libraries(*, peers: bool) -> list[Path]:
    """Return what to measure with, the newest first. Ends the program where there is none."""
    found = list(dict.fromkeys(path for path in (wheel_library(), system_library()) if path is not None))
    if not found:
        raise SystemExit("error: there is no libfabric here: apt-get install libfabric1, or pip install mpich")
    if len(found) == 1 and not peers:
        say(f"only one libfabric is here, {found[0]}: the other version is not measured")
    return found[:1] if peers else found


def list_peers() -> Path:
    """Write down what is installed of other libraries, and return where."""
    BUILD.mkdir(exist_ok=True)
    file = BUILD / "peers.jsonl"
    file.write_text("".join(f"{json.dumps(way)}\n" for way in ways_of()))
    return file


def value_of(arguments: Sequence[str], option: str, otherwise: str = "") -> str:
    """Return what an option was given last, as `--option value` or `--option=value`."""
    found = otherwise
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word == option or word.startswith(f"{option}="):
            found = following if word == option else word.partition("=")[2]
    return found


def command(arguments: Sequence[str], *, peers: bool) -> list[str]:
    """Return the command of one run."""
    usual = "socket" if value_of(arguments, "--connect") else "tcp,shm"
    providers = value_of(arguments, "--provider", usual)
    made = [str(Path(sys.executable).with_name("aiote")), "bench", "compare", *arguments, "--provider", providers]
    if not value_of(arguments, "--library") and not {word.strip() for word in providers.split(",")}.issubset(OWN):
        made += [word for path in libraries(peers=peers) for word in ("--library", str(path))]
    if peers:
        made += ["--with", str(list_peers())]
    return [*made, "--reno"]


def halves(arguments: Sequence[str], json_file: Path) -> tuple[list[str], list[str]]:
    """Return the arguments of both halves, which write to files of their own."""
    plot = value_of(arguments, "--plot")
    first = [*arguments, "--provider", "local,socket", "--mode", "default"]
    first += ["--json", str(json_file.with_stem(f"{json_file.stem}-default"))]
    if plot:
        first += ["--plot", str(Path(plot).with_stem(f"{Path(plot).stem}-default"))]
    second = [*arguments, "--provider", "local,socket,tcp,shm", "--mode", "spin", "--json", str(json_file)]
    return first, second


def ended(run: Sequence[str]) -> int:
    """Run a command and return its status. Ctrl-C reaches it, too; it keeps what it has measured, and ends."""
    with subprocess.Popen(run) as running:
        while True:
            try:
                return running.wait()
            except KeyboardInterrupt:
                continue


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word != "--peers"]
    peers = "--peers" in sys.argv[1:]
    BUILD.mkdir(exist_ok=True)
    file = Path(value_of(arguments, "--json", str(BUILD / ("bench-peers.json" if peers else "bench.json"))))
    if any(word.split("=")[0] in ONE for word in arguments):
        run = command([*arguments, "--json", str(file)], peers=peers)
        os.execv(run[0], run)
    texts = ("first half: default settings, nothing is pinned", "second half: spinning, each on its own processor")
    for text, half in zip(texts, halves(arguments, file), strict=True):
        say(text)
        if status := ended(command(half, peers=peers)):
            return abs(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
