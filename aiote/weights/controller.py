"""The controller of updates: it knows the ranks, asks them to plan, starts updates, and decides which replicas commit.

A replica gets a version once all its ranks have every byte; a replica that fails does not stop the others. If a source
fails, the attempt ends for the replicas that still lack bytes. The controller then asks all ranks to describe
themselves again, and plans the update without the failed source; if no other source holds an element, the error names
its tensor. `shadow` targets discard what was written in the failed attempt; other targets are `torn` until the next
commit.

If a controller dies, its update ends, because each target takes part by a stream that ends with the controller. The
next controller has a later epoch, so earlier controllers' updates make way for its own. If a controller dies between
two commits, the ranks of one replica can be left with two versions; `describe` shows that, and the next update repairs
it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import numpy as np

import aiote

from .. import service
from ..aio import plain_errors
from .attempt import Attempt, Receiver
from .plan import UpdatePlan
from .protocol import (
    Numbers,
    PlanMismatchError,
    Sent,
    SourceService,
    SourceState,
    TargetService,
    TargetState,
    Update,
)
from .rank_memory import in_thread
from .recipe import Recipe
from .source import plan_described

__all__ = ["Controller", "UpdateError", "UpdateReport"]

Places = Sequence[aiote.Address | str]


class UpdateError(aiote.AioteError):
    """No replica has the version. `reasons` says why, by replica's name or address.

    `version` is None if the ranks could not be asked or planned with.
    """

    def __init__(self, version: int | None, reasons: dict[str, str]) -> None:
        what = "nothing was planned" if version is None else f"version {version} was not committed"
        super().__init__(f"{what}: " + "; ".join(f"{who}: {why}" for who, why in reasons.items()))
        self.version = version
        self.reasons = reasons

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version, self.reasons)


@dataclass(slots=True)
class UpdateReport:
    """The result of an update: its seconds, replicas that committed, why others failed, and what each source sent."""

    version: int
    seconds: float = 0.0
    committed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    attempts: int = 0


class Controller:
    """Start updates of targets by sources. One task at a time may use a controller.

    `engine` belongs to the controller alone. `sources` and `targets` are the addresses of the ranks' engines; `recipe`
    and `gather` are as for `plan_update`. Each controller of the same ranks must have a greater `epoch` than the one
    before; the default is the clock's time in nanoseconds. A rank fails if it takes longer than `limit` seconds for a
    description, a plan, a lease or a commit. A source also fails if it sends for longer than `limit` seconds plus one
    second for every 16 MiB. Raises UsageError without a source or a target, and if the engine is one of theirs.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        sources: Places,
        targets: Places,
        recipe: Recipe | None = None,
        *,
        gather: Literal["auto", "always"] = "auto",
        epoch: int | None = None,
        limit: float = 60.0,
    ) -> None:
        if not sources or not targets:
            raise aiote.UsageError("Controller: expected at least one source and one target")
        if str(engine.address) in map(str, (*sources, *targets)):
            raise aiote.UsageError("Controller: its engine is among the sources or targets; open another engine for it")
        self.engine = engine
        self.recipe, self.gather, self.limit = recipe or Recipe(), gather, limit
        self.epoch = time.time_ns() if epoch is None else epoch
        self.plan: UpdatePlan | None = None
        self._sources = {str(one): service.client(engine, one, SourceService) for one in sources}
        self._targets = {str(one): service.client(engine, one, TargetService) for one in targets}
        self._states: dict[str, SourceState] = {}
        self._described: dict[str, TargetState] = {}
        self._replica_of: dict[str, str] = {}
        self._written: dict[int, dict[int, Numbers]] = {}
        self.absent: dict[str, str] = {}

    async def describe(self) -> dict[str, TargetState]:
        """Return each target's present state, by its address. Raises UpdateError if a target cannot be reached."""
        failed: dict[str, str] = {}
        found = await self._ask_ranks(self._targets, "describe", failed)
        if failed:
            raise UpdateError(None, failed)
        return found

    async def prepare(self) -> UpdatePlan:
        """Ask every rank to describe itself, and plan with all of them.

        The first `update` calls this, and each `update` after a failure. Ranks that cannot be reached are left out, and
        so is the whole replica of an unreachable target; `absent` says why, by address. Every target must have been
        reached once, because only the target itself says which replica it belongs to.

        Raises UsageError for ranks whose tensors do not fit together, PlanMismatchError if a rank has another recipe,
        and UpdateError if a target was never reached, if the reachable sources do not hold everything, or if no replica
        is left.
        """
        return await self._prepare({})

    async def _prepare(self, lost: dict[str, str]) -> UpdatePlan:
        """Prepare without the sources that failed earlier in the same update."""
        self.absent = dict(lost)
        others = {address: client for address, client in self._sources.items() if address not in lost}
        self._states = await self._ask_ranks(others, "describe", self.absent)
        self._described = await self._ask_ranks(self._targets, "describe", self.absent)
        self._replica_of.update({address: one.replica for address, one in self._described.items()})
        never = self._targets.keys() - self._replica_of.keys()
        unknown = {address: why for address, why in self.absent.items() if address in never}
        if unknown:
            raise UpdateError(None, unknown)
        # A replica that lacks a rank cannot get a version, so all its targets are left out.
        halves = {self._replica_of[address] for address in self.absent if address in self._replica_of}
        self._described = {address: one for address, one in self._described.items() if one.replica not in halves}
        try:
            return await self._plan()
        except aiote.UsageError as error:
            if not self.absent:
                raise
            raise UpdateError(None, {**self.absent, "the others": str(error)}) from error

    async def _plan(self) -> UpdatePlan:
        while True:
            sources, targets = list(self._states.values()), list(self._described.values())
            if not sources or not targets:
                raise UpdateError(None, self.absent)
            for side in (sources, targets):
                ranks = [one.rank for one in side]
                if len(set(ranks)) != len(ranks):
                    raise aiote.UsageError(f"two ranks of one side have the same number: {sorted(ranks)}")
            size = sum(one.layout.nbytes for one in sources) + sum(one.layout.nbytes for one in targets)
            make = functools.partial(plan_described, sources, targets, self.recipe, self.gather)
            plan: UpdatePlan
            plan, names = await in_thread(size, make)
            # The traffic says for how long sources may send. For a large model it takes long to compute, too.
            await in_thread(size, lambda plan=plan: plan.traffic)
            failed: dict[str, str] = {}
            refused: list[aiote.UsageError] = []
            chosen = {address: client for address, client in self._sources.items() if address in self._states}
            digests = await self._ask_ranks(chosen, "prepare", failed, sources, targets, self.gather, refused=refused)
            if not failed:
                break
            if len(refused) == len(chosen):
                # All sources refuse, so the fault is in what they were given, and not in a single rank.
                raise refused[0]
            # These were lost after they described themselves. Plan again: either the other sources hold everything, or
            # the plan's error names what is missing.
            self.absent.update(failed)
            self._states = {address: one for address, one in self._states.items() if address not in failed}
        for address, digest in digests.items():
            if digest != plan.digest:
                raise PlanMismatchError(f"source {address} computed another plan: give all the same recipe")
        self._written = {
            rank: {
                source: np.array([mine[name] for name in several if name in mine], np.uint64)
                for source, several in plan.written(rank).items()
            }
            for rank, mine in names[1].items()
        }
        self.plan = plan
        return plan

    async def update(self, version: int, *, attempts: int = 3) -> UpdateReport:
        """Bring a version to every target, and return a report.

        There are up to `attempts` attempts. Each goes without the sources that failed before, and to the replicas that
        have not committed yet. Cancelling aborts the update everywhere. Once this has returned or raised, only targets
        that committed have the version, and sources write no more of it. Raises UpdateError if no replica has the
        version, and everything that `prepare` raises.
        """
        report = UpdateReport(version)
        begun = time.monotonic()
        if self.plan is None:
            await self.prepare()
        # Unless all replicas commit, the next update must ask the ranks to describe themselves again.
        plan, self.plan = self.plan, None
        lost: dict[str, str] = {}
        made: list[Update] = []
        while plan is not None:
            report.attempts += 1
            # Each attempt has an epoch of its own, because ranks refuse an update that they have seen before.
            self.epoch += 1
            made.append(Update(self.epoch, version))
            found = await self._attempt(plan, made, report)
            report.seconds = time.monotonic() - begun
            lost.update(found)
            if not found or not report.failed or report.attempts >= attempts:
                break
            try:
                plan = await self._plan_without(version, lost)
            except UpdateError:
                if not report.committed:
                    raise
                break
        if not report.committed:
            raise UpdateError(version, {**lost, **report.failed})
        if not report.failed and not self.absent and not lost:
            self.plan = plan
        return report

    async def _plan_without(self, version: int, lost: dict[str, str]) -> UpdatePlan:
        """Ask all ranks again, and plan without failed sources. Raises UpdateError if other sources lack their part."""
        try:
            return await self._prepare(lost)
        except (aiote.UsageError, UpdateError) as error:
            raise UpdateError(version, {**lost, "without them": str(error)}) from error
        finally:
            self.plan = None

    async def _attempt(self, plan: UpdatePlan, made: Sequence[Update], report: UpdateReport) -> dict[str, str]:
        """Make one attempt; return the sources that failed, and why. `made` has the attempts so far, this one last."""
        attempt = Attempt(self, plan, made, self._written, report.committed)
        with plain_errors():
            await attempt.run()
        report.sent.update(attempt.sent)
        report.committed = sorted({*report.committed, *(one.name for one in attempt.replicas if not one.failure)})
        report.failed.update({one.name: one.failure for one in attempt.replicas if one.failure})
        report.failed = {name: why for name, why in report.failed.items() if name not in report.committed}
        return attempt.lost

    def targets(self) -> list[Receiver]:
        """Return a new receiver for each target of the plan."""
        return [Receiver(address, state, self._targets[address]) for address, state in self._described.items()]

    def sources(self) -> dict[str, tuple[int, SourceService]]:
        """Return the rank and the service client of each source of the plan, by its address."""
        return {address: (state.rank, self._sources[address]) for address, state in self._states.items()}

    async def _ask_ranks(
        self,
        clients: dict[str, Any],
        method: str,
        failed: dict[str, str],
        *arguments: Any,
        refused: list[aiote.UsageError] | None = None,
    ) -> dict[str, Any]:
        """Call a method of several ranks at once, and return the answers by address.

        Adds the reason of each failure to `failed`, and each UsageError to `refused`.
        """
        answers: dict[str, Any] = {}

        async def ask(address: str, client: Any) -> None:
            try:
                with anyio.fail_after(self.limit):
                    answers[address] = await getattr(client, method)(*arguments)
            except (aiote.AioteError, TimeoutError) as error:
                if isinstance(error, aiote.UsageError) and refused is not None:
                    refused.append(error)
                failed[address] = str(error) or f"{method} took longer than {self.limit} s"

        with plain_errors():
            async with anyio.create_task_group() as group:
                for address, client in clients.items():
                    group.start_soon(ask, address, client)
        return {address: answers[address] for address in clients if address in answers}
