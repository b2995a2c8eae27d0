"""What the servers of this folder share: their arguments, the cluster's token, and their place in the registry.

All of a cluster have one token, in the environment as `KVCACHE_TOKEN`; `web` says what it is good for.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

import aiote
import web
from aiote.demo import DemoError, Orders, Settings, leave_with_parent, live
from aiote.discovery import EmbeddedRegistry, Member, MemberRegistration, Registry

TOKEN = "KVCACHE_TOKEN"
SETTLE_S = 0.3
TELL_S = 2.0  # how long to wait for the registry to hear that a server drains


def at_least(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return what reads a number in a range, whole where `least` is, from the command line."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            expected = f"from {least} to {most}" if most < math.inf else f"at least {least}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return number


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every server takes."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument(
        "--provider", default="auto", help="auto (the default), local, socket, tcp or shm; the same everywhere"
    )
    out.add_argument("--host", default="127.0.0.1", help="where HTTP is served")
    out.add_argument(
        "--advertise", metavar="HOST", help="under which others reach that; needed where --host is no such"
    )
    out.add_argument("--port", type=at_least(0, 65535), default=0, help="the port of it; 0, the default: any free one")
    out.add_argument("--page-tokens", type=at_least(1), default=16, help="tokens of a page")
    out.add_argument("--context", type=at_least(2), default=4096, help="tokens of the longest prompt with its answer")
    out.add_argument("--with-parent", action="store_true", help="drain when standard input ends")
    return out


def model_parser(description: str, *, member: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what prefill and decode servers take; a cluster takes all that makes no `member`."""
    out = parser(description)
    if member:
        out.add_argument("--registry", required=True, metavar="ADDRESS", help="the router's engine, which it prints")
        out.add_argument("--name", help="unique in the cluster; the process number is the default")
    out.add_argument("--layers", type=at_least(1), default=4, help="layers of the seeded model")
    out.add_argument("--seed", type=at_least(0), default=0, help="seed of its weights")
    out.add_argument("--weights", help="a safetensors file instead (aiote demo weights makes one)")
    out.add_argument(
        "--chunk-tokens", type=at_least(1), default=256, help="tokens that are prefilled at a time: whole pages"
    )
    out.add_argument(
        "--step-tokens", type=at_least(1), default=512, help="tokens of several prompts that a step prefills"
    )
    out.add_argument(
        "--slower", type=at_least(0.0), default=0.0, help="seconds that a layer of a step takes in addition"
    )
    out.add_argument("--slots", type=at_least(1), default=16, help="requests that have pages at a time")
    out.add_argument(
        "--lease", type=at_least(0.1, 600.0), default=3.0, help="seconds after which a silent member has left"
    )
    return out


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the demo's settings, which make its model. Raises DemoError."""
    pages = args.slots * -(-args.context // args.page_tokens)
    return Settings(
        provider=args.provider,
        layers=args.layers,
        seed=args.seed,
        weights=args.weights,
        page_tokens=args.page_tokens,
        chunk_tokens=args.chunk_tokens,
        new_tokens=args.context,
        concurrency=args.slots,
        pool_pages=pages,
    )


@asynccontextmanager
async def member_of_a_cluster(args: argparse.Namespace) -> AsyncIterator[tuple[aiote.Engine, Registry]]:
    """Open an engine that knows the router's registry. Raises AioteError."""
    async with aiote.open_engine(args.provider) as engine:
        router = aiote.Address.parse(args.registry)
        async with EmbeddedRegistry(engine, router, lease_s=args.lease) as registry:
            yield engine, registry


def name_of(args: argparse.Namespace, role: str) -> str:
    """Return what a server is called."""
    return args.name or f"{role}-{os.getpid()}"


def member(args: argparse.Namespace, role: str, engine: aiote.Engine, url: str, model: str, token: str) -> Member:
    """Return a server as the registry is to know it, with the proof that it has the token."""
    name, address = name_of(args, role), bytes(engine.address)
    attributes = {"url": url, "model": model, "proof": proof_of(token, name, role, address, url, model)}
    return Member(name, role, address, time.time_ns(), attributes)


def proof_of(token: str, name: str, role: str, address: bytes, url: str, model: str) -> str:
    """Return what shows that a server with these parts has the token."""
    return web.secret_of(token, "member", name, role, address.hex(), url, model)


def is_proven(token: str, member: Member) -> bool:
    """Tell whether a member has shown that it has the token."""
    url, model, proof = (str(member.attributes.get(name, "")) for name in ("url", "model", "proof"))
    expected = proof_of(token, member.name, member.role, member.address, url, model)
    return hmac.compare_digest(proof.encode(), expected.encode())


async def announce_draining(registry: Registry, registration: MemberRegistration) -> None:
    """Tell the registry that nothing more is wanted, and give those time who were told otherwise a moment ago.

    Where the registry is gone, whoever asks all the same is refused, and goes elsewhere.
    """
    if registry.in_touch:
        with anyio.move_on_after(TELL_S):
            await registration.update({**registration.member.attributes, "draining": True})
        await anyio.sleep(SETTLE_S)


def engine_stats(engine: aiote.Engine) -> dict[str, Any]:
    """Return what is to be shown of an engine."""
    counted = engine.statistics()
    rails = [
        {"name": rail.name, "provider": rail.provider, "state": rail.state, "bytes_carried": carried}
        for rail, carried in zip(engine.rails, counted.carried, strict=True)
    ]
    return {
        "pid": os.getpid(),
        "rails": rails,
        "peers": len(engine.peers),
        "transfers": counted.outstanding + counted.queued,
    }


def token() -> str:
    """Return the cluster's token. Raises DemoError where there is none."""
    if not os.environ.get(TOKEN):
        raise DemoError(f"{TOKEN} is not set in the environment: set it to the router's token")
    return os.environ[TOKEN]


def start(name: str, main: Callable[[Orders], Awaitable[None]], *, with_parent: bool) -> int:
    """Run a server that ends as it is told, and return its exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"{name}: %(message)s")
    for chatty in ("httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if with_parent:
        leave_with_parent(sys.stdin.fileno())
    return live(name, main)
