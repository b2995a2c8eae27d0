"""Train a small Qwen3-MoE in four processes, and bring its weights to two that generate, after every few steps.

    python examples/weights/moe/run.py --updates 10        # make demo-weights installs what it needs

Trainers hold it under FSDP2 and expert parallelism, inference ranks under tensor parallelism with fused projections
and stacked experts. After each update every byte of the inference ranks is compared with what their own loader makes
of the trainers' whole tensors, and their logits with the trainers'.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any

import anyio
import anyio.abc
import numpy
import task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import aiote
from aiote import weights
from aiote.demo import Child, DemoError

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # of logits: the ranks add in another order
ANSWER_S = 300.0
ENDED_S = 1.0  # for the first of several processes that end to be told from those that it takes along


class Ranks:
    """The processes of one run: asked in rounds, each of which every one of them answers."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = children
        self.trainers, self.servers = children[: task.TRAINERS], children[task.TRAINERS :]
        self.doing = "starting"
        self.ended = anyio.Event()
        self._facts = {child.name: child.facts() for child in children}

    async def round(self, doing: str, children: Sequence[Child], **facts: Any) -> list[dict[str, Any]]:
        """Ask several the same, or nothing, and return their answers. Raises DemoError where one ends or is silent."""
        self.doing = doing
        answers: dict[str, dict[str, Any]] = {}

        async def one(child: Child) -> None:
            if facts:
                await child.ask(**facts)
            try:
                answers[child.name] = await anext(self._facts[child.name])
            except StopAsyncIteration:
                await anyio.sleep_forever()  # `watch` says why

        with anyio.move_on_after(ANSWER_S):
            async with anyio.create_task_group() as group:
                for child in children:
                    group.start_soon(one, child)
        silent = [child.name for child in children if child.name not in answers]
        if silent:
            raise DemoError(f"{', '.join(silent)} reported nothing for {ANSWER_S:.0f} s while {doing}")
        return [answers[child.name] for child in children]

    async def watch(self) -> None:
        """Raise DemoError when a process ends."""

        async def one(child: Child) -> None:
            await child.wait()
            self.ended.set()

        async with anyio.create_task_group() as group:
            for child in self.children:
                group.start_soon(one, child)
            await self.ended.wait()
            with anyio.move_on_after(ENDED_S):
                for child in self.children:
                    await child.wait()
            gone = [child for child in self.children if child.process.returncode is not None]
            # One that was killed before those that fail because it is gone.
            first = min(gone, key=lambda child: (child.process.returncode or 0) >= 0)
            raise DemoError(f"{first.name} (pid {first.process.pid}) {how(first)} while the ranks were {self.doing}")


def how(child: Child) -> str:
    code = child.process.returncode
    said = f": {child.complaint}" if child.complaint and code is not None and code >= 0 else ""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}{said}"


@asynccontextmanager
async def started(folder: str, provider: str) -> AsyncIterator[Ranks]:
    """Start all processes, and end them when the block is left, however it is left."""
    names = [("trainer", n) for n in range(task.TRAINERS)] + [("server", n) for n in range(task.SERVERS)]
    children: list[Child] = []
    async with anyio.create_task_group() as readers:
        try:
            for role, rank in names:
                command = [sys.executable, str(HERE / f"{role}.py"), str(rank), folder, provider]
                name = f"{'inference rank' if role == 'server' else role} {rank}"
                children.append(await Child.start(role, name, command, os.environ, errors=subprocess.PIPE))
                readers.start_soon(children[-1].read_errors)
            ranks = Ranks(children)
            readers.start_soon(ranks.watch)
            try:
                yield ranks
            except (aiote.AioteError, DemoError):
                # If that is because a process died, its end is about to be seen, and is what to say.
                with anyio.move_on_after(2 * ENDED_S):
                    await anyio.sleep_forever()
                raise
        finally:
            readers.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ending:
                    for child in children:
                        ending.start_soon(child.end, SIGINT)
                for child in children:
                    await child.process.aclose()


async def prepared(ranks: Ranks, engine: aiote.Engine) -> tuple[weights.Controller, weights.Layout, weights.Layout]:
    """Have the loader recorded, tell all ranks, and return the controller with both layouts."""
    said = await ranks.round(ranks.doing, ranks.children)
    sources = weights.Layout.merge(weights.Layout.from_description(one["layout"]) for one in said[: task.TRAINERS])
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in sources.tensors.items()}
    said = await ranks.round("recording the loader", ranks.servers, sources=shapes)
    described = {rank: one["recording"] for rank, one in enumerate(said)}
    found = {rank: weights.Recording.from_description(one) for rank, one in described.items()}
    targets, recipe = weights.Recording.merge(found)
    said = await ranks.round("getting ready", ranks.children, recordings=described)
    addresses = [one["ready"] for one in said]
    controller = weights.Controller(engine, addresses[: task.TRAINERS], addresses[task.TRAINERS :], recipe)
    return controller, sources, targets


def checked(trained: Sequence[dict[str, Any]], served: Sequence[dict[str, Any]], version: int) -> float:
    """Return by how much logits differ at most. Raises DemoError for a wrong byte, logit, text or version."""
    for rank, one in enumerate(served):
        expected = {name: digest for said in trained for name, digest in said["digests"][rank].items()}
        wrong = [name for name in expected if one["digests"].get(name) != expected[name]]
        if wrong or expected.keys() != one["digests"].keys() or one["version"] != version:
            raise DemoError(
                f"inference rank {rank} has other bytes than the trainers in version {version}: {wrong[:5]}"
            )
    if served[0]["text"] != served[1]["text"]:
        raise DemoError(f"the inference ranks generate different texts in version {version}")
    error = float(numpy.abs(numpy.subtract(trained[0]["logits"], served[0]["logits"])).max())
    if not error <= TOLERANCE:
        raise DemoError(f"logits of version {version} differ by {error} from the trainers', more than {TOLERANCE}")
    return error


async def main(args: argparse.Namespace, console: Console) -> None:
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, progress:
        bar = progress.add_task("starting 4 trainers and 2 inference ranks", total=args.updates)
        async with started(folder, args.provider) as ranks, aiote.open_engine(args.provider) as engine:
            controller, sources, targets = await prepared(ranks, engine)
            plan = await controller.prepare()
            described(console, plan, sources, targets)
            texts = []
            for version in range(1, args.updates + 1):
                progress.update(bar, description=f"version {version}: training")
                trained = await ranks.round("training", ranks.trainers, train=args.steps)
                progress.update(bar, description=f"version {version}: writing weights")
                ranks.doing = "bringing weights over"
                report = await controller.update(version)
                progress.update(bar, description=f"version {version}: generating")
                served = await ranks.round("generating", ranks.servers, generate=args.letters)
                error = checked(trained, served, version)
                texts.append(served[0]["text"])
                line(console, version, trained[0]["loss"], report, error, texts[-1])
                progress.advance(bar)
    if len(set(texts)) == 1 and len(texts) > 1:
        raise DemoError("the text never changed, so the updates showed nothing")
    console.print(
        f"{args.updates} updates: every byte of both inference ranks was the trainers', and so were the logits; "
        f"the text changed {sum(a != b for a, b in itertools.pairwise(texts))} times.",
        style="green",
        highlight=False,
    )


def described(console: Console, plan: weights.UpdatePlan, sources: weights.Layout, targets: weights.Layout) -> None:
    """Print what there is, and what an update moves."""
    table = Table.grid(padding=(0, 2))
    total = sum(tensor.nbytes for tensor in sources.tensors.values())
    counts = [f"{len(side.tensors)} tensors" for side in (sources, targets)]
    table.add_row("trainers", f"{task.TRAINERS}: FSDP2 x EP{task.EXPERT_RANKS}, {counts[0]}, {total} bytes")
    table.add_row("inference ranks", f"{task.SERVERS}: TP{task.SERVERS}, {counts[1]}, recorded from their loader")
    table.add_row("bytes sent", ", ".join(map(str, plan.traffic.sent.values())))
    table.add_row("bytes received", ", ".join(map(str, plan.traffic.received.values())))
    console.print(table, highlight=False)
    console.print(Text(f'it learns: "{task.TEXT.strip()}"\n', style="dim"))


def line(console: Console, version: int, loss: float, report: weights.UpdateReport, error: float, text: str) -> None:
    """Print one version."""
    written = sum(sent.written for sent in report.sent.values())
    facts = f"version {version:2}  loss {loss:6.3f}  {written} bytes in {report.seconds * 1e3:6.1f} ms"
    console.print(Text.assemble(facts, (f"  logits within {error:.0e}\n", "dim"), "    ", task.PROMPT, (text, "bold")))


def ended(args: argparse.Namespace) -> int:
    """Run, say what went wrong, and return the exit status."""
    if importlib.util.find_spec("torch") is None:
        print("run.py: this needs torch: make demo-weights installs it, or pip install torch", file=sys.stderr)
        return 2
    problems: list[BaseException] = []
    try:
        anyio.run(main, args, Console())
    except* (aiote.AioteError, DemoError) as group:
        problems += leaves(group)
    except* KeyboardInterrupt as group:
        problems = [group]
    if any(isinstance(one, BaseExceptionGroup) for one in problems):
        print("run.py: interrupted", file=sys.stderr)
        return 130
    if problems:
        print(f"run.py: {'; '.join(dict.fromkeys(map(str, problems)))}", file=sys.stderr)
    return int(bool(problems))


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in nested groups."""
    return (
        [leaf for one in error.exceptions for leaf in leaves(one)] if isinstance(error, BaseExceptionGroup) else [error]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small Qwen3-MoE, and see others say what it learned.")
    parser.add_argument("--updates", type=int, default=10, help="weight updates (default: 10)")
    parser.add_argument("--steps", type=int, default=5, help="steps of the optimizer before each (default: 5)")
    parser.add_argument("--letters", type=int, default=64, help="letters to generate after each (default: 64)")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    given = parser.parse_args()
    sys.exit(ended(given))
