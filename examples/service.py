"""An embedding service: calls of many clients make batches, and the vectors are written into the callers' arrays.

    python examples/service.py                               # prints its address, and the command that calls it
    python examples/client.py 'aiote://...' embed my words

On two machines it needs the same AIOTE_CLUSTER_KEY on both (16 bytes or more) and `--host` with this machine's address.
The model is a random matrix: each word is a row of it, chosen by a hash, and a text is the mean of its words.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import zlib

import numpy

import aiote
from aiote import service

WIDTH, ROWS, BATCH = 256, 4096, 64
Waiting = tuple[list[str], asyncio.Future[numpy.ndarray]]


class Embed(service.Service):
    def __init__(self) -> None:
        self.rows = numpy.random.default_rng(0).standard_normal((ROWS, WIDTH), numpy.float32)
        self.waiting: asyncio.Queue[Waiting] = asyncio.Queue()

    @service.method(idempotent=True, raises=[ValueError])
    async def embed(self, texts: list[str], out: service.Out[numpy.float32]) -> int:
        """Fill one row of `out` for each text, and return the width of a row."""
        if out.shape != (len(texts), WIDTH):
            raise ValueError(f"{len(texts)} texts need an array of {(len(texts), WIDTH)}, got one of {out.shape}")
        vectors = asyncio.get_running_loop().create_future()
        await self.waiting.put((texts, vectors))
        out[:] = await vectors
        return WIDTH

    async def run(self) -> None:
        """Compute what waits, a batch at a time; a call that was cancelled meanwhile is left out."""
        while True:
            batch = [await self.waiting.get()]
            while not self.waiting.empty() and len(batch) < BATCH:
                batch.append(self.waiting.get_nowait())
            batch = [(texts, vectors) for texts, vectors in batch if not vectors.done()]
            found = await asyncio.to_thread(self.compute, [text for texts, _ in batch for text in texts])
            for texts, vectors in batch:
                if not vectors.done():
                    vectors.set_result(found[: len(texts)])
                found = found[len(texts) :]

    def compute(self, texts: list[str]) -> numpy.ndarray:
        rows = [[zlib.crc32(word.encode()) % ROWS for word in text.split()] or [0] for text in texts]
        return numpy.array([self.rows[row].mean(axis=0) for row in rows], numpy.float32).reshape(len(texts), WIDTH)


async def main(args: argparse.Namespace) -> None:
    embed = Embed()
    async with aiote.open_engine(args.provider, host=args.host) as engine, asyncio.TaskGroup() as group:
        group.create_task(embed.run())
        async with service.serve(engine, embed):
            print(f"{sys.executable} examples/client.py '{engine.address}' embed my words", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve embeddings.")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    parser.add_argument("--host", help="this machine's address, for clients on others")
    try:
        asyncio.run(main(parser.parse_args()))
    except aiote.AioteError as error:
        raise SystemExit(f"service.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("service.py: interrupted") from None
