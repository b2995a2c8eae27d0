"""An embedding service: calls of many clients make batches, and the vectors are written into the callers' arrays.

    python examples/service.py [PROVIDER]                    # prints its address, and the command that calls it
    python examples/client.py 'aiote://...' embed my words

On two machines both need the same AIOTE_CLUSTER_KEY (16 bytes or more), and this one AIOTE_HOST, its own address.
The model is a random matrix: each word is a row of it, chosen by a hash, and a text is the mean of its words.
"""

import asyncio
import sys
import zlib

import numpy

import aiote
from aiote import service

WIDTH, ROWS, BATCH = 256, 4096, 64


class Embed(service.Service):
    def __init__(self) -> None:
        self.rows = numpy.random.default_rng(0).standard_normal((ROWS, WIDTH), numpy.float32)
        self.waiting: asyncio.Queue[tuple[list[str], asyncio.Future[numpy.ndarray]]] = asyncio.Queue()

    @service.method(idempotent=True, raises=[ValueError])
    async def embed(self, texts: list[str], out: service.Out[numpy.float32]) -> int:
        """Fill one row of `out` for each text, and return the width of a row."""
        await self.waiting.put((texts, vectors := asyncio.Future()))
        out[:] = await vectors
        return WIDTH

    async def run(self) -> None:
        """Compute what waits, a batch at a time; a call that was cancelled meanwhile takes no answer."""
        while batch := [await self.waiting.get()]:
            batch += [self.waiting.get_nowait() for _ in range(min(BATCH - 1, self.waiting.qsize()))]
            found = await asyncio.to_thread(self.compute, [text for texts, _ in batch for text in texts])
            for texts, vectors in batch:
                mine, found = found[: len(texts)], found[len(texts) :]
                if not vectors.done():
                    vectors.set_result(mine)

    def compute(self, texts: list[str]) -> numpy.ndarray:
        rows = [[zlib.crc32(word.encode()) % ROWS for word in text.split()] or [0] for text in texts]
        return numpy.array([self.rows[row].mean(axis=0) for row in rows], numpy.float32).reshape(len(texts), WIDTH)


async def main(provider: str = "auto") -> None:
    embed = Embed()
    async with aiote.open_engine(provider) as engine, service.serve(engine, embed):
        print(f"{sys.executable} examples/client.py '{engine.address}' embed my words", flush=True)
        await embed.run()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (aiote.AioteError, KeyboardInterrupt) as error:
        raise SystemExit(f"service.py: {str(error) or 'interrupted'}") from None
