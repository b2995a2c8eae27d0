"""The smallest complete program: two engines in one process, and bytes that go from one to the other.

    python examples/first.py
    python examples/first.py --provider shm

One engine would normally run in each of two processes; what has to travel between them beforehand is the descriptor,
plain bytes, by any way you like.
"""

from __future__ import annotations

import argparse
import asyncio

import aiote

IMMEDIATE = 7  # any number below 2**28 that both sides know


async def main(provider: str) -> None:
    async with aiote.open_engine(provider) as sender, aiote.open_engine(provider) as receiver:
        # The receiver registers memory and describes it.
        inbox = bytearray(64)
        descriptor = receiver.register(inbox).descriptor

        # The sender registers memory of its own and attaches what was described.
        text = b"written by one engine, read by the other"
        source = sender.register(text)
        target = sender.attach(descriptor)[0 : len(text)]

        # The sender writes; the receiver waits for a count, not for a message.
        with receiver.counter(IMMEDIATE) as arrivals:
            await sender.write_imm(source, target, IMMEDIATE)
            await arrivals.wait(1)
        print(f"{sender.rails[0].provider} over {sender.rails[0].name}: {bytes(inbox[: len(text)]).decode()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two engines, one write.")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    try:
        asyncio.run(main(parser.parse_args().provider))
    except aiote.AioteError as error:
        raise SystemExit(f"first.py: {error}") from None
