"""One run: from the command line to the exit status."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from . import debian, job, kernel
from .channels import NAMES, Conversation
from .guard import Guard
from .host import SYSTEM_PATH, Problem, lacking, log, require
from .options import Options, parse
from .ways import Way, choose

REFUSED = 125
NETWORK_PROGRAMS = {"ip": "iproute2", "rdma": "iproute2"}
LAST_LINES = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    _talk(options.verbose)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return _do(options)
    except Problem as problem:
        log.error("%s", problem)
        return REFUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read the output is gone; nothing must be written to it on the way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _talk(verbose: bool) -> None:
    form = "guest: [%(relativeCreated)6.0f ms] %(message)s" if verbose else "guest: %(message)s"
    logging.basicConfig(format=form, level=logging.DEBUG if verbose else logging.INFO)


def _do(options: Options) -> int:
    machine = os.uname().machine
    if machine != "x86_64":
        raise Problem(f"a guest needs a host with x86_64 processors, this one has {machine}")
    if options.prepare:
        debian.prepare(options.cache, options.kernel)
    if options.build_uml:
        kernel.build(options.cache, options.source)
    return run(options) if options.command else 0


def run(options: Options) -> int:
    """Run the command in a guest; return its exit status."""
    way = choose(options)
    require({**lacking(NETWORK_PROGRAMS, SYSTEM_PATH), **way.missing()}, "run the guest")
    way.ready()
    log.debug("%s, %s", way.name, way.home)
    cwd = os.getcwd()
    place = job.Place(cwd, dict(os.environ), job.shared_folders(cwd, options.rw, options.discard))
    folder = Path(tempfile.mkdtemp(prefix="rdma-vm."))
    guard = Guard(folder, options.keep)
    try:
        status = _converse(options, way, folder, place, guard)
    except Problem as problem:
        raise Problem(f"{problem}{_last_words(folder)}") from None
    finally:
        guard.end()
        if options.keep:
            log.info("kept %s", folder)
    return status


def _converse(options: Options, way: Way, folder: Path, place: job.Place, guard: Guard) -> int:
    end = f"end-of-output-{secrets.token_hex(8)}"
    job.write(options, way, folder, place, end)
    with ExitStack() as stack:
        ours, theirs = {}, {}
        for name in NAMES:
            here, there = socket.socketpair()
            ours[name], theirs[name] = stack.enter_context(here), stack.enter_context(there)
        guard.watch(_start(way, folder, place, theirs))
        for channel in theirs.values():
            channel.close()  # so that the guest's end is seen
        status = Conversation(ours, end.encode(), options.boot_timeout, options.timeout).follow()
    if status is None:
        raise Problem("the guest ended before the command did")
    return status


def _start(way: Way, folder: Path, place: job.Place, channels: Mapping[str, socket.socket]) -> subprocess.Popen[bytes]:
    descriptors = {name: channel.fileno() for name, channel in channels.items()}
    command, environment = way.command(folder, place.shares, descriptors)
    log.debug("%s", shlex.join(command))
    with (folder / "log").open("wb") as said:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=list(descriptors.values()),
            start_new_session=True,
            preexec_fn=way.place,
        )


def _last_words(folder: Path) -> str:
    """Return the end of what the kernel, and the program that runs it, have written."""
    text = ""
    for name in ("log", "console"):
        try:
            lines = (folder / name).read_text(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            continue
        readable = (re.sub(r"[^\x20-\x7e]", "", line) for line in lines)
        text += "".join(f"\n    {name}: {line}" for line in readable if line)
    return text
