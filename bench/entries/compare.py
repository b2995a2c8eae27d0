"""Measure aiote beside the same loops in plain C: first with default settings, then with processes that spin.

usage: run.py compare [--peers] [arguments of `aiote bench compare`]

The first half is over `local` and `socket`, where nothing is pinned and all sleep as engines do; its records go to
build/bench-default.json. In the second half each process spins on a processor of its own: over `local`, `socket`, and
tcp and shm of the newest libfabric here and of the system's; its records go to build/bench.json. With `--mode`,
`--provider` or `--library` there is one run of just that. With `--peers` the libraries that `install_peers.py install`
has installed take part, the files are build/bench-peers*.json, and one libfabric is enough. `--json` names another
file; that of the first half has `-default` after its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import BUILD, say, ways_of
from run_tests import system_library, wheel_library

DEFAULTS = ("--provider", "local,socket", "--mode", "default")
TUNED = ("--provider", "local,socket,tcp,shm", "--mode", "spin")


def libraries(*, peers: bool) -> list[Path]:
    """Return what to measure with, the newest first. Ends the program where there is none."""
    found = list(dict.fromkeys(path for path in (wheel_library(), system_library()) if path is not None))
    if not found:
        raise SystemExit("error: there is no libfabric here: apt-get install libfabric1, or pip install mpich")
    if len(found) == 1 and not peers:
        print(f"only one libfabric is here, {found[0]}: the other version is not measured", file=sys.stderr)
    return found[:1] if peers else found


def list_peers() -> Path:
    """Write down what is installed of other libraries, and return where."""
    BUILD.mkdir(exist_ok=True)
    file = BUILD / "peers.jsonl"
    file.write_text("".join(f"{json.dumps(way)}\n" for way in ways_of()))
    return file


def command(arguments: Sequence[str], json_file: Path, *, peers: bool) -> list[str]:
    """Return the command of one half of the comparison, whose records go to a file."""
    made = [str(Path(sys.executable).with_name("aiote")), "bench", "compare", *arguments]
    ours = {"local", "socket"}.issuperset(value_of(arguments, "--provider", "local").split(","))
    if not ours and not any(word.startswith("--library") for word in arguments):
        made += [word for path in libraries(peers=peers) for word in ("--library", str(path))]
    made += ["--json", str(json_file)]
    if peers:
        made += ["--with", str(list_peers())]
    return [*made, "--reno"]


def value_of(arguments: Sequence[str], option: str, otherwise: str) -> str:
    """Return what an option was given last, as `--option value` or `--option=value`."""
    found = otherwise
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option or word.startswith(f"{option}="):
            found = following if word == option else word.partition("=")[2]
    return found


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word != "--peers"]
    peers = "--peers" in sys.argv[1:]
    BUILD.mkdir(exist_ok=True)
    file = Path(value_of(arguments, "--json", str(BUILD / ("bench-peers.json" if peers else "bench.json"))))
    if any(word.split("=")[0] in ("--mode", "--provider", "--library", "--help") for word in arguments):
        return subprocess.run(command(arguments, file, peers=peers)).returncode
    say("first half: default settings, nothing is pinned")
    first = command([*arguments, *DEFAULTS], file.with_stem(f"{file.stem}-default"), peers=peers)
    second = command([*arguments, *TUNED], file, peers=peers)
    return max(subprocess.run(half).returncode for half in (first, second))


if __name__ == "__main__":
    sys.exit(main())
