"""Trainers and inference ranks in processes of their own, each with a part: every byte and every logit is right.

Four trainers hold a small Qwen3-MoE or DeepSeek-V3 in one way, two or four inference ranks in another, in bfloat16 or
quantized by blocks. What each inference rank must have is computed here from whole tensors, by plain NumPy. Without
quantization nothing is gathered: no trainer has a whole tensor, and none has memory for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aiote.weights import Layout
from support.engines.opening import PATIENCE_S
from support.machine import LONG
from support.process.children import Child
from support.weights import models, shardings

pytestmark = [
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
    # Ten updates between nine processes take two minutes where others need the processors, too.
    pytest.mark.timeout(600),
]

MODULE = "support.weights.model_process"
UPDATES = 10 if LONG else 2
STAGING = {False: 64 << 10, True: 512 << 10}
"""By fp8: a fiftieth of the largest tensor's whole, a sixteenth of it; and what one quantization block takes."""
SLACK = 384 << 10
"""What Python's own objects may take meanwhile."""
EMBED_BYTES = models.WORDS * models.HIDDEN * 2

PROVIDERS = ("local", "socket", "shm", "tcp")
EVERY = [
    (PROVIDERS[number % len(PROVIDERS)], *case)
    for number, case in enumerate(
        itertools.product(models.TRAINED, (False, True), shardings.TRAINING, shardings.INFERENCE)
    )
]
CASES = (
    EVERY
    if LONG
    else [("local", "deepseek", True, "ep2 x fsdp2", "tp2 x 2"), ("socket", "qwen", False, "pp2 x fsdp2", "ep4")]
)
TORCH_CASES = list(itertools.product(models.TRAINED, shardings.TRAINING)) if LONG else [("deepseek", "ep2 x fsdp2")]


@pytest.fixture
def child() -> Iterator[Callable[[], Child]]:
    """Start child processes, which are killed in the end."""
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(module=MODULE))
        return started[-1]

    yield start
    for one in started:
        one.end()


class Job:
    """All processes of one case."""

    def __init__(
        self, child: Callable[[], Child], model: str, fp8: bool, training: str, inference: str, folder: Path
    ) -> None:
        self.model, self.fp8, self.kind, self.folder = model, fp8, inference, folder
        self.layouts = shardings.trainers(training, model), shardings.inference(inference, model, fp8)
        self.trainers = [child() for _ in self.layouts[0].ranks]
        self.servers = [child() for _ in self.layouts[1].ranks]
        self.controller = child()
        each = {"replicated 4": 1, "ep4": 4}.get(inference, 2)
        self.replicas = [self.servers[first : first + each] for first in range(0, len(self.servers), each)]
        self.training = training

    async def start(self, provider: str, torch: str = "") -> None:
        """Begin to serve; one replica after the other takes updates beside its weights and in them.

        With a folder for `torch` trainers have modules of FSDP2, whose placements must be those of the layout.
        """
        for one in (*self.trainers, *self.servers, self.controller):
            await one.open(provider)
        common = {"model": self.model, "fp8": self.fp8}
        said = [{}] * len(self.trainers)

        async def begin(rank: int, one: Child) -> None:
            said[rank] = await one.ask(
                "trainer", rank=rank, training=self.training, staging=STAGING[self.fp8], folder=torch, **common
            )

        async with anyio.create_task_group() as group:
            for rank, one in enumerate(self.trainers):
                group.start_soon(begin, rank, one)
        if torch:
            found = Layout.merge(Layout.from_description(one["layout"]) for one in said)
            assert {n: t.held_by() for n, t in found.tensors.items()} == {
                n: t.held_by() for n, t in self.layouts[0].tensors.items()
            }
        numbered = [(number, one) for number, several in enumerate(self.replicas) for one in several]
        for rank, (number, one) in enumerate(numbered):
            versions = ("shadow", "inplace")[number % 2]
            await one.ask("server", rank=rank, inference=self.kind, versions=versions, replica=f"r{number}", **common)

    async def update(self, version: int) -> dict[str, Any]:
        """Train, bring the version over, and return the controller's report."""
        for one in self.trainers:
            await one.ask("step", version=version)
        addresses = [[str(one.address) for one in side] for side in (self.trainers, self.servers)]
        return await self.controller.ask(
            "bring", sources=addresses[0], targets=addresses[1], model=self.model, fp8=self.fp8, version=version
        )

    async def held(self, side: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return what each rank of a side says of itself, and its arrays."""
        found = []
        for rank, one in enumerate((self.trainers, self.servers)[side]):
            path = self.folder / f"{side}.{rank}.npz"
            said = await one.ask("save", path=str(path))
            with np.load(path) as saved:
                found.append((said, {name: typed(self.layouts[side], rank, name, saved[name]) for name in saved}))
        return found

    def logits(self, held: list[dict[str, Any]]) -> list[Any]:
        """Return what each replica computes."""
        found, ranks = [], iter(range(len(held)))
        for several in self.replicas:
            mine = [next(ranks) for _ in several]
            numbers = [
                shardings.unfused(self.kind, self.model, rank, shardings.whole_numbers(held[rank])) for rank in mine
            ]
            found.append(models.forward(self.model, numbers[:1] if self.kind == "ep4" else numbers, numbers))
        return found


def typed(layout: Layout, rank: int, name: str, data: Any) -> Any:
    """Return bytes as the array that a rank has."""
    tensor = layout.tensors[name]
    return data.view(models.KINDS[tensor.dtype]).reshape(tensor.held_by()[rank].shape)


def put_together(layout: Layout, held: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Check that trainers' parts are those of whole tensors, that all of them are there, and none has half and more."""
    for name, tensor in layout.tensors.items():
        there = np.zeros(tensor.shape, bool)
        for rank, one in tensor.held_by().items():
            part = held[rank][name]
            assert part.nbytes < 0.6 * whole[name].nbytes, (name, rank)
            for start, stop, local in one.pieces:
                box = tuple(map(slice, start, stop))
                here = tuple(slice(at, at + b - a) for at, a, b in zip(local, start, stop, strict=True))
                assert np.array_equal(part[here].view(np.uint8), whole[name][box].view(np.uint8)), (name, rank)
                there[box] = True
        assert there.all(), name


@pytest.mark.parametrize(("provider", "model", "fp8", "training", "inference"), CASES)
async def test_every_byte_and_every_logit_is_the_trainers(provider, model, fp8, training, inference, child, tmp_path):
    job = Job(child, model, fp8, training, inference, tmp_path)
    with anyio.fail_after(8 * PATIENCE_S):
        await job.start(provider)
        await updated(job)


@pytest.mark.needs_torch
@pytest.mark.parametrize("provider", ["local"])
@pytest.mark.parametrize(("model", "training"), TORCH_CASES)
async def test_modules_of_torch_give_the_same(provider, model, training, child, tmp_path):
    job = Job(child, model, True, training, "tp2", tmp_path)
    with anyio.fail_after(8 * PATIENCE_S):
        await job.start(provider, torch=str(tmp_path))
        await updated(job)


async def updated(job: Job) -> None:
    """Bring versions over, and check each."""
    model, fp8, inference, logits = job.model, job.fp8, job.kind, None
    for version in range(1, UPDATES + 1):
        report = await job.update(version)
        assert report["committed"] == [f"r{number}" for number in range(len(job.replicas))], report
        assert report["sent"] == report["planned"]
        assert report["peak"] <= STAGING[fp8]
        trained, served = await job.held(0), await job.held(1)
        whole = {n: models.values(n, *kind, version) for n, kind in models.TRAINED[model]().items()}
        put_together(job.layouts[0], [arrays for _, arrays in trained], whole)
        for rank, (said, arrays) in enumerate(served):
            assert said["version"] == version
            wanted = shardings.expected(inference, model, fp8, rank, whole)
            assert arrays.keys() == wanted.keys()
            wrong = [n for n in wanted if arrays[n].tobytes() != wanted[n].tobytes()]
            assert not wrong, (rank, version)
        no_room_for_a_whole(version, fp8, report, trained, served)
        before, logits = logits, check_logits(job, whole, [arrays for _, arrays in served])
        assert before is None or not np.allclose(before, logits, rtol=0.01)


def no_room_for_a_whole(version: int, fp8: bool, report: Any, trained: Any, served: Any) -> None:
    """Check that no process has held the largest tensor's whole on the way, nor read any part of another trainer's."""
    assert STAGING[fp8] + SLACK < EMBED_BYTES
    assert fp8 or report["gathered"] == 0
    if version > 1:  # the first plans, too
        assert max(said["grown"] for said, _ in trained) <= STAGING[fp8] + SLACK
        assert max(said["grown"] for said, _ in served) <= SLACK


def check_logits(job: Job, whole: dict[str, Any], held: list[dict[str, Any]]) -> Any:
    """Check that each replica computes what the trainers' tensors give; return that."""
    mine = shardings.whole_numbers(shardings.by_expert(whole))
    exact = models.forward(job.model, [mine], [mine])
    right = exact
    if job.fp8:
        mine = shardings.whole_numbers(shardings.rounded(whole))
        right = models.forward(job.model, [mine], [mine])
        assert np.linalg.norm(right - exact) < 0.1 * np.linalg.norm(exact)
    for found in job.logits(held):
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9 * np.abs(right).max())
    return exact
