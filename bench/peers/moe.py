"""Rounds of dispatch and combine, the same for every library: who sends what where, what must arrive, and the clock.

A rank has tokens of 7168 bytes (fp8) and 56 float32 scales, each for 8 of 256 experts; experts lie on ranks in order.
`dispatch` brings each (token, expert) to the expert's rank, in the order (expert, source, token, k); `combine` brings
the experts' answers (7168 bfloat16) back and sums them, each times its weight. Routings: "uniform"; "zipf", experts
wanted in proportion to 1, 1/2, 1/3 ... in a random order; "one", all tokens to experts of rank 0.

A worker is one rank of one library. It reads commands from a FIFO, a JSON object a line, and answers on another:

    {"case": {...}, "variant": text}   opens that case, makes a round and checks it, then two more: the seconds of one
    {"rounds": n}                      makes so many rounds, timed, and checks the last: the seconds of every phase
    {}                                 ends

Rounds follow each other without a barrier; tokens are of two versions in turns. What experts answer depends on expert
and token alone and lies where the library wants it before the first timed round. Weights are bfloat16 numbers, so that
a library that takes them as such loses nothing.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

HIDDEN, SCALES, EXPERTS, TOP_K = 7168, 56, 256, 8
ROW = HIDDEN + 4 * SCALES
PERIOD = 262_139
"""A prime, so that rows begin at as many places."""
ROUTINGS = ("uniform", "zipf", "one")
WARM = 2

Bits = NDArray[np.uint16]


class Case(NamedTuple):
    """So many ranks, so many tokens on each of them, and how they choose experts."""

    ranks: int
    tokens: int
    routing: str

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return EXPERTS // self.ranks


class Data:
    """What is sent, and what has to come out, of all ranks of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        random = np.random.default_rng(5)
        self._bytes = random.integers(0, 256, PERIOD + HIDDEN).astype(np.uint8)
        self._floats = random.random(PERIOD + SCALES, np.float32)
        # As bfloat16 of either sign, from 2 ** -15 to 2 ** -7.
        self._answers = random.integers(0, 1 << 16, PERIOD + HIDDEN).astype(np.uint16) & 0x83FF | 0x3800
        self.ids = [self._ids(one) for one in range(case.ranks)]
        weights = np.random.default_rng([7, rank]).integers(1, 129, (case.tokens, TOP_K))
        self.weights = weights.astype(np.float32) / 256

    def _ids(self, rank: int) -> NDArray[np.int64]:
        """Return the experts of a rank's tokens (tokens, k); none twice for a token."""
        case = self.case
        chances = np.zeros(EXPERTS)
        if case.routing == "zipf":
            chances = -np.log(np.random.default_rng(11).permutation(EXPERTS) + 1.0)
        if case.routing == "one":
            chances[case.local :] = -np.inf
        wanted = chances + np.random.default_rng([3, rank]).gumbel(size=(case.tokens, EXPERTS))
        return np.argsort(-wanted, 1)[:, :TOP_K].astype(np.int64)

    def tokens(self, rank: int, version: int, tokens: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return tokens of a rank, and their scales."""
        at = (tokens * 6007 + rank * 30_011 + version * 104_729) % PERIOD
        return sliding_window_view(self._bytes, HIDDEN)[at], sliding_window_view(self._floats, SCALES)[at]

    def mine(self, version: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return this rank's own tokens and scales."""
        return self.tokens(self.rank, version, np.arange(self.case.tokens))

    def answers(self, experts: NDArray[Any], rank: int, tokens: NDArray[Any]) -> Bits:
        """Return what experts answer to tokens of a rank."""
        at = (experts * 7919 + rank * 30_011 + tokens * 6007) % PERIOD
        return sliding_window_view(self._answers, HIDDEN)[at]

    def arriving(self) -> list[tuple[int, int, NDArray[Any]]]:
        """Return what this rank gets, in order: (expert, source, its tokens) of each expert and source."""
        first = self.rank * self.case.local
        chosen = [[ids == expert for ids in self.ids] for expert in range(first, first + self.case.local)]
        return [
            (first + number, source, np.nonzero(where)[0])
            for number, several in enumerate(chosen)
            for source, where in enumerate(several)
        ]

    def sums(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return what comes back, unrounded, and by how much a sum in bfloat16 may be off for each element."""
        total = np.zeros((self.case.tokens, HIDDEN), np.float32)
        size = np.zeros_like(total)
        for k in range(TOP_K):
            bits = self.answers(self.ids[self.rank][:, k], self.rank, np.arange(self.case.tokens))
            term = self.weights[:, k, None] * as_float(bits)
            total += term
            size += np.abs(term)
        return total, size


def as_float(bits: Bits) -> NDArray[np.float32]:
    """Return bfloat16 numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Rounds(abc.ABC):
    """One library's rounds of one case."""

    tolerance = 2.0**-8
    """Of the sum of the sizes of its terms: one rounding to bfloat16."""

    def __init__(self, data: Data) -> None:
        self.data, self.case = data, data.case

    async def open(self) -> None:  # noqa: B027
        """Have memory and connections."""

    def prepare(self, version: int) -> None:  # noqa: B027
        """Have this rank's tokens lie where they are dispatched from, off the clock."""

    @abc.abstractmethod
    async def dispatch(self, version: int) -> None:
        """Send this rank's tokens, and have what arrives in order."""

    @abc.abstractmethod
    async def combine(self) -> None:
        """Send back what the experts answered, and have the sums."""

    @abc.abstractmethod
    def arrived(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the rows and scales that came, in order."""

    @abc.abstractmethod
    def answer(self, first: int, rows: Bits) -> None:
        """Take what experts answer to the rows from `first` on."""

    @abc.abstractmethod
    def out(self) -> Bits:
        """Return the sums as bits of bfloat16."""

    async def close(self) -> None:  # noqa: B027
        """Let go of everything."""

    def check_rows(self, version: int) -> str:
        """Return what is wrong with what arrived, or nothing."""
        rows, scales = self.arrived()
        first = 0
        for expert, source, tokens in self.data.arriving():
            x, s = self.data.tokens(source, version, tokens)
            here = slice(first, first + len(tokens))
            if not (np.array_equal(rows[here], x) and np.array_equal(scales[here], s)):
                return f"rows of expert {expert} from rank {source} are not those that were sent"
            first += len(tokens)
        return "" if first == len(rows) else f"{len(rows)} rows arrived, of {first}"

    def give_answers(self) -> None:
        """Have every expert's answers lie there."""
        first = 0
        for expert, source, tokens in self.data.arriving():
            self.answer(first, self.data.answers(np.int64(expert), source, tokens))
            first += len(tokens)

    def check_sums(self) -> str:
        """Return what is wrong with the sums, or nothing."""
        want, size = self.data.sums()
        off = np.abs(as_float(self.out()) - want) > self.tolerance * size
        return f"{int(off.sum())} of {off.size} sums are wrong" if off.any() else ""


class Times(NamedTuple):
    """The seconds of each round's phases, and CPU seconds of all rounds."""

    dispatch: list[float]
    combine: list[float]
    cpu: float
    sleeps: int
    """How often a thread of the rank gave its processor up to wait."""


async def timed(rounds: Rounds, count: int) -> Times:
    """Make rounds; tokens are of version 1 in the last one."""
    dispatch, combine = [], []
    began, slept = time.process_time(), sleeps()
    for number in range(count):
        version = (count - number) % 2
        rounds.prepare(version)
        start = time.perf_counter()
        await rounds.dispatch(version)
        middle = time.perf_counter()
        await rounds.combine()
        dispatch.append(middle - start)
        combine.append(time.perf_counter() - middle)
    return Times(dispatch, combine, time.process_time() - began, sleeps() - slept)


def sleeps() -> int:
    """Return how often the threads of this process have waited so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


async def begin(rounds: Rounds) -> dict[str, Any]:
    """Make the first rounds, and check one."""
    await rounds.open()
    rounds.prepare(0)
    await rounds.dispatch(0)
    wrong = rounds.check_rows(0)
    rounds.give_answers()
    await rounds.combine()
    wrong = wrong or rounds.check_sums()
    times = await timed(rounds, WARM)
    return {"wrong": wrong, "seconds": times.dispatch[-1] + times.combine[-1]}


async def measure(rounds: Rounds, count: int) -> dict[str, Any]:
    """Make rounds, and check the last."""
    gc.collect()
    gc.freeze()
    times = await timed(rounds, count)
    return {**times._asdict(), "wrong": rounds.check_rows(1) or rounds.check_sums()}


class Worker:
    """A rank: its FIFOs, and its rounds by the name of the variant."""

    def __init__(self, folder: Path, rank: int, library: str) -> None:
        self.rank = rank
        # In this order on either side: each waits for the other.
        self._commands = (folder / f"in.{rank}").open()
        self._answers = (folder / f"out.{rank}").open("w", buffering=1)
        self._say({"library": library})

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    async def serve(self, make: Callable[[str, Data], Rounds]) -> None:
        """Do what is asked until the end."""
        rounds: Rounds | None = None
        while command := json.loads(await asyncio.to_thread(self._commands.readline) or "{}"):
            if "case" in command:
                if rounds is not None:
                    await rounds.close()
                rounds = make(command["variant"], Data(Case(**command["case"]), self.rank))
                self._say(await begin(rounds))
            elif rounds is not None:
                self._say(await measure(rounds, command["rounds"]))
        if rounds is not None:
            await rounds.close()


def parse() -> argparse.Namespace:
    """Return what a rank is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, default=-1, help="MPI's own without it")
    # What a library prints is no answer, and not for the table.
    sys.stdout = sys.stderr
    return parser.parse_args()
