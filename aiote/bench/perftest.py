"""A side of a comparison that runs linux-rdma's perftest (`ib_write_bw` and its kin), as far as it measures the same.

Both have the same bytes, requests, outstanding requests, device, port and GID. Some things differ: perftest does not
check the bytes; `ib_send_lat` sends where the others write an immediate (no program of perftest waits for one);
`ib_write_lat` polls memory instead of a queue; the latency programs print half a round trip. The programs count time by
the processor's cycle counter, whose frequency they take from /proc/cpuinfo and from a short trial. If these fail, they
print 0 or inf, which this module refuses. A program starts anew for each run, and its CPU time includes the start.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from aiote.bench.devices import ports_of
from aiote.bench.sides import BenchError
from aiote.bench.work import Work

__all__ = ["WorkerError", "available", "command_of", "main", "result_of"]

BANDWIDTH = {"write": "ib_write_bw", "rate": "ib_write_bw", "read": "ib_read_bw", "send": "ib_send_bw"}
LEAST = 5
"""The fewest iterations that the programs accept."""
MAX_READS = 16
LISTEN_S = 10.0
RUN_S = 100.0


class WorkerError(Exception):
    """A program failed, with its output, or printed no usable figure, with the reason."""


def available() -> bool:
    """Tell whether perftest is installed."""
    return all(shutil.which(name) for name in (*BANDWIDTH.values(), "ib_write_lat", "ib_send_lat"))


def command_of(work: Work, mode: str, place: str) -> list[str]:
    """Return the program for a run and its arguments, without the server's name; `place` is "device:port:GID index".

    Raises WorkerError for work that no program of perftest measures.
    """
    device, port, gid = place.split(":")
    common = ["-d", device, "-i", port, "-x", gid, "-F", "-s", str(work.size)]
    common += ["-n", str(max(work.count, LEAST))]
    if work.op == "latency":
        return ["ib_send_lat", "-e", *common] if mode == "event" else ["ib_write_lat", *common]
    if work.op not in BANDWIDTH:
        raise WorkerError(f"perftest cannot measure {work.op}")
    outstanding = min(work.window, MAX_READS) if work.op == "read" else work.window
    events = ["-e"] if mode == "event" and work.op == "send" else []
    return [BANDWIDTH[work.op], *events, *common, "-t", str(outstanding)]


def result_of(work: Work, said: str) -> dict[str, Any]:
    """Parse a program's output: the last line of numbers that begins with the size. Raises WorkerError."""
    rows = re.findall(rf"^ *{work.size} +\d+ +([-\d.einfa \t]+)$", said, re.MULTILINE)
    try:
        numbers = [float(word) for word in rows[-1].split()]
    except (IndexError, ValueError):
        numbers = []
    if len(numbers) < (4 if work.op == "latency" else 3):
        raise WorkerError(f"no figures in its output: {said.strip()[-200:]!r}")
    if not all(0 < number < math.inf for number in numbers[: 4 if work.op == "latency" else 3]):
        raise WorkerError(
            f"it measured {numbers[0]:g} to {numbers[1]:g}: it could not determine the rate of the cycle counter "
            "(/proc/cpuinfo does not say it, or the machine is too busy)"
        )
    if work.op != "latency":
        # Peak and average in MB/s, million requests a second. The last number has the most digits.
        return {"seconds": work.count / (numbers[2] * 1e6)}
    # t_min t_max t_typical t_avg t_stdev 99% 99.9%, in us, of one way.
    _, most, typical, average, *rest = numbers
    p99 = rest[1] if len(rest) > 1 else most
    return {
        "seconds": work.count * average * 2e-6,
        "p50_us": typical * 2,
        "p99_us": p99 * 2,
        "max_us": most * 2,
    }


def _listening(port: int) -> bool:
    wanted = f":{port:04X} "
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(name) as file:
            # sl, local address, remote address, state: 0A is LISTEN.
            if any(wanted in f"{line.split()[1]} " and line.split()[3] == "0A" for line in list(file)[1:]):
                return True
    return False


class Runner:
    """One side: it starts a program for each run, the target's before the initiator's."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        (port, gid), *more = ports_of(arguments.role, arguments.rails)
        if more:
            raise WorkerError(f"it drives one port, got {1 + len(more)}; name one with --rails")
        self.place = f"{port.device}:{port.number}:{gid.index}"
        self.tcp_port = _free_port()
        self.peer = ""
        self.work: Work | None = None
        self.server: subprocess.Popen[str] | None = None

    @property
    def is_target(self) -> bool:
        return bool(self.arguments.role == "target")

    def prepare(self, work: Work) -> None:
        """Start the server, which has to listen before the driver sends `go` to the other side."""
        command = command_of(work, self.arguments.mode, self.place)
        self.work = work
        if not self.is_target:
            return
        self.close()
        self.server = subprocess.Popen(
            [*command, "-p", str(self.tcp_port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        until = time.monotonic() + LISTEN_S
        while not _listening(self.tcp_port):
            if self.server.poll() is not None or time.monotonic() > until:
                said = self.server.communicate()[0] if self.server.poll() is not None else "it does not listen"
                raise WorkerError(f"{command[0]}: {said.strip()[-200:]}")
            time.sleep(0.01)

    def go(self) -> dict[str, Any]:
        """Do the prepared run."""
        assert self.work is not None
        before = os.times()
        if self.is_target:
            assert self.server is not None
            said, status = self.server.communicate(timeout=RUN_S)[0], self.server.returncode
        else:
            host, port = self.peer.rsplit(":", 1)
            command = [*command_of(self.work, self.arguments.mode, self.place), "-p", port, host]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S)
            said, status = done.stdout, done.returncode
        if status:
            raise WorkerError(f"exit status {status}: {said.strip()[-200:]}")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        measured = {"seconds": 1.0} if self.is_target else result_of(self.work, said)
        return {**measured, "cpu": cpu, "verified": True}

    def close(self) -> None:
        """End a server that no client connected to. Idempotent."""
        if self.server is not None:
            self.server.kill()
            self.server.communicate()
            self.server = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _version() -> str:
    said = subprocess.run(["ib_write_bw", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"[\d.]+", said)
    return f"perftest {found[0] if found else '?'}, data unchecked"


def _obey(runner: Runner, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "peer":
        runner.peer = rest.strip()
        _write_answer({"ready": True})
    elif word == "run":
        try:
            runner.prepare(Work.parse(line))
        except WorkerError as refusal:
            _write_answer({"unsupported": str(refusal)})
        else:
            _write_answer({"prepared": True})
    elif word == "go":
        _write_answer(runner.go())


def main() -> int:
    """Speak the protocol of `work` until standard input ends."""
    parser = argparse.ArgumentParser(description="perftest as a side of a measurement; `aiote bench` starts it.")
    parser.add_argument("--rails", default="")
    for name in ("--role", "--provider", "--mode", "--arena", "--cpu"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    if int(arguments.cpu) >= 0:
        os.sched_setaffinity(0, {int(arguments.cpu)})
    runner = None
    try:
        runner = Runner(arguments)
        _write_answer({"address": f"127.0.0.1:{runner.tcp_port}", "library": _version()})
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            _obey(runner, line.strip())
    except (WorkerError, BenchError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        _write_answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        if runner is not None:
            runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
