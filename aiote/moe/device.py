"""The kernels of `aiote.moe` for a GPU: the functions of `kernels`, for arrays in a GPU's memory.

`open_kernels` chooses between the two. The source is kernels.cuh, which NVRTC compiles when the kernels are opened.
cupy loads and launches them; only this module imports it, and only then. Kernels run on cupy's current stream, in the
order of the calls, which return at once. The calls allocate no memory, so that they can be captured in a graph.

Flags let the host and kernels wait for each other without a synchronization. A call with `raises=n` sets `words[n]` to
the number of the round once the host can see all that the call wrote. A call with `waits=n` begins its work when the
host has set `words[n]` in the same way. A round begins with `number_rows(..., begins=True)`. The host aborts waiting
kernels by `words[0] = 1`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from . import kernels

__all__ = [
    "FLAGS",
    "OPTIONS",
    "SOURCE",
    "Bounds",
    "CudaLauncher",
    "DescribedRound",
    "GpuKernels",
    "KernelArray",
    "Launcher",
    "open_kernels",
    "open_launcher",
]

SOURCE = Path(__file__).with_name("kernels.cuh")
OPTIONS = ("--std=c++17", "--fmad=false")
"""Options for NVRTC besides the architecture. The instructions of the sums (add.rn, mul.rn) cannot be fused anyway."""
FLAGS = 8
"""The number of words for flags; the first one aborts."""
SHARED_BYTES = 48 << 10
"""The shared memory that a block has on every GPU without requesting more."""
ALIGNED = 64
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class KernelArray:
    """Memory that kernels can access, described by the interface of CUDA arrays."""

    def __init__(self, described: dict[str, Any], owner: Any = None) -> None:
        self.__cuda_array_interface__ = described
        self._owner = owner

    @classmethod
    def at(
        cls,
        address: int,
        shape: tuple[int, ...],
        typestr: str,
        strides: tuple[int, ...] | None = None,
        owner: Any = None,
    ) -> KernelArray:
        """Describe elements at an address, in memory that lives as long as its owner."""
        described = {"data": (address, False), "shape": shape, "typestr": typestr, "strides": strides, "version": 3}
        return cls(described, owner)

    @classmethod
    def of(cls, array: NDArray[Any]) -> KernelArray:
        """Describe a NumPy array in memory from the launcher's `host`."""
        return cls(array.__array_interface__, array)

    def __len__(self) -> int:
        return int(self.__cuda_array_interface__["shape"][0])

    def __getitem__(self, rows: slice) -> KernelArray:
        return self.first_rows(len(range(len(self))[rows]))

    def first_rows(self, rows: int) -> KernelArray:
        """Return the first `rows` rows."""
        described = self.__cuda_array_interface__
        return KernelArray({**described, "shape": (rows, *described["shape"][1:])}, self._owner)


class Launcher(Protocol):
    """The interface of a place where kernels run, with its memory."""

    interface: str
    """The attribute by which an array in that memory describes itself."""
    threads: int
    """Threads of a block."""

    def zeros(self, length: int, dtype: type[Any]) -> Any:
        """Return an array of zeros in that memory."""

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        """Return zeros in host memory, aligned to 64 bytes, that kernels can access at the same address."""

    def fetch(self, array: Any) -> NDArray[Any]:
        """Return a copy of an array, once all kernels launched before have ended."""

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        """Launch a kernel with `shared` bytes of shared memory; each of its parameters has 8 bytes."""


class CudaLauncher:
    """A GPU, through cupy."""

    interface: str = "__cuda_array_interface__"
    threads: int = 256

    def __init__(self, device: int) -> None:
        """Compile the kernels for a GPU and load them. Raises UsageError without cupy, and if there is no such GPU."""
        try:
            import cupy
            import cupyx
        except ImportError as error:
            raise UsageError(
                f"device={device}: kernels on a GPU need cupy ({error}); install it with pip install 'aiote[cuda]', or "
                "give device=None to compute on the CPU"
            ) from None
        count = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
        if not 0 <= device < count:
            raise UsageError(
                f"device={device}: cupy finds {count} GPUs with a driver here; give device=None to compute on the CPU"
            )
        self._cupy, self._pinned, self._device = cupy, cupyx.empty_pinned, cupy.cuda.Device(device)
        with self._device:
            self._module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS, backend="nvrtc")
            self._module.compile()

    def zeros(self, length: int, dtype: type[Any]) -> Any:
        """Return zeros in the GPU's memory."""
        with self._device:
            return self._cupy.zeros(length, dtype)

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        """Return zeros in pinned host memory."""
        nbytes = length * np.dtype(dtype).itemsize
        memory: NDArray[np.uint8] = self._pinned(nbytes + ALIGNED, np.uint8)
        memory[...] = 0
        start = -memory.ctypes.data % ALIGNED
        return memory[start : start + nbytes].view(dtype)

    def fetch(self, array: Any) -> NDArray[Any]:
        """Return a copy of an array in the GPU's memory, once the current stream has reached this call."""
        with self._device:
            found: NDArray[Any] = self._cupy.asnumpy(array)
            return found

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        """Launch a kernel on the current stream."""
        with self._device:
            values = tuple(np.int64(one) for one in arguments)
            self._module.get_function(name)((blocks,), (threads,), values, shared_mem=shared)


class _Lines(NamedTuple):
    """Rows of bytes, in the form that kernels take."""

    address: int
    stride: int
    rows: int
    nbytes: int


class Bounds(NamedTuple):
    """The constants that `describe` computes the numbers of a round with."""

    local: int
    """The experts of a rank."""
    me: int
    most: int
    """The most rows, or copies, that are written to a rank at once, each of `row` bytes; row 0 is at `at`."""
    row: int
    at: int
    of_expert: int
    """With more rows for an expert, or for a rank, nothing is written, not even the route of `route` bytes."""
    of_rank: int
    route: int


class DescribedRound(NamedTuple):
    """The arrays that `describe` fills for a round."""

    kept: Any
    """A copy of the weights."""
    host_positions: Any
    """The positions of rows; `host_copies` gets those of copies by rank, if copies are sent."""
    host_copies: Any
    route: Any
    """The total of rows, then the rows for each expert and the copies for each rank."""
    lengths: Any
    """For each other rank, from the next higher one on: the bytes of rows to write to it, where they begin (`here`),
    and the bytes of the route (`routed`)."""
    here: Any
    routed: Any


class GpuKernels:
    """The functions of `kernels`, with the same arguments: rows are two-dimensional arrays of uint8.

    Small arrays of numbers must be contiguous. The caller keeps all arguments of a call until the stream has run it.
    """

    def __init__(
        self, launcher: Launcher, experts: int, ranks: int, *, threads: int | None = None, blocks: int = 1024
    ) -> None:
        """Allocate the memory that calls need, for this many experts and ranks.

        A launch has at most `blocks` blocks of `threads` threads; by default the launcher chooses the threads.
        """
        threads = launcher.threads if threads is None else threads
        self._launcher, self._threads, self._blocks = launcher, threads, blocks
        self._kinds = experts + ranks
        self._rows, self._copies = launcher.zeros(experts, np.int32), launcher.zeros(ranks, np.int32)
        self._state = launcher.zeros(FLAGS, np.uint32)
        self._large = self._shared(self._kinds) > SHARED_BYTES
        self._work = launcher.zeros(threads // 32 * self._kinds if self._large else 0, np.uint32)
        self.words: NDArray[np.uint32] = launcher.host(FLAGS, np.uint32)
        """The flags, in host memory."""
        self._flags = self.words.ctypes.data, self._of(self._state, "<u4")

    def number_rows(
        self, ids: Any, experts: int, local: int, ranks: int, by_rank: bool, out: Any, *, begins: bool = False,
        raises: int = 0,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Number rows, or copies by rank, into `out`; return the rows for each expert and the copies for each rank.

        ids: int32, uint32 or int64. The next call overwrites the returned arrays. Raises UsageError for other ids.
        """
        rows, copies = self._rows[:experts], self._copies[:ranks]
        (tokens, top_k), kind = self._shape(ids), self._describe_array(ids)["typestr"]
        if kind not in ("<i4", "<u4", "<i8"):
            raise UsageError(f"ids: expected int32, uint32 or int64, got {kind}")
        numbers = [self._of(ids, kind), int(kind[2]), tokens, top_k, experts, local, ranks, int(by_rank)]
        numbers += [self._of(out, "<i4"), self._of(rows, "<i4"), self._of(copies, "<i4")]
        shared, work = self._counters(experts + ranks)
        self._launch("moe_route", 1, shared, [*numbers, work, *self._flags, int(begins), raises])
        return rows, copies

    def describe(
        self, ids: Any, weights: Any, numbered: tuple[Any, Any], counts: tuple[Any, Any], bounds: Bounds, tail: Any,
        *, described: DescribedRound, raises: int = 0,
    ) -> None:  # fmt: skip
        """Fill `described` from the results of `number_rows` for the same ids: `counts` is its return value.

        `numbered` holds the positions of rows, and those of copies by rank, or None if rows are sent. `tail` (tokens,
        4 + 8 * k) gets the bytes that travel behind each token.
        """
        (rows, copies), (position, copy) = counts, numbered
        (tokens, top_k), kind, behind = self._shape(ids), self._describe_array(ids)["typestr"], self._lines(tail)
        experts, ranks = self._shape(rows)[0], self._shape(copies)[0]
        numbers = [self._of(ids, kind), int(kind[2]), self._of(weights, "<f4"), self._of(position, "<i4")]
        numbers += [0 if copy is None else self._of(copy, "<i4"), self._of(rows, "<i4"), self._of(copies, "<i4")]
        numbers += [tokens, top_k, experts, bounds.local, ranks, int(copy is not None), *bounds[1:]]
        numbers += [behind.address, behind.stride, self._of(described.kept, "<f4")]
        copies_at = 0 if copy is None else self._of(described.host_copies, "<i4")
        numbers += [self._of(described.host_positions, "<i4"), copies_at, self._of(described.route, "<u4")]
        numbers += [self._of(one, "<i8") for one in (described.lengths, described.here, described.routed)]
        blocks = -(-max(tokens * top_k, experts, ranks + 1) // self._threads)
        self._launch("moe_describe", blocks, 0, [*numbers, *self._flags, raises])

    def pack(
        self, sent: Any, own: Any, first: int, last: int, at: Any, x: Any, *, scales: Any, tail: Any,
        scales_at: int = 0, tail_at: int = 0, waits: int = 0, raises: int = 0,
    ) -> None:  # fmt: skip
        """Make rows of tokens: copy token t, its scales and its tail, to each row that `at` (tokens, k) names."""
        to, mine = self._lines(sent), self._lines(own)
        numbers = [to.address, to.stride, mine.address, mine.stride, first, last, self._of(at, "<i4"), *self._shape(at)]
        for part, place in ((x, None), (scales, scales_at), (tail, tail_at)):
            lines = self._lines(part)
            numbers += [lines.address, lines.stride, lines.nbytes, *([] if place is None else [place])]
        tokens, top_k = self._shape(at)
        self._launch("moe_pack", tokens * top_k, 0, [*numbers, *self._flags, waits, raises])

    def copy_runs(self, to: Any, source: Any, runs: Any, nbytes: int, *, waits: int = 0, raises: int = 0) -> None:
        """Copy the first `nbytes` of rows, for each run (row in `to`, row in `source`, count)."""
        there, here = self._lines(to), self._lines(source)
        numbers = [there.address, there.stride, here.address, here.stride, self._of(runs, "<i8"), self._shape(runs)[0]]
        self._launch("moe_copy_runs", there.rows, 0, [*numbers, nbytes, *self._flags, waits, raises])

    def unfold(
        self, to: Any, source: Any, nbytes: int, ids: Any, first: int, base: Any, *, room: Any, places: Any, seen: Any,
        waits: int = 0, raises: int = 0,
    ) -> None:  # fmt: skip
        """Copy each copy in `source` to the place of every expert that it is for: ids (copies, k), of all experts."""
        copies, top_k = self._shape(ids)
        held = self._shape(base)[0]
        numbers = [self._of(ids, "<i4"), copies * top_k, first, held, self._of(base, "<i8"), self._of(room, "<i8")]
        numbers += [self._of(places, "<i4"), self._of(seen, "<i8")]
        shared, work = self._counters(held)
        self._launch("moe_places", 1, shared, [*numbers, work, *self._flags, waits])
        nothing = source[:, :0]
        # This kernel waits as well, because an aborted round has no places.
        self.pack(to, to, 0, 0, places, source[:, :nbytes], scales=nothing, tail=nothing, waits=waits, raises=raises)

    def combine(
        self, out: Any, rows: Any, places: Any, weights: Any, dtype: str, accumulate: bool, *, waits: int = 0,
        raises: int = 0,
    ) -> None:  # fmt: skip
        """Sum rows: line i of `out` becomes the sum over k of `weights[i, k]` times row `places[i, k]`, skipping -1.

        Without weights rows are summed unchanged. `accumulate` adds the previous content of `out`, last. Elements that
        are not aligned to their size are read byte by byte.
        """
        to, found, size = self._lines(out), self._lines(rows), SIZES[dtype]
        tokens, top_k = self._shape(places)
        factors = 0 if weights is None else self._of(weights, "<f4")
        numbers = [to.address, to.stride, found.address, found.stride, self._of(places, "<i4"), factors, tokens, top_k]
        pieces = tokens * -(-to.nbytes // (16 * self._threads))
        numbers += [to.nbytes // size, int(accumulate)]
        self._launch(f"moe_combine_{dtype}", pieces, 0, [*numbers, *self._flags, waits, raises])

    def _launch(self, name: str, blocks: int, shared: int, arguments: list[int]) -> None:
        # Launch a block even without work, because it must raise the flag.
        self._launcher.launch(name, max(1, min(blocks, self._blocks)), self._threads, shared, arguments)

    def _shared(self, kinds: int) -> int:
        return 4 * (self._threads // 32) * (1 + kinds)

    def _counters(self, kinds: int) -> tuple[int, int]:
        """Return the bytes of shared memory for `kinds` counters, and the counters' address if they do not fit."""
        if kinds > self._kinds:
            raise UsageError(f"the kernels were opened for {self._kinds} kinds of rows, got {kinds}")
        return (self._shared(0), self._of(self._work, "<u4")) if self._large else (self._shared(kinds), 0)

    def _describe_array(self, array: Any) -> dict[str, Any]:
        found: dict[str, Any] | None = getattr(array, self._launcher.interface, None)
        if found is None:
            raise UsageError(f"expected an array in the GPU's memory, got {type(array).__name__}")
        return found

    def _shape(self, array: Any) -> tuple[int, ...]:
        return tuple(self._describe_array(array)["shape"])

    def _of(self, array: Any, typestr: str) -> int:
        """Return the address of a contiguous array of numbers. Raises UsageError for any other array."""
        found = self._describe_array(array)
        size, strides = int(found["typestr"][2:]), found.get("strides")
        together = [size * int(np.prod(found["shape"][axis + 1 :])) for axis in range(len(found["shape"]))]
        if typestr != found["typestr"] or (strides and 0 not in found["shape"] and together != [*strides]):
            raise UsageError(
                f"expected contiguous elements of type {typestr}, got {found['typestr']} with strides {strides}"
            )
        return int(found["data"][0])

    def _lines(self, array: Any) -> _Lines:
        """Return rows of bytes in the form that kernels take. Raises UsageError for any other array."""
        found = self._describe_array(array)
        rows, nbytes = found["shape"]
        strides = found.get("strides") or (nbytes, 1)
        if found["typestr"] != "|u1" or (nbytes > 1 and strides[1] != 1):
            raise UsageError(
                f"rows: expected contiguous elements of type uint8, got {found['typestr']} with strides {strides}"
            )
        return _Lines(int(found["data"][0]), strides[0], rows, nbytes)


def open_launcher(device: int | Launcher | None) -> Launcher | None:
    """Return a launcher for a GPU, by its number, or the caller's own launcher; None for the CPU.

    Raises UsageError as `open_kernels`.
    """
    return CudaLauncher(device) if isinstance(device, int) else device


def open_kernels(device: int | None, experts: int, ranks: int) -> GpuKernels | ModuleType:
    """Return the kernels for a GPU, or, for None, those for NumPy's arrays.

    Raises UsageError for a GPU without cupy, and if there is no such GPU.
    """
    return kernels if device is None else GpuKernels(CudaLauncher(device), experts, ranks)
