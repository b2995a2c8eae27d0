"""Round trips between two processes: one side writes, the other waits for the count and writes back.

On one machine, both processes started by one command:

    python examples/ping.py
    python examples/ping.py --provider shm --count 10000 --size 4096

On two machines, with the same secret of 16 bytes or more on both:

    export AIOTE_CLUSTER_KEY=...             # on both; head -c 24 /dev/urandom | base64 makes one
    python examples/ping.py --listen         # on the first; prints its address
    python examples/ping.py --connect 'aiote://...'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import struct
import sys
import time
from collections.abc import AsyncIterator, Coroutine

import aiote

WARM_UP = 100  # round trips before the clock starts: connections and queues settle
HELLO = struct.Struct("!II")  # the immediate to answer on, and how many round trips there will be; a descriptor follows


class PingError(Exception):
    """What ends this program, for a person."""


async def unless_lost(peer: aiote.Peer, work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end, or fail as soon as the peer is lost: a counter does not know whose writes it counts."""
    working, losing = asyncio.ensure_future(work), asyncio.ensure_future(peer.wait_closed())
    try:
        await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise PingError(f"lost the other side: {losing.result()}")
        await working
    finally:
        for task in (working, losing):
            task.cancel()
        await asyncio.gather(working, losing, return_exceptions=True)


async def serve(engine: aiote.Engine, once: bool) -> None:
    """Print the address and answer one client after the other."""
    print(engine.address, flush=True)
    async for message in engine.messages():
        if not once:
            print(f"ping.py: a client at {message.source.address.host}", file=sys.stderr)
        try:
            await unless_lost(message.source, answer(engine, message))
        except (PingError, aiote.AioteError, struct.error) as error:
            print(f"ping.py: a client failed: {error}", file=sys.stderr)
        if once:
            return


async def answer(engine: aiote.Engine, message: aiote.Message) -> None:
    """Write back for each write that arrives, as many times as the client said."""
    imm, count = HELLO.unpack_from(message.data)
    theirs = engine.attach(message.data[HELLO.size :])
    mine = engine.register(bytearray(theirs.nbytes))
    try:
        with engine.counter() as pings:
            await engine.send(message.source, HELLO.pack(pings.imm, count) + mine.descriptor)
            for _ in range(count):
                await pings.wait(1)
                await engine.write_imm(mine, theirs, imm)
    finally:
        await mine.aclose()


async def measure(engine: aiote.Engine, server: aiote.Peer, count: int, size: int) -> None:
    """Do the round trips and print what they took."""
    times: list[float] = []
    mine = engine.register(bytearray(size))
    with engine.counter() as pongs:
        await engine.send(server, HELLO.pack(pongs.imm, count + WARM_UP) + mine.descriptor)
        reply = (await engine.recv()).data
        imm, _ = HELLO.unpack_from(reply)
        theirs = engine.attach(reply[HELLO.size :])
        for _ in range(count + WARM_UP):
            started = time.perf_counter()
            await engine.write_imm(mine, theirs, imm)
            await pongs.wait(1)
            times.append(time.perf_counter() - started)
    report(engine.rails[0].provider, size, times[WARM_UP:])


def report(provider: str, size: int, times: list[float]) -> None:
    """Print the percentiles, in microseconds."""
    ordered = sorted(times)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1e6 for part in (0.5, 0.99))
    print(f"{provider}: {len(times)} round trips of {size} bytes: p50 {p50:.1f} us, p99 {p99:.1f} us")


@contextlib.asynccontextmanager
async def own_server(provider: str) -> AsyncIterator[str]:
    """Start the other side as a process of its own; yields its address."""
    command = (sys.executable, __file__, "--provider", provider, "--listen", "127.0.0.1", "--once")
    # In a session of its own, so that Ctrl-C reaches this process only, which then ends the other.
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    try:
        line = await child.stdout.readline()
        if not line:
            raise PingError("the other process did not start; its error is above")
        yield line.decode().strip()
    finally:
        # It ends by itself when its only client is gone.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), 5)
        if child.returncode is None:
            child.terminate()
            await child.wait()


async def main(args: argparse.Namespace) -> None:
    config = aiote.EngineConfig(host=args.listen or None)
    if args.listen is not None:
        async with aiote.open_engine(args.provider, config=config) as engine:
            await serve(engine, args.once)
        return
    async with contextlib.AsyncExitStack() as stack:
        address = args.connect or await stack.enter_async_context(own_server(args.provider))
        engine = await stack.enter_async_context(aiote.open_engine(args.provider, config=config))
        server = await engine.connect(address)
        await unless_lost(server, measure(engine, server, args.count, args.size))


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Round trips of one-sided writes; without a role, both sides run here."
    )
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    parser.add_argument("--count", type=positive, default=1000, help="round trips (default 1000)")
    parser.add_argument("--size", type=positive, default=8, help="bytes of each write (default 8)")
    parser.add_argument("--listen", nargs="?", const="", metavar="HOST", help="answer; HOST is this machine's address")
    parser.add_argument("--once", action="store_true", help="with --listen: end after one client")
    parser.add_argument("--connect", metavar="ADDRESS", help="measure against the side that listens at ADDRESS")
    args = parser.parse_args()
    if args.connect is not None and args.listen is not None:
        parser.error("--listen and --connect are two sides: give one of them, or none to run both here")
    if args.once and args.listen is None:
        parser.error("--once needs --listen")
    return args


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))
    except (PingError, aiote.AioteError, struct.error) as error:
        raise SystemExit(f"ping.py: {error}") from None
    except KeyboardInterrupt:
        print("ping.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
