"""Servers that are found by their role: start several, call them, end one with Ctrl-C, start another.

python examples/members.py registry                   # prints the address of the registry
python examples/members.py serve 'aiote://...'         # as often as you like
python examples/members.py call 'aiote://...' 2 3 4    # waits for the first; then says who has computed what
"""

from __future__ import annotations

import argparse
import asyncio
import os

import aiote
from aiote import service
from aiote.discovery import EmbeddedRegistry, Member, Members, RegistryServer


class Square(service.Service):
    @service.method(idempotent=True)
    async def square(self, value: float) -> tuple[float, int]:
        return value * value, os.getpid()


async def keep(engine: aiote.Engine, args: argparse.Namespace) -> None:
    async with RegistryServer(engine):
        print(engine.address, flush=True)
        await asyncio.Event().wait()


async def serve(engine: aiote.Engine, args: argparse.Namespace) -> None:
    me = Member(f"square-{os.getpid()}", "square", bytes(engine.address), engine.address.incarnation)
    async with service.serve(engine, Square()) as server, EmbeddedRegistry(engine, args.registry) as registry:
        async with registry.join(me):
            print(me.name, flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await server.drain()  # calls that have begun are answered; new ones go elsewhere


async def call(engine: aiote.Engine, args: argparse.Namespace) -> None:
    async with EmbeddedRegistry(engine, args.registry) as registry:
        client = service.client(engine, Members(registry, "square"), Square)
        for value in args.values:
            square, process = await client.square(value)
            print(f"{value:g} * {value:g} = {square:g}, says square-{process}", flush=True)


async def main(args: argparse.Namespace) -> None:
    async with aiote.open_engine(args.provider) as engine:
        await {"registry": keep, "serve": serve, "call": call}[args.what](engine, args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find servers by their role.")
    parser.add_argument("what", choices=["registry", "serve", "call"])
    parser.add_argument("registry", nargs="?", type=aiote.Address.parse, help="the address of the registry")
    parser.add_argument("values", nargs="*", type=float)
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    try:
        asyncio.run(main(parser.parse_args()))
    except aiote.AioteError as error:
        raise SystemExit(f"members.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("members.py: interrupted") from None
