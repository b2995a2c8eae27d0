"""A client of examples/service.py: it has texts embedded into an array of its own, or changes its mind.

python examples/client.py 'aiote://...' embed my words
python examples/client.py 'aiote://...' --patience 0 embed my words
"""

from __future__ import annotations

import argparse
import asyncio

import numpy

import aiote
from aiote import service
from service import WIDTH, Embed


async def main(args: argparse.Namespace) -> None:
    async with aiote.open_engine(args.provider) as engine:
        client = service.client(engine, args.address, Embed)
        vectors = numpy.zeros((len(args.words), WIDTH), numpy.float32)
        try:
            async with asyncio.timeout(args.patience):
                await client.embed(args.words, vectors)
        except TimeoutError:
            # The call is cancelled at the service, too, and nothing of it lands in `vectors` any more.
            print(
                f"no answer within {args.patience} s; {numpy.count_nonzero(vectors)} of {vectors.size} "
                "numbers had arrived"
            )
        else:
            for word, vector in zip(args.words, vectors, strict=True):
                print(f"{word}: {', '.join(f'{value:.2f}' for value in vector[:3])}, ... ({WIDTH} numbers)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have words embedded by examples/service.py.")
    parser.add_argument("address", help="what service.py prints")
    parser.add_argument("words", nargs="+")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds (default: 30)")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    try:
        asyncio.run(main(parser.parse_args()))
    except (aiote.AioteError, ValueError) as error:
        raise SystemExit(f"client.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("client.py: interrupted") from None
