"""A service: requests come as messages, results are written into memory of the client's own.

Both sides in one process:

    python examples/service.py
    python examples/service.py --text "count my bytes"

Two processes (on two machines with the same AIOTE_CLUSTER_KEY on both, 16 bytes or more):

    python examples/service.py --listen                      # prints its address
    python examples/service.py --connect 'aiote://...' --text "count my bytes"

The service counts how often each byte occurs in a text. A request names where the result goes and what is counted up
when it is there; the service answers many clients at a time and outlives those that fail.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys

import numpy

import aiote

REQUEST = struct.Struct("!IH")  # the immediate to count on, the length of the descriptor that follows; then the text


async def serve(engine: aiote.Engine) -> None:
    """Answer requests, 64 at a time; meanwhile others stay in their pools, and then their senders wait."""
    room = asyncio.Semaphore(64)
    async with asyncio.TaskGroup() as group:
        async for message in engine.messages():
            await room.acquire()
            group.create_task(answer(engine, message)).add_done_callback(lambda _: room.release())


async def answer(engine: aiote.Engine, message: aiote.Message) -> None:
    """Do the work of one request and write the result into the client's memory."""
    try:
        imm, length = REQUEST.unpack_from(message.data)
        target = engine.attach(message.data[REQUEST.size : REQUEST.size + length])
        text = numpy.frombuffer(message.data, numpy.uint8, offset=REQUEST.size + length)
        result = engine.register(numpy.bincount(text, minlength=256))
        try:
            await engine.write_imm(result, target, imm)
        finally:
            await result.aclose()
    except (aiote.AioteError, struct.error, ValueError) as error:
        print(f"service.py: a request failed: {error}", file=sys.stderr)


async def ask(engine: aiote.Engine, service: aiote.Peer, text: bytes) -> numpy.ndarray:
    """Send one request and wait until its result is in our memory."""
    result = numpy.empty(256, numpy.int64)
    region = engine.register(result)
    try:
        with engine.counter() as done:
            await engine.send(service, REQUEST.pack(done.imm, len(region.descriptor)) + region.descriptor + text)
            await unless_lost(service, done)
    finally:
        await region.aclose()
    return result


async def unless_lost(peer: aiote.Peer, counter: aiote.Counter) -> None:
    """Wait for one count, or fail when the peer is lost: a counter does not know whose writes it counts."""
    counting, losing = asyncio.ensure_future(counter.wait(1)), asyncio.ensure_future(peer.wait_closed())
    try:
        await asyncio.wait({counting, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not counting.done():
            raise aiote.PeerError(str(peer.address), losing.result())
        counting.result()
    finally:
        counting.cancel()
        losing.cancel()
        await asyncio.gather(counting, losing, return_exceptions=True)


async def show(engine: aiote.Engine, address: aiote.Address | str, text: str) -> None:
    counts = await ask(engine, await engine.connect(address), text.encode())
    most = sorted(range(256), key=lambda byte: (-counts[byte], byte))[:3]
    print(f"{counts.sum()} bytes; most often:", ", ".join(f"{chr(byte)!r} {counts[byte]}" for byte in most))


async def main(args: argparse.Namespace) -> None:
    async with aiote.open_engine(args.provider, config=aiote.EngineConfig(host=args.listen or None)) as engine:
        if args.listen is not None:
            print(engine.address, flush=True)
            await serve(engine)
        elif args.connect is not None:
            await show(engine, args.connect, args.text)
        else:
            async with aiote.open_engine(args.provider) as service:
                serving = asyncio.create_task(serve(service))
                try:
                    await show(engine, service.address, args.text)
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count bytes, as a service; without a role, both sides run here.")
    parser.add_argument(
        "--provider", default="auto", help="auto (the default), local, socket, tcp or shm; the same on both sides"
    )
    parser.add_argument("--listen", nargs="?", const="", metavar="HOST", help="serve; HOST is this machine's address")
    parser.add_argument("--connect", metavar="ADDRESS", help="ask the service at ADDRESS")
    parser.add_argument("--text", default="one-sided writes, awaited", help="what to have counted")
    args = parser.parse_args()
    if args.connect is not None and args.listen is not None:
        parser.error("--listen and --connect are the two sides: give one, or none to run both here")
    return args


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))
    except aiote.AioteError as error:
        raise SystemExit(f"service.py: {error}") from None
    except KeyboardInterrupt:
        print("service.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
