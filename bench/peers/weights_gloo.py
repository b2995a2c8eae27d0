"""The update by torch.distributed with gloo, in the two ways that there are.

`full`: all sources take part in `full_tensor()` of every parameter. The first one quantizes it where targets have fp8,
and broadcasts it to all targets, which copy what they hold of it. While one is broadcast the next is gathered.
`p2p`: every source sends to every target what that one holds of its box, straight out of the weights and into the
weights where they are dense there. It moves what is there, and so cannot quantize blocks that cross an edge.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weights import (
    BLOCK,
    GREATEST,
    SCALE,
    SOURCES,
    Box,
    Memory,
    Ranks,
    RankSession,
    be_rank,
    blocks,
    model_of,
    overlap,
    parse,
    serve,
    whole,
    within,
)

TYPES = {"uint16": torch.bfloat16, "uint8": torch.float8_e4m3fn, "float32": torch.float32}


def quantize(full: Any) -> tuple[Any, Any]:
    """Quantize a matrix by blocks, whose scale is the greatest magnitude divided by the greatest value of fp8."""
    rows, columns = full.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = full
    tiles = padded.view(high, BLOCK, wide, BLOCK)
    scales = tiles.abs().amax(dim=(1, 3)) / GREATEST
    made = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(high * BLOCK, wide * BLOCK)
    return made[:rows, :columns].contiguous(), scales


class Rank:
    """One rank of either side: its tensors in torch's types, and its number among all ranks."""

    def __init__(self, memory: Memory, number: int) -> None:
        self.memory, self.number = memory, number
        self.made = memory.model
        self.targets = range(SOURCES, SOURCES + self.made.case.targets)
        self.arrays = {
            name: torch.from_numpy(array).view(TYPES[array.dtype.name]) for name, array in memory.arrays.items()
        }

    def update(self) -> None:
        """Take part in an update."""
        if self.memory.side == "source":
            self.send()
        else:
            self.receive()

    def send(self) -> None:
        raise NotImplementedError

    def receive(self) -> None:
        raise NotImplementedError


class Full(Rank):
    def __init__(self, memory: Memory, number: int) -> None:
        super().__init__(memory, number)
        mesh = DeviceMesh("cpu", list(range(SOURCES)))
        self.group = dist.new_group([0, *self.targets])
        self.sharded: dict[str, Any] = {}
        if memory.side == "source":
            for one in self.made.tensors:
                shape = torch.Size(one.shape)
                stride = (one.shape[1], 1) if len(shape) == 2 else (1,)
                self.sharded[one.name] = DTensor.from_local(
                    self.arrays[one.name], mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )

    def broadcast(self, tensor: Any) -> Any:
        return dist.broadcast(tensor.view(torch.uint8), 0, self.group, async_op=True)

    def send(self) -> None:
        before: list[Any] = []
        for one in self.made.tensors:
            full = self.sharded[one.name].full_tensor()
            if self.number == 0:
                several = quantize(full) if self.made.is_fp8(one) else (full,)
                now = [(self.broadcast(tensor), tensor) for tensor in several]
                for work, _ in before:
                    work.wait()
                before = now
        for work, _ in before:
            work.wait()

    def receive(self) -> None:
        for one in self.made.tensors:
            box = self.memory.boxes.get(one.name)
            fp8 = self.made.is_fp8(one)
            self.take(one.name, one.shape, box, torch.float8_e4m3fn if fp8 else torch.bfloat16)
            if fp8:
                scales = tuple(last for _, last in blocks(whole(one.shape)))
                self.take(one.name + SCALE, scales, box and blocks(box), torch.float32)

    def take(self, name: str, shape: tuple[int, ...], box: Box | None, kind: Any) -> None:
        """Receive a whole tensor, straight into the weights where this target has all of it."""
        if box == whole(shape):
            self.broadcast(self.arrays[name]).wait()
            return
        full = torch.empty(shape, dtype=kind)
        self.broadcast(full).wait()
        if box is not None:
            self.arrays[name].copy_(full[within(box, whole(shape))])


class Direct(Rank):
    def parts(self, boxes: dict[str, Box]) -> Iterator[tuple[int, Any, bool]]:
        """Yield what this rank and another one share: its tag, this rank's array of it, and whether that is dense."""
        for tag, one in enumerate(self.made.tensors):
            mine, other = self.memory.boxes.get(one.name), boxes.get(one.name)
            if mine and other and (shared := overlap(mine, other)):
                view = self.arrays[one.name][within(shared, mine)]
                yield tag, view, view.is_contiguous()

    def send(self) -> None:
        works = []
        for rank, target in enumerate(self.targets):
            for tag, view, _ in self.parts(self.made.target(rank)):
                dense = view.contiguous()
                works.append((dist.isend(dense.view(torch.uint8), target, tag=tag), dense))
        for work, _ in works:
            work.wait()

    def receive(self) -> None:
        works = []
        for source in range(SOURCES):
            for tag, view, dense in self.parts(self.made.source(source)):
                into = view if dense else torch.empty(view.shape, dtype=view.dtype)
                works.append((dist.irecv(into.view(torch.uint8), source, tag=tag), into, view))
        for work, into, view in works:
            work.wait()
            if into is not view:
                view.copy_(into)


def rank(arguments: Any) -> None:
    made = model_of(arguments)
    memory = Memory(made, arguments.side, arguments.rank)
    number = arguments.rank + (SOURCES if arguments.side == "target" else 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.extra}", rank=number, world_size=SOURCES + made.case.targets
    )
    be_rank(memory, (Full if arguments.variant == "full" else Direct)(memory, number).update)


async def main() -> None:
    arguments = parse()
    if arguments.side:
        rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        sides = {"source": SOURCES, "target": model_of(arguments).case.targets}
        ranks = Ranks(arguments, sides, f"{folder}/store")
        try:
            await asyncio.to_thread(ranks.answers)
            session = RankSession(ranks)
            session.library = f"torch {torch.__version__}"
            await serve(session)
        finally:
            ranks.close()


if __name__ == "__main__":
    asyncio.run(main())
