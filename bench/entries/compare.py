"""Measure aiote beside the raw loops over tcp and shm, with the newest libfabric here and with the system's.

usage: run.py compare [--peers] [arguments of `aiote bench compare`]

With `--peers` the libraries that `install_peers.py install` has installed take part in the same run, and one libfabric
is enough. The records go to build/bench.json unless `--json` names another file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness import BUILD, ways_of
from run_tests import system_library, wheel_library


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


def main() -> int:
    arguments = sys.argv[1:]
    peers = "--peers" in arguments
    if peers:
        arguments.remove("--peers")
    command = [str(Path(sys.executable).with_name("aiote")), "bench", "compare", *arguments]
    if not any(word.startswith("--library") for word in arguments):
        command += [word for path in libraries(peers=peers) for word in ("--library", str(path))]
    if not any(word.startswith("--json") for word in arguments):
        BUILD.mkdir(exist_ok=True)
        command += ["--json", str(BUILD / ("bench-peers.json" if peers else "bench.json"))]
    if peers:
        command += ["--with", str(list_peers())]
    os.execv(command[0], [*command, "--reno"])


if __name__ == "__main__":
    sys.exit(main())
