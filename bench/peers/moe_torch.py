"""Rounds of dispatch and combine by collectives on torch's CPU tensors, as programs without a library make them.

Variants: "alltoall" sends each (token, expert) by gloo's `all_to_all_single`; "alltoallv" does the same by MPI's
`Alltoallv` (started by mpiexec); "allgather" has every rank gather all tokens and reduce-scatter the sums of its own
experts, as vLLM does by default. Each has its pack, unpack and weighted sum, of the quickest that torch has:
`index_select` of 8-byte elements, and `embedding_bag`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

import moe

GATHERED = moe.ROW + 8 * moe.TOP_K
"""Bytes of a token with its scales, ids and weights behind it."""


class Gloo:
    """torch.distributed's collectives."""

    def __init__(self, folder: str, rank: int, ranks: int) -> None:
        import torch.distributed

        self.rank, self.ranks, self._of = rank, ranks, torch.distributed
        self._of.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=ranks)
        self.library = f"gloo of torch {torch.__version__}"

    def all_to_all(self, to: Any, of: Any, came: list[int], sent: list[int]) -> None:
        self._of.all_to_all_single(to, of, came, sent)

    def all_gather(self, to: Any, of: Any) -> None:
        self._of.all_gather_into_tensor(to, of)

    def reduce_scatter(self, to: Any, of: Any) -> None:
        self._of.reduce_scatter_tensor(to, of)


class Mpi:
    """MPI's; the process is one that mpiexec has started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.rank, self._comm.size
        self.library = " ".join(MPI.Get_library_version().replace(":", " ").split()[:3:2])

    def all_to_all(self, to: Any, of: Any, came: list[int], sent: list[int]) -> None:
        width = of.element_size() * (of.shape[1] if of.dim() == 2 else 1)
        self._comm.Alltoallv(self._side(of, sent, width), self._side(to, came, width))

    def _side(self, tensor: Any, counts: list[int], width: int) -> list[Any]:
        sizes = np.array(counts) * width
        return [tensor.view(torch.uint8).numpy().reshape(-1), sizes, np.cumsum(sizes) - sizes, self._mpi.BYTE]


class TorchRounds(moe.Rounds):
    """What the ways have in common: tensors of tokens, and memory for what arrives."""

    tolerance = 2.0**-6
    """Not all round once: bfloat16 is what torch sums here."""

    def __init__(self, data: moe.Data, by: Any) -> None:
        super().__init__(data)
        self.by = by
        self.given = [tuple(map(torch.from_numpy, data.mine(version))) for version in (0, 1)]
        self.ids = torch.from_numpy(data.ids[data.rank])
        self.weights = torch.from_numpy(data.weights).to(torch.bfloat16)
        most = self.case.ranks * self.case.tokens * moe.TOP_K
        self.rows = torch.empty((most, moe.ROW), dtype=torch.uint8)
        self.y = torch.empty((most, moe.HIDDEN), dtype=torch.bfloat16)
        self.sums: Any = None
        self.count = 0

    def arrived(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        rows = self.rows[: self.count].numpy()
        return rows[:, : moe.HIDDEN], rows[:, moe.HIDDEN :].copy().view(np.float32)

    def answer(self, first: int, rows: moe.Bits) -> None:
        self.y[first : first + len(rows)] = torch.from_numpy(rows.copy()).view(torch.bfloat16)

    def out(self) -> moe.Bits:
        return np.asarray(self.sums.view(torch.int16).numpy()).view(np.uint16)


def take(rows: Any, lines: Any, out: Any) -> Any:
    """Copy lines of `rows` to the first of `out`, and return these."""
    found = out[: len(lines)]
    torch.index_select(rows.view(torch.int64), 0, lines, out=found.view(torch.int64))
    return found


def inverse(order: Any) -> Any:
    """Return where each number stands in an order."""
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order))
    return found


class AllToAll(TorchRounds):
    """Each (token, expert) goes to its expert's rank, which has told how many come."""

    def __init__(self, data: moe.Data, by: Any) -> None:
        super().__init__(data, by)
        self.packed = torch.empty((self.case.tokens, moe.ROW), dtype=torch.uint8)
        self.sent = torch.empty((self.case.tokens * moe.TOP_K, moe.ROW), dtype=torch.uint8)
        self.came, self.back = torch.empty_like(self.rows), torch.empty_like(self.y)
        self.returned = torch.empty((self.case.tokens * moe.TOP_K, moe.HIDDEN), dtype=torch.bfloat16)

    async def dispatch(self, version: int) -> None:
        ranks, local = self.case.ranks, self.case.local
        flat = self.ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=moe.EXPERTS)
        theirs = torch.empty_like(counts)
        self.by.all_to_all(theirs, counts, [local] * ranks, [local] * ranks)
        self.out_splits = counts.view(ranks, local).sum(1).tolist()
        self.in_splits = theirs.view(ranks, local).sum(1).tolist()
        self.count = sum(self.in_splits)
        x, scales = self.given[version]
        self.packed[:, : moe.HIDDEN] = x
        self.packed[:, moe.HIDDEN :] = scales.view(torch.uint8)
        sent = take(self.packed, order // moe.TOP_K, self.sent)
        came = self.came[: self.count]
        self.by.all_to_all(came, sent, self.in_splits, self.out_splits)
        experts = torch.arange(local).repeat(ranks).repeat_interleave(theirs)
        self.arrival = torch.argsort(experts, stable=True)
        take(came, self.arrival, self.rows)
        self.position = inverse(order).view(-1, moe.TOP_K)

    async def combine(self) -> None:
        back = take(self.y[: self.count], inverse(self.arrival), self.back)
        self.by.all_to_all(self.returned, back, self.out_splits, self.in_splits)
        self.sums = embedding_bag(self.position, self.returned, mode="sum", per_sample_weights=self.weights)


class AllGather(TorchRounds):
    """Every rank has all tokens; sums of each rank's experts are reduced."""

    tolerance = 2.0**-4
    """The sums of each rank are rounded, and again with each rank's that is added."""

    def __init__(self, data: moe.Data, by: Any) -> None:
        super().__init__(data, by)
        tokens = self.case.tokens
        self.mine = torch.empty((tokens, GATHERED), dtype=torch.uint8)
        self.all = torch.empty((self.case.ranks * tokens, GATHERED), dtype=torch.uint8)
        self.sums = torch.empty((tokens, moe.HIDDEN), dtype=torch.bfloat16)

    async def dispatch(self, version: int) -> None:
        x, scales = self.given[version]
        parts = x, scales.view(torch.uint8), self.ids.int().view(torch.uint8), self.weights.float().view(torch.uint8)
        torch.cat(parts, 1, out=self.mine)
        self.by.all_gather(self.all, self.mine)
        ids = self.all[:, moe.ROW : moe.ROW + 4 * moe.TOP_K].contiguous().view(torch.int32)
        weights = self.all[:, moe.ROW + 4 * moe.TOP_K :].contiguous().view(torch.float32)
        ids = ids - self.data.rank * self.case.local
        token, slot = torch.nonzero((ids >= 0) & (ids < self.case.local), as_tuple=True)
        order = torch.argsort(ids[token, slot], stable=True)
        self.count = len(order)
        words = self.all.view(torch.int64)[:, : moe.ROW // 8]
        torch.index_select(words, 0, token[order], out=self.rows[: self.count].view(torch.int64))
        # For each token the rows that it has here, one after the other.
        self.bag, self.bags = inverse(order), torch.searchsorted(token, torch.arange(len(ids)))
        self.bag_weights = weights[token, slot].to(torch.bfloat16)

    async def combine(self) -> None:
        y = self.y[: max(self.count, 1)]
        partial = embedding_bag(self.bag, y, self.bags, mode="sum", per_sample_weights=self.bag_weights)
        self.by.reduce_scatter(self.sums, partial)


def main() -> None:
    arguments = moe.parse()
    torch.set_num_threads(1)
    # Under mpiexec the process is one of MPI's, and nothing else.
    by = Mpi() if "PMI_RANK" in os.environ else Gloo(str(arguments.folder), arguments.rank, arguments.ranks)
    worker = moe.Worker(arguments.folder, by.rank, by.library)

    def make(variant: str, data: moe.Data) -> moe.Rounds:
        return (AllGather if variant == "allgather" else AllToAll)(data, by)

    asyncio.run(worker.serve(make))
    sys.stderr.flush()
    # gloo's threads abort the process at the interpreter's end, now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
