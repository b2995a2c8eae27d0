"""Two training ranks and the controller: they train, and after each step bring the weights to inference ranks.

python examples/weights/train.py 'aiote://...' 'aiote://...'      # what the infer.py processes print
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

import model

import aiote
from aiote import weights


async def main(args: argparse.Namespace) -> None:
    layout = model.training(args.ranks)
    ranks = [model.arrays(layout, rank) for rank in range(args.ranks)]
    async with AsyncExitStack() as stack:
        # One process each on a real cluster, as in infer.py; here they share one, each with an engine of its own.
        own, *engines = [await stack.enter_async_context(aiote.open_engine(args.provider)) for _ in (0, *ranks)]
        for rank, engine in enumerate(engines):
            serving = weights.serve_source(engine, layout, rank, ranks[rank], model.RECIPE, controllers=[own.address])
            await stack.enter_async_context(serving)
        sources = [engine.address for engine in engines]
        controller = weights.Controller(own, sources, args.targets, model.RECIPE)
        for version in range(1, args.steps + 1):
            for arrays in ranks:
                for array in arrays.values():
                    array += 1.0  # a step of the optimizer
            report = await controller.update(version)
            written = sum(sent.written for sent in report.sent.values())
            print(f"version {version}: {written} bytes in {report.seconds * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, and bring the weights to inference ranks.")
    parser.add_argument("targets", nargs="+", help="the addresses that infer.py prints")
    parser.add_argument("--ranks", type=int, default=2, help="training ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="steps of the optimizer (default: 5)")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    try:
        asyncio.run(main(parser.parse_args()))
    except (aiote.AioteError, ValueError) as error:
        raise SystemExit(f"train.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("train.py: interrupted") from None
