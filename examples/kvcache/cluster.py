"""One command for a whole cluster: a router, prefill servers and decode servers, each a process of its own.

    export KVCACHE_TOKEN=$(openssl rand -hex 16)
    python examples/kvcache/cluster.py --prefill 2 --decode 2 --port 8000
    curl localhost:8000/v1/completions -H "authorization: Bearer $KVCACHE_TOKEN" \\
        -H 'content-type: application/json' -d '{"prompt": "Once", "stream": true}'
    curl localhost:8000/scale -H "authorization: Bearer $KVCACHE_TOKEN" \\
        -H 'content-type: application/json' -d '{"prefill": 3}'

and the URL that it prints shows it. Without a token in the environment it makes one, which is in that URL. Servers that
are too many are drained, those that die are replaced. SIGTERM drains all; SIGINT (control-C) ends all at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.abc

import serving
from aiote.demo import Child, DemoError, Orders

HERE = Path(__file__).parent
LOG = logging.getLogger("cluster")
READY_S = 60.0
AGAIN_S = 0.5  # between the death of a server and its replacement
MOST_FAILURES = 3  # in a row, of servers that never were ready
MODEL = ("layers", "seed", "weights", "chunk_tokens", "step_tokens", "slower", "slots", "lease")
COMMON = ("provider", "host", "advertise", "page_tokens", "context")


class ClusterError(DemoError):
    """The cluster cannot go on."""


class Cluster:
    """As many servers as are wanted."""

    def __init__(self, args: argparse.Namespace, group: anyio.abc.TaskGroup) -> None:
        self.wanted = {"prefill": args.prefill, "decode": args.decode}
        self.children: list[Child] = []
        self.failure = anyio.Event()
        self.reason = ""
        self._args, self._group = args, group
        self._numbers = dict.fromkeys(("router", "prefill", "decode"), 0)
        self._failures = 0
        self._registry = ""
        token = os.environ.get(serving.TOKEN) or secrets.token_urlsafe(16)
        self._environment = {**os.environ, serving.TOKEN: token}
        self._changed = anyio.Event()
        self._ending = False
        self._scaling = anyio.Lock()  # two at a time would both start what is missing

    async def run(self) -> None:
        """Start everything, say when all are ready, and return when it cannot go on: `reason`. Raises ClusterError."""
        router = await self._start("router")
        await self._until(lambda: bool(router.ready))
        self._registry = router.ready["registry"]
        await self.scale({})
        await self._until(lambda: all(child.ready for child in self.children))
        counts = ", ".join(f"{count} {role} servers" for role, count in self.wanted.items())
        print(f"{router.ready['page']} is ready: {counts}", flush=True)
        await self.failure.wait()

    async def _until(self, true: Callable[[], bool]) -> None:
        with anyio.move_on_after(READY_S):
            while not true() and not self.failure.is_set():
                self._changed = anyio.Event()
                await self._changed.wait()
            if not self.failure.is_set():
                return
        raise ClusterError(self.reason or f"not all servers were ready within {READY_S:.0f} s")

    async def scale(self, wanted: dict[str, int]) -> None:
        """Have other numbers of servers: start those that are missing, drain the newest of those that are too many."""
        self.wanted.update(wanted)
        async with self._scaling:
            if self._ending:
                return
            for role, count in self.wanted.items():
                here = [child for child in self.children if child.role == role and not child.draining]
                for child in here[count:]:
                    LOG.info("draining %s", child.name)
                    child.draining = True
                    self._group.start_soon(child.end, signal.SIGTERM, self._args.drain_limit)
                for _ in range(count - len(here)):
                    await self._start(role)

    async def _start(self, role: str) -> Child:
        self._numbers[role] += 1
        name = f"{role}-{self._numbers[role]}"
        command = [sys.executable, *interpreter_flags(), str(HERE / f"{role}.py"), "--with-parent"]
        if role == "router":
            command += ["--scalable", "--port", str(self._args.port), *options(self._args, COMMON)]
        else:
            command += ["--name", name, "--registry", self._registry, *options(self._args, COMMON + MODEL)]
        child = await Child.start(role, name, command, self._environment)
        self.children.append(child)
        self._group.start_soon(self._mind, child)
        return child

    async def _mind(self, child: Child) -> None:
        """Follow a server through its life, and replace it when it dies."""
        async for fact in child.facts():
            if "ready" in fact:
                self._failures = 0
                LOG.info("%s is ready at %s, process %d", child.name, fact["ready"], child.process.pid)
            elif "scale" in fact:
                LOG.info("scaling to %s", fact["scale"])
                await self.scale(fact["scale"])
            self._tell()
        status = await child.process.wait()
        self.children.remove(child)
        LOG.info("%s ended with status %d", child.name, status)
        if not child.draining:
            await self._replace(child, status)
        self._tell()

    async def _replace(self, child: Child, status: int) -> None:
        self._failures += not child.ready
        if child.role == "router" or self._failures >= MOST_FAILURES:
            self.reason = f"{child.name} ended with status {status}"
            self.failure.set()
            return
        await anyio.sleep(AGAIN_S)
        await self.scale({})

    def _tell(self) -> None:
        self._changed.set()

    async def drain(self) -> None:
        """End all in order: first who takes requests and waits for them, then those that have none any more."""
        await self._end({"router"}, signal.SIGTERM, self._args.drain_limit)
        await self._end({"prefill", "decode"}, signal.SIGTERM, self._args.drain_limit)

    async def end(self) -> None:
        """End all at once, but for the router: the others tell its registry that they leave."""
        await self._end({"prefill", "decode"}, signal.SIGINT)
        await self._end({"router"}, signal.SIGINT)

    async def _end(self, roles: set[str], number: signal.Signals, *limit: float) -> None:
        self._ending = True
        for child in self.children:
            child.draining = True
        async with anyio.create_task_group() as group:
            for child in tuple(self.children):
                if child.role in roles:
                    group.start_soon(child.end, number, *limit)


def options(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the arguments that go on to a server."""
    given = {name: getattr(args, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def interpreter_flags() -> list[str]:
    """Return how warnings are treated here, for the servers to do the same."""
    return [f"-W{option}" for option in sys.warnoptions]


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Run a cluster until it is drained or fails."""
    serving.settings_of(args)  # said once, and not by every server
    async with anyio.create_task_group() as group:
        cluster = Cluster(args, group)
        try:
            if await orders.while_wanted(cluster.run):
                raise ClusterError(cluster.reason)
            if not orders.at_once.is_set():
                await orders.unhurried(cluster.drain)
        finally:
            with anyio.CancelScope(shield=True):
                await cluster.end()
            group.cancel_scope.cancel()


def arguments() -> argparse.Namespace:
    """Return what was given on the command line; most of it goes on to the servers."""
    parser = serving.model_parser("Start a router, prefill servers and decode servers.", member=False)
    parser.set_defaults(port=8000)
    parser.add_argument("--prefill", type=serving.at_least(0), default=2, help="how many prefill servers")
    parser.add_argument("--decode", type=serving.at_least(0), default=2, help="how many decode servers")
    parser.add_argument(
        "--drain-limit", type=serving.at_least(0.0), default=60.0, help="seconds that a server may take to drain"
    )
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    sys.exit(serving.start("cluster.py", partial(main, given), with_parent=given.with_parent))
