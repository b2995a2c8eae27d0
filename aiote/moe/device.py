"""The kernels of `aiote.moe` for a GPU: what `kernels` does with NumPy's arrays, done with those in a GPU's memory.

`open_kernels` chooses. kernels.cuh is the source, which NVRTC compiles when they open; cupy, imported then and nowhere
else, loads and launches it. Kernels run on cupy's current stream, in the order of the calls, which return at once.
Nothing is allocated after opening, so that calls can be captured in a graph.

Flags let a host and kernels wait for each other without a synchronization: a call with `raises=n` sets `words[n]` to
the number of the round once all that it wrote can be seen, and one with `waits=n` begins when the host has done the
same. A round begins with `numbered(..., begins=True)`. The host aborts what waits by `words[0] = 1`.
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
    "GpuKernels",
    "Launcher",
    "Span",
    "Told",
    "open_kernels",
    "open_launcher",
]

SOURCE = Path(__file__).with_name("kernels.cuh")
OPTIONS = ("--std=c++17", "--fmad=false")
"""What NVRTC is told besides the architecture. The sums' own intrinsics already exclude fused products."""
FLAGS = 8
"""Words for flags; the first is to abort."""
SHARED_BYTES = 48 << 10
"""What a block has without asking for more, on every GPU."""
ALIGNED = 64
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Span:
    """Memory that a kernel reaches, as an array describes itself to one."""

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
    ) -> Span:
        """Describe elements at an address, in memory that lives for as long as its owner."""
        described = {"data": (address, False), "shape": shape, "typestr": typestr, "strides": strides, "version": 3}
        return cls(described, owner)

    @classmethod
    def of(cls, array: NDArray[Any]) -> Span:
        """Describe an array of NumPy's, in memory that is the launcher's `host`."""
        return cls(array.__array_interface__, array)

    def __len__(self) -> int:
        return int(self.__cuda_array_interface__["shape"][0])

    def __getitem__(self, rows: slice) -> Span:
        return self.first(len(range(len(self))[rows]))

    def first(self, rows: int) -> Span:
        """Return as many rows."""
        described = self.__cuda_array_interface__
        return Span({**described, "shape": (rows, *described["shape"][1:])}, self._owner)


class Launcher(Protocol):
    """Where kernels run, and whose memory they use."""

    interface: str
    """The attribute by which an array in that memory describes itself."""
    threads: int
    """Threads of a block."""

    def zeros(self, length: int, dtype: type[Any]) -> Any:
        """Return an array in that memory."""

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        """Return zeros in memory of the host that kernels reach at the same address, from a multiple of 64 on."""

    def fetch(self, array: Any) -> NDArray[Any]:
        """Return a copy of an array, once what was launched before has ended."""

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        """Run a kernel, all of whose parameters have 8 bytes, with so many bytes of shared memory."""


class CudaLauncher:
    """A GPU, by cupy."""

    interface: str = "__cuda_array_interface__"
    threads: int = 256

    def __init__(self, device: int) -> None:
        """Compile the kernels for a GPU and load them. Raises UsageError where there is no cupy or no such GPU."""
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
        """Return memory of the GPU."""
        with self._device:
            return self._cupy.zeros(length, dtype)

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        """Return pinned memory of the host."""
        nbytes = length * np.dtype(dtype).itemsize
        memory: NDArray[np.uint8] = self._pinned(nbytes + ALIGNED, np.uint8)
        memory[...] = 0
        start = -memory.ctypes.data % ALIGNED
        return memory[start : start + nbytes].view(dtype)

    def fetch(self, array: Any) -> NDArray[Any]:
        """Return a copy of an array of the GPU, once the current stream has come this far."""
        with self._device:
            found: NDArray[Any] = self._cupy.asnumpy(array)
            return found

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        """Launch a kernel on the current stream."""
        with self._device:
            values = tuple(np.int64(one) for one in arguments)
            self._module.get_function(name)((blocks,), (threads,), values, shared_mem=shared)


class _Lines(NamedTuple):
    """Rows, as kernels take them."""

    address: int
    stride: int
    rows: int
    nbytes: int


class Bounds(NamedTuple):
    """What the numbers that describe a round follow from."""

    local: int
    """Experts of a rank."""
    me: int
    most: int
    """Rows, or copies, that a rank gets at once, each of `row` bytes; the first lies at `at`."""
    row: int
    at: int
    of_expert: int
    """Of more rows for an expert, or for a rank, nothing is written, not even the route of `route` bytes."""
    of_rank: int
    route: int


class Told(NamedTuple):
    """Where what describes a round is put."""

    kept: Any
    """The weights."""
    mirror: Any
    """The numbers of rows; and those of copies, None where rows are sent."""
    copy_mirror: Any
    route: Any
    """The total, and `counts`."""
    lengths: Any
    """The bytes to write to each other rank, from the one behind this on, where they begin, and those of the route."""
    here: Any
    routed: Any


class GpuKernels:
    """The functions of `kernels`, which take the same arguments: rows are two-dimensional arrays of uint8.

    Small arrays of numbers lie together. What a call was given must live until the stream has come by it.
    """

    def __init__(
        self, launcher: Launcher, experts: int, ranks: int, *, threads: int | None = None, blocks: int = 1024
    ) -> None:
        """Allocate what calls need, for so many experts and ranks. Blocks are at most so many, of so many threads."""
        threads = launcher.threads if threads is None else threads
        self._launcher, self._threads, self._blocks = launcher, threads, blocks
        self._kinds = experts + ranks
        self._rows, self._copies = launcher.zeros(experts, np.int32), launcher.zeros(ranks, np.int32)
        self._state = launcher.zeros(FLAGS, np.uint32)
        self._large = self._shared(self._kinds) > SHARED_BYTES
        self._work = launcher.zeros(threads // 32 * self._kinds if self._large else 0, np.uint32)
        self.words: NDArray[np.uint32] = launcher.host(FLAGS, np.uint32)
        """The flags, in memory of the host."""
        self._flags = self.words.ctypes.data, self._of(self._state, "<u4")

    def numbered(
        self, ids: Any, experts: int, local: int, ranks: int, by_rank: bool, out: Any, *, begins: bool = False,
        raises: int = 0,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Number rows, or copies by rank, into `out`; return the rows for each expert and the copies for each rank.

        ids: int32, uint32 or int64. What is returned is overwritten by the next call.
        """
        rows, copies = self._rows[:experts], self._copies[:ranks]
        (tokens, top_k), kind = self._shape(ids), self._described(ids)["typestr"]
        if kind not in ("<i4", "<u4", "<i8"):
            raise UsageError(f"ids: expected int32, uint32 or int64, got {kind}")
        numbers = [self._of(ids, kind), int(kind[2]), tokens, top_k, experts, local, ranks, int(by_rank)]
        numbers += [self._of(out, "<i4"), self._of(rows, "<i4"), self._of(copies, "<i4")]
        shared, work = self._counters(experts + ranks)
        self._launch("moe_route", 1, shared, [*numbers, work, *self._flags, int(begins), raises])
        return rows, copies

    def describe(
        self, ids: Any, weights: Any, numbered: tuple[Any, Any], counts: tuple[Any, Any], bounds: Bounds, tail: Any,
        told: Told, *, raises: int = 0,
    ) -> None:  # fmt: skip
        """Say what was numbered: `counts` is what `numbered` has returned, for the same ids.

        `numbered` are the numbers of rows and of copies by rank, None where rows are sent; `tail` (tokens, 4 + 8 * k)
        is what travels behind each token.
        """
        (rows, copies), (position, copy) = counts, numbered
        (tokens, top_k), kind, behind = self._shape(ids), self._described(ids)["typestr"], self._lines(tail)
        experts, ranks = self._shape(rows)[0], self._shape(copies)[0]
        numbers = [self._of(ids, kind), int(kind[2]), self._of(weights, "<f4"), self._of(position, "<i4")]
        numbers += [0 if copy is None else self._of(copy, "<i4"), self._of(rows, "<i4"), self._of(copies, "<i4")]
        numbers += [tokens, top_k, experts, bounds.local, ranks, int(copy is not None), *bounds[1:]]
        numbers += [behind.address, behind.stride, self._of(told.kept, "<f4"), self._of(told.mirror, "<i4")]
        numbers += [0 if copy is None else self._of(told.copy_mirror, "<i4"), self._of(told.route, "<u4")]
        numbers += [self._of(one, "<i8") for one in (told.lengths, told.here, told.routed)]
        blocks = -(-max(tokens * top_k, experts, ranks + 1) // self._threads)
        self._launch("moe_describe", blocks, 0, [*numbers, *self._flags, raises])

    def pack(
        self, sent: Any, own: Any, first: int, last: int, at: Any, x: Any, scales: Any, tail: Any, scales_at: int,
        tail_at: int, *, waits: int = 0, raises: int = 0,
    ) -> None:  # fmt: skip
        """Make rows of tokens: token t goes to each row that `at` (tokens, k) names, its scales and tail behind it."""
        to, mine = self._lines(sent), self._lines(own)
        numbers = [to.address, to.stride, mine.address, mine.stride, first, last, self._of(at, "<i4"), *self._shape(at)]
        for part, place in ((x, None), (scales, scales_at), (tail, tail_at)):
            lines = self._lines(part)
            numbers += [lines.address, lines.stride, lines.nbytes, *([] if place is None else [place])]
        tokens, top_k = self._shape(at)
        self._launch("moe_pack", tokens * top_k, 0, [*numbers, *self._flags, waits, raises])

    def copy_runs(self, to: Any, source: Any, runs: Any, nbytes: int, *, waits: int = 0, raises: int = 0) -> None:
        """Copy the first bytes of rows, for each run (row there, row here, count)."""
        there, here = self._lines(to), self._lines(source)
        numbers = [there.address, there.stride, here.address, here.stride, self._of(runs, "<i8"), self._shape(runs)[0]]
        self._launch("moe_copy_runs", there.rows, 0, [*numbers, nbytes, *self._flags, waits, raises])

    def unfold(
        self, to: Any, source: Any, nbytes: int, ids: Any, first: int, base: Any, room: Any, places: Any, seen: Any,
        *, waits: int = 0, raises: int = 0,
    ) -> None:  # fmt: skip
        """Copy each copy of `source` to the place of every expert that it is for: ids (copies, k), of all experts."""
        copies, top_k = self._shape(ids)
        held = self._shape(base)[0]
        numbers = [self._of(ids, "<i4"), copies * top_k, first, held, self._of(base, "<i8"), self._of(room, "<i8")]
        numbers += [self._of(places, "<i4"), self._of(seen, "<i8")]
        shared, work = self._counters(held)
        self._launch("moe_places", 1, shared, [*numbers, work, *self._flags, waits])
        nothing = source[:, :0]
        # It waits, too: in a round that was aborted there are no places.
        self.pack(to, to, 0, 0, places, source[:, :nbytes], nothing, nothing, 0, 0, waits=waits, raises=raises)

    def combine(
        self, out: Any, rows: Any, places: Any, weights: Any, dtype: str, accumulate: bool, *, waits: int = 0,
        raises: int = 0,
    ) -> None:  # fmt: skip
        """Sum rows: line i of `out` becomes the sum over k of `weights[i, k]` times row `places[i, k]`, skipping -1.

        Without weights rows are summed as they are. `accumulate` adds what is there already, last. Where elements do
        not lie at multiples of their size they are read byte by byte.
        """
        to, found, size = self._lines(out), self._lines(rows), SIZES[dtype]
        tokens, top_k = self._shape(places)
        factors = 0 if weights is None else self._of(weights, "<f4")
        numbers = [to.address, to.stride, found.address, found.stride, self._of(places, "<i4"), factors, tokens, top_k]
        pieces = tokens * -(-to.nbytes // (16 * self._threads))
        numbers += [to.nbytes // size, int(accumulate)]
        self._launch(f"moe_combine_{dtype}", pieces, 0, [*numbers, *self._flags, waits, raises])

    def _launch(self, name: str, blocks: int, shared: int, arguments: list[int]) -> None:
        # Also with nothing to do: a flag must be raised all the same.
        self._launcher.launch(name, max(1, min(blocks, self._blocks)), self._threads, shared, arguments)

    def _shared(self, kinds: int) -> int:
        return 4 * (self._threads // 32) * (1 + kinds)

    def _counters(self, kinds: int) -> tuple[int, int]:
        """Return the bytes of shared memory that counters for so many kinds need, and where they are if not there."""
        if kinds > self._kinds:
            raise UsageError(f"{kinds} kinds of rows for kernels that were opened for {self._kinds}")
        return (self._shared(0), self._of(self._work, "<u4")) if self._large else (self._shared(kinds), 0)

    def _described(self, array: Any) -> dict[str, Any]:
        found: dict[str, Any] | None = getattr(array, self._launcher.interface, None)
        if found is None:
            raise UsageError(f"an array in the GPU's memory is expected, got {type(array).__name__}")
        return found

    def _shape(self, array: Any) -> tuple[int, ...]:
        return tuple(self._described(array)["shape"])

    def _of(self, array: Any, typestr: str) -> int:
        """Return where an array of numbers lies, after checking that they lie together."""
        found = self._described(array)
        size, strides = int(found["typestr"][2:]), found.get("strides")
        together = [size * int(np.prod(found["shape"][axis + 1 :])) for axis in range(len(found["shape"]))]
        if typestr != found["typestr"] or (strides and 0 not in found["shape"] and together != [*strides]):
            raise UsageError(f"expected {typestr} that lie together, got {found['typestr']} {strides}")
        return int(found["data"][0])

    def _lines(self, array: Any) -> _Lines:
        """Return rows of bytes as kernels take them."""
        found = self._described(array)
        rows, nbytes = found["shape"]
        strides = found.get("strides") or (nbytes, 1)
        if found["typestr"] != "|u1" or (nbytes > 1 and strides[1] != 1):
            raise UsageError(f"rows: expected uint8 that lie together, got {found['typestr']} {strides}")
        return _Lines(int(found["data"][0]), strides[0], rows, nbytes)


def open_launcher(device: int | Launcher | None) -> Launcher | None:
    """Return where kernels run: on a GPU by its number, or as a launcher of the caller's does it; None for the CPU.

    Raises UsageError as `open_kernels`.
    """
    return CudaLauncher(device) if isinstance(device, int) else device


def open_kernels(device: int | None, experts: int, ranks: int) -> GpuKernels | ModuleType:
    """Return kernels for a GPU, or, for None, those for NumPy's arrays.

    Raises UsageError where a GPU is asked for and there is no cupy or no such GPU.
    """
    return kernels if device is None else GpuKernels(CudaLauncher(device), experts, ranks)
