"""The update in aiote: default settings, or `--variant VERSIONS[,PROVIDER]`, such as `inplace,socket`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiote
from aiote import weights
from weights import SCALE, Memory, Model, Ranks, RankSession, answered, blocks, model_of, parse, serve


def layout_of(made: Model, side: str, rank: int) -> weights.Layout:
    """Return what one rank holds."""
    boxes = made.source(rank) if side == "source" else made.target(rank)
    buffers = {}
    for one in made.tensors:
        if one.name in boxes:
            fp8 = side == "target" and made.is_fp8(one)
            box = boxes[one.name]
            buffers[one.name] = buffer(one.shape, "F8_E4M3" if fp8 else "BF16", box)
            if fp8:
                scales = tuple(-(-size // 128) for size in one.shape)
                buffers[one.name + SCALE] = buffer(scales, "F32", blocks(box))
    return weights.Layout.of_buffers(rank, buffers)


def buffer(shape: tuple[int, ...], dtype: str, box: Any) -> weights.TensorBuffer:
    return weights.TensorBuffer(shape, dtype, tuple(first for first, _ in box), tuple(last for _, last in box))


def recipe_of(made: Model) -> weights.Recipe:
    """Return what is quantized; everything else keeps its name."""
    quantized = [one.name for one in made.tensors if made.is_fp8(one)]
    return weights.Recipe({name: weights.quantized(name, scale=name + SCALE) for name in quantized})


def typed(memory: Memory) -> dict[str, Any]:
    """Return a rank's arrays with types that say what they are."""
    import ml_dtypes

    kinds = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn, "float32": "float32"}
    return {name: array.view(kinds[array.dtype.name]) for name, array in memory.arrays.items()}


async def rank(arguments: Any, provider: str, versions: Any) -> None:
    made = model_of(arguments)
    if made.case.fp8 and arguments.side == "source":
        quantize_by_torch()
    memory = Memory(made, arguments.side, arguments.rank)
    layout, arrays = layout_of(made, arguments.side, arguments.rank), typed(memory)
    async with aiote.open_engine(provider) as engine:
        if arguments.side == "source":
            serving: Any = weights.serve_source(
                engine, layout, arguments.rank, arrays, recipe_of(made), controllers="first"
            )
        else:
            replica = str(arguments.rank) if made.case.replicated else ""
            serving = weights.serve_target(
                engine, layout, arguments.rank, arrays, replica=replica, versions=versions, controllers="first"
            )
        async with serving:
            print(json.dumps(str(engine.address)), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await asyncio.to_thread(answered, memory, line, lambda: None)), flush=True)


def quantize_by_torch() -> None:
    """Load torch where it is installed, as a trainer has: aiote then quantizes with it."""
    try:
        import torch  # noqa: F401
    except ImportError:
        pass


class Session(RankSession):
    library = f"aiote {aiote.__version__}"

    def __init__(self, ranks: Ranks, controller: weights.Controller) -> None:
        super().__init__(ranks)
        self.controller = controller

    async def update(self, version: int) -> None:
        report = await self.controller.update(version)
        if report.failed:
            raise SystemExit(f"an update failed: {report.failed}")


async def main() -> None:
    arguments = parse()
    versions, _, provider = arguments.variant.partition(",")
    if arguments.side:
        await rank(arguments, provider or "auto", versions or "shadow")
        return
    made = model_of(arguments)
    ranks = Ranks(arguments, {"source": 4, "target": made.case.targets})
    try:
        addresses = await asyncio.to_thread(ranks.answers)
        async with aiote.open_engine(provider or "auto") as engine:
            controller = weights.Controller(engine, addresses[:4], addresses[4:], recipe_of(made))
            await serve(Session(ranks, controller))
    finally:
        ranks.close()


if __name__ == "__main__":
    asyncio.run(main())
