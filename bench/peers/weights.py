"""An update of a model's weights, the same for every library: the tensors, who holds what, what is checked, the clock.

Four training ranks hold the model as FSDP2 does, every tensor split along its first dimension. Inference ranks hold it
tensor parallel (projections by rows or by columns, embedding by rows, norms and routers whole) with whole experts, or
all of it each. With `fp8` projections and experts are quantized on the way, in blocks of 128 x 128.

A worker is a session of one library: it starts the ranks, says that it is ready, and for every line of its standard
input brings a new version from all sources to all targets. Its answer, an object in JSON, has the seconds from the
order until the last target has everything, and whether every byte of every target is the version's. Sources are filled
before, targets checked after, both off the clock.

Row r of a tensor is a piece of one random row, which begins at a place of its own for each tensor, row and version. So
no two rows are alike, and what an update leaves behind is seen.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SOURCES = 4
BLOCK = 128
PERIOD = 262_139
"""A prime, so that rows of a tensor begin at as many places."""
GREATEST = 448.0
"""The greatest finite value of fp8 e4m3."""
SCALE = "_scale_inv"

Box = tuple[tuple[int, int], ...]


class Case(NamedTuple):
    """Who gets what: so many targets, the whole model each or a share; quantized or not."""

    targets: int
    replicated: bool = False
    fp8: bool = False


CASES = {
    "sharded 4-2": Case(2),
    "sharded 4-4": Case(4),
    "replicated 4-2": Case(2, replicated=True),
    "replicated 4-4": Case(4, replicated=True),
    "fp8 4-2": Case(2, fp8=True),
}


class Tensor(NamedTuple):
    """`spread` over targets is by "rows", by "columns", "whole" on all of them, or an expert's number."""

    name: str
    shape: tuple[int, ...]
    spread: str | int
    quantized: bool = False


def model(hidden: int, layers: int, experts: int) -> Iterator[Tensor]:
    """Yield the tensors of a model whose layers are dense and mixtures of experts by turns, as Qwen3's are shaped."""
    yield Tensor("embed", (8 * hidden, hidden), "rows")
    for layer in range(2 * layers):
        at = f"layers.{layer}."
        for name, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
            yield Tensor(at + name, (rows, hidden), "rows", True)
        yield Tensor(at + "o", (hidden, hidden), "columns", True)
        for name, size in (("norm1", hidden), ("norm2", hidden), ("q_norm", 128), ("k_norm", 128)):
            yield Tensor(at + name, (size,), "whole")
        if layer % 2:
            yield Tensor(at + "router", (experts, hidden), "whole")
        for expert in range(experts if layer % 2 else 1):
            inner = 3 * hidden // 8 if layer % 2 else 3 * hidden
            name = f"{at}experts.{expert}." if layer % 2 else at
            yield Tensor(name + "gate", (inner, hidden), expert if layer % 2 else "rows", True)
            yield Tensor(name + "up", (inner, hidden), expert if layer % 2 else "rows", True)
            yield Tensor(name + "down", (hidden, inner), expert if layer % 2 else "columns", True)
    yield Tensor("norm", (hidden,), "whole")


def chunk(box: Box, dim: int, parts: int, part: int) -> Box:
    """Return a part of a box along a dimension, as `torch.chunk` splits."""
    first, last = box[dim]
    size = -(-(last - first) // parts)
    start = min(first + part * size, last)
    return (*box[:dim], (start, min(start + size, last)), *box[dim + 1 :])


class Model:
    """The tensors of one case, and who holds which box of each."""

    def __init__(self, case: str, hidden: int, layers: int, experts: int) -> None:
        self.case = CASES[case]
        self.tensors = list(model(hidden, layers, experts))
        bits = np.random.default_rng(5).integers(0, 1 << 16, PERIOD + 8 * hidden).astype(np.uint16)
        # As bfloat16 of either sign, from 2 ** -15 to 2 ** -7: what weights are like.
        self.tile = bits & 0x83FF | 0x3800

    def is_fp8(self, tensor: Tensor) -> bool:
        """Tell whether targets have a tensor in fp8."""
        return self.case.fp8 and tensor.quantized

    def source(self, rank: int) -> dict[str, Box]:
        """Return which box of each tensor a source holds."""
        return {one.name: chunk(whole(one.shape), 0, SOURCES, rank) for one in self.tensors}

    def target(self, rank: int) -> dict[str, Box]:
        """Return which box of each tensor a target holds."""
        found = {}
        for one in self.tensors:
            box, parts = whole(one.shape), self.case.targets
            if not self.case.replicated and one.spread in ("rows", "columns"):
                box = chunk(box, int(one.spread == "columns"), parts, rank)
            if self.case.replicated or isinstance(one.spread, str) or one.spread % parts == rank:
                found[one.name] = box
        return found

    @property
    def nbytes(self) -> int:
        """Return how many bytes the targets receive, all of them together."""
        boxes = [(self.target(rank), one) for rank in range(self.case.targets) for one in self.tensors]
        found = 0
        for held, one in boxes:
            if one.name in held:
                found += size_of(held[one.name]) * (1 if self.is_fp8(one) else 2)
                found += size_of(blocks(held[one.name])) * 4 if self.is_fp8(one) else 0
        return found

    def rows(self, number: int, box: Box, version: int) -> Iterator[tuple[int, NDArray[np.uint16]]]:
        """Yield each row of a tensor's box with its place in the box: what it has to be."""
        (first, last), (left, right) = box if len(box) == 2 else ((0, 1), *box)
        for row in range(first, last):
            at = (row * 6007 + number * 30_011 + version * 104_729) % PERIOD
            yield row - first, self.tile[at + left : at + right]


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def blocks(box: Box) -> Box:
    """Return the blocks of a box whose edges are edges of blocks, or of the tensor."""
    return tuple((first // BLOCK, -(-last // BLOCK)) for first, last in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def size_of(box: Box) -> int:
    return int(np.prod(shape_of(box)))


def within(box: Box, of: Box) -> tuple[slice, ...]:
    """Return where a box lies in the array of a larger one."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, of, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes share."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(first < last for first, last in found) else None


class Memory:
    """The arrays of one rank, bfloat16 as 16-bit numbers, fp8 as bytes; each tensor is an allocation of its own."""

    def __init__(self, made: Model, side: str, rank: int) -> None:
        self.model, self.side, self.rank = made, side, rank
        self.boxes = made.source(rank) if side == "source" else made.target(rank)
        self.arrays: dict[str, NDArray[Any]] = {}
        for one in made.tensors:
            if one.name in self.boxes:
                fp8 = side == "target" and made.is_fp8(one)
                shape = shape_of(self.boxes[one.name])
                self.arrays[one.name] = np.full(shape, 0, np.uint8 if fp8 else np.uint16)
                if fp8:
                    self.arrays[one.name + SCALE] = np.zeros(shape_of(blocks(self.boxes[one.name])), np.float32)

    def fill(self, version: int) -> None:
        """Make this source's arrays those of a version."""
        for number, one in enumerate(self.model.tensors):
            array = self.arrays[one.name]
            rows = array if array.ndim == 2 else array[None]
            for place, row in self.model.rows(number, self.boxes[one.name], version):
                rows[place] = row

    def check(self, version: int) -> bool:
        """Tell whether every byte of this target is that of a version."""
        return all(
            self._checked(number, one, version)
            for number, one in enumerate(self.model.tensors)
            if one.name in self.boxes
        )

    def _checked(self, number: int, one: Tensor, version: int) -> bool:
        array, box = self.arrays[one.name], self.boxes[one.name]
        if self.model.is_fp8(one):
            return self._quantized(number, one, version)
        rows = array if array.ndim == 2 else array[None]
        return all(np.array_equal(rows[place], row) for place, row in self.model.rows(number, box, version))

    def _quantized(self, number: int, one: Tensor, version: int) -> bool:
        """Tell the same of a tensor in fp8: 128 rows at a time are quantized here, by arithmetic of its own."""
        array, scales = self.arrays[one.name], self.arrays[one.name + SCALE]
        (first, last), columns = self.boxes[one.name]
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            bits = np.stack([row for _, row in self.model.rows(number, ((start, stop), columns), version)])
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            edges = np.arange(0, bits.shape[1], BLOCK)
            greatest = np.maximum.reduceat(np.abs(values).max(axis=0), edges)
            wanted = (greatest / np.float32(GREATEST)).astype(np.float32)
            if not np.array_equal(scales[(start - first) // BLOCK], wanted):
                return False
            scaled = values / np.repeat(wanted, BLOCK)[: bits.shape[1]]
            if not np.array_equal(array[start - first : stop - first], e4m3(scaled)):
                return False
        return True


def e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round numbers of at most 448 to fp8 e4m3, ties to even, and return the bytes."""
    magnitude = np.abs(values)
    exponent = np.clip(np.frexp(np.maximum(magnitude, 2.0**-9))[1] - 1, -6, 8)
    # In steps of 2 ** (exponent - 3), of which a number below 2 ** -6 has fewer than 8.
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    code = steps + (exponent + 6) * 8
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


class Session(abc.ABC):
    """One library at work: all ranks of one case."""

    library = ""

    @abc.abstractmethod
    async def fill(self, version: int) -> None:
        """Have every source filled."""

    @abc.abstractmethod
    async def update(self, version: int) -> None:
        """Bring a version to every target."""

    @abc.abstractmethod
    async def check(self, version: int) -> bool:
        """Have every target checked."""


class Ranks:
    """Processes of ranks, which this worker's script starts with `rank SIDE NUMBER`: all are asked the same at once."""

    def __init__(self, arguments: argparse.Namespace, sides: dict[str, int], extra: str = "") -> None:
        self.processes: dict[tuple[str, int], subprocess.Popen[str]] = {}
        given = [f"--{key}={getattr(arguments, key)}" for key in ("case", "hidden", "layers", "experts", "variant")]
        for side, count in sides.items():
            for rank in range(count):
                command = [sys.executable, sys.argv[0], *given, "--side", side, "--rank", str(rank)]
                self.processes[side, rank] = subprocess.Popen(
                    [*command, "--extra", extra], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )

    def answers(self, side: str = "") -> list[Any]:
        """Return the next answers of all ranks, or of one side's."""
        found = []
        for (one, rank), process in self.processes.items():
            if side in ("", one):
                assert process.stdout is not None
                if not (line := process.stdout.readline()):
                    raise SystemExit(f"{one} {rank} ended with status {process.wait()}")
                found.append(json.loads(line))
        return found

    def ask(self, what: str, version: int, side: str = "") -> list[Any]:
        """Ask all ranks, or those of one side, and return their answers."""
        for (one, _), process in self.processes.items():
            if side in ("", one):
                assert process.stdin is not None
                process.stdin.write(f"{what} {version}\n")
                process.stdin.flush()
        return self.answers(side)

    def close(self) -> None:
        """End them all."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.communicate()


class RankSession(Session):
    """A session whose ranks are processes of this script; `update` asks all of them unless a library does otherwise."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    async def fill(self, version: int) -> None:
        await asyncio.to_thread(self.ranks.ask, "fill", version, "source")

    async def update(self, version: int) -> None:
        await asyncio.to_thread(self.ranks.ask, "update", version)

    async def check(self, version: int) -> bool:
        return all(await asyncio.to_thread(self.ranks.ask, "check", version, "target"))


def be_rank(memory: Memory, update: Callable[[], None]) -> None:
    """Answer what a session asks of one rank, until the end of the input."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(memory, line, update)), flush=True)


def answered(memory: Memory, line: str, update: Callable[[], None]) -> bool:
    """Do what a session asks, and return the answer."""
    what, version = line.split()
    if what == "check":
        return memory.check(int(version))
    if what == "fill":
        memory.fill(int(version))
    else:
        update()
    return True


async def serve(session: Session) -> None:
    """Bring a version over for every line of the input; say what it took, and whether all has come."""
    print(json.dumps({"library": session.library}), flush=True)
    version = 0
    while await asyncio.to_thread(sys.stdin.readline):
        version += 1
        await session.fill(version)
        began = time.perf_counter()
        await session.update(version)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "verified": await session.check(version)}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--side", choices=("source", "target"), help="be one rank of it")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--extra", default="")
    return parser.parse_args()


def model_of(arguments: argparse.Namespace) -> Model:
    return Model(arguments.case, arguments.hidden, arguments.layers, arguments.experts)
