"""An inference rank: it answers with the weights it has, while trainers write the next ones into its memory.

python examples/weights/infer.py --rank 0 --ranks 2      # prints its address; start one for each rank
"""

from __future__ import annotations

import argparse
import asyncio

import model
import numpy

import aiote
from aiote import weights


async def main(args: argparse.Namespace) -> None:
    layout = model.inference(args.ranks)
    arrays = model.arrays(layout, args.rank)
    async with (
        aiote.open_engine(args.provider) as engine,
        # It starts before train.py has an address; where that is known, name it instead.
        weights.serve_target(
            engine,
            layout,
            args.rank,
            arrays,
            on_commit=lambda version: answer(version, arrays),
            controllers="first",
        ),
    ):
        print(engine.address, flush=True)
        await asyncio.Event().wait()


def answer(version: int, arrays: dict[str, numpy.ndarray]) -> None:
    """Compute something with the new weights; by default sources write to other memory, so these stay whole."""
    means = ", ".join(f"{name} {array.mean():.4f}" for name, array in arrays.items())
    print(f"version {version}: {means}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hold one inference rank's weights, and take updates of them.")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="how many inference ranks there are (default: 1)")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    try:
        asyncio.run(main(parser.parse_args()))
    except (aiote.AioteError, ValueError) as error:
        raise SystemExit(f"infer.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("infer.py: interrupted") from None
