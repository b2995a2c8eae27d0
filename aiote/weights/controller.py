"""The one that starts updates: it knows the ranks, has them plan, and decides who commits.

A replica gets a version when all its ranks have everything; one that fails stops no other. A source that fails ends
the attempt for replicas that lack something: all ranks are looked at anew, the update is planned once more without the
source, and what no other source holds is named in the error. What was written to `shadow` targets meanwhile is
forgotten, the others are `torn` until the next commit.

A controller that dies takes its update with it, for every target's part of it is a stream that ends then. The next one
has a later epoch, before which the others' updates make way. Between two commits a death can leave the ranks of one
replica with two versions; `describe` shows that, and the next update mends it.
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
from .rank_memory import in_thread, plain_errors
from .recipe import Recipe
from .source import planned

__all__ = ["Controller", "UpdateError", "UpdateReport"]

Places = Sequence[aiote.Address | str]


class UpdateError(aiote.AioteError):
    """No replica has the version (None: there is no plan for any). `reasons` says why, by replica's name or address."""

    def __init__(self, version: int | None, reasons: dict[str, str]) -> None:
        what = "nothing was planned" if version is None else f"version {version} was not committed"
        super().__init__(f"{what}: " + "; ".join(f"{who}: {why}" for who, why in reasons.items()))
        self.version = version
        self.reasons = reasons

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version, self.reasons)


@dataclass(slots=True)
class UpdateReport:
    """What an update did: seconds, replicas that committed, why others did not, and what each source has sent."""

    version: int
    seconds: float = 0.0
    committed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    attempts: int = 0


class Controller:
    """Starts updates of targets by sources; for one task at a time.

    `engine` is its own; `sources` and `targets` are their engines' addresses, `recipe` and `gather` as of
    `plan_update`. `epoch` is greater for each controller of the same ranks; by default the clock says it, in
    nanoseconds. What a rank takes longer than `limit` seconds for makes it fail: a description, a plan, a lease, a
    commit, and what a source sends, which may take a second more for every 16 MiB.
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
            raise aiote.UsageError("a controller needs one source and one target at least")
        if str(engine.address) in map(str, (*sources, *targets)):
            raise aiote.UsageError("a controller has an engine of its own: none has a connection to itself")
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
        """Return what each target is and has now, by its address. Raises UpdateError where one cannot be reached."""
        failed: dict[str, str] = {}
        found = await self._ask(self._targets, "describe", failed)
        if failed:
            raise UpdateError(None, failed)
        return found

    async def prepare(self) -> UpdatePlan:
        """Have every rank describe itself and plan; the first `update` does it, and one after a failure.

        Ranks that cannot be reached are left out, with the others of a target's replica; `absent` says why, by address.
        A target must have been there once: who was never has no replica that could go without it.
        Raises UsageError for ranks that cannot be brought together, PlanMismatchError where one has another recipe,
        UpdateError where the sources that are there do not hold everything, or no replica is there.
        """
        return await self._prepare({})

    async def _prepare(self, lost: dict[str, str]) -> UpdatePlan:
        """Prepare without sources that failed in an update that goes on."""
        self.absent = dict(lost)
        others = {address: client for address, client in self._sources.items() if address not in lost}
        self._states = await self._ask(others, "describe", self.absent)
        self._described = await self._ask(self._targets, "describe", self.absent)
        self._replica_of.update({address: one.replica for address, one in self._described.items()})
        never = self._targets.keys() - self._replica_of.keys()
        unknown = {address: why for address, why in self.absent.items() if address in never}
        if unknown:
            raise UpdateError(None, unknown)
        # A replica that lacks a rank cannot have a version.
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
                    raise aiote.UsageError(f"two ranks have the same number: {sorted(ranks)}")
            size = sum(one.layout.nbytes for one in sources) + sum(one.layout.nbytes for one in targets)
            make = functools.partial(planned, sources, targets, self.recipe, self.gather)
            plan: UpdatePlan
            plan, names = await in_thread(size, make)
            # It says for how long sources may send; of a large model that takes long, too.
            await in_thread(size, lambda plan=plan: plan.traffic)
            failed: dict[str, str] = {}
            refused: list[aiote.UsageError] = []
            chosen = {address: client for address, client in self._sources.items() if address in self._states}
            digests = await self._ask(chosen, "prepare", failed, sources, targets, self.gather, refused=refused)
            if not failed:
                break
            if len(refused) == len(chosen):
                # What all of them say is of what they were given, and not one rank's word.
                raise refused[0]
            # They were lost since they described themselves: the others hold what they had, or the next plan says what.
            self.absent.update(failed)
            self._states = {address: one for address, one in self._states.items() if address not in failed}
        for address, digest in digests.items():
            if digest != plan.digest:
                raise PlanMismatchError(f"source {address} has another plan: it was given another recipe")
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
        """Bring a version to every target, and return what became of it.

        Each of up to `attempts` tries goes without the sources that failed before, to the replicas that have not
        committed yet. Cancelling it aborts the update everywhere; when it has ended, no target has more of it than what
        was committed, and nothing is written any more. Raises UpdateError where no replica has the version, and what
        `prepare` raises.
        """
        report = UpdateReport(version)
        begun = time.monotonic()
        if self.plan is None:
            await self.prepare()
        # Whatever happens now but the commit of all, the next update looks at the ranks anew.
        plan, self.plan = self.plan, None
        lost: dict[str, str] = {}
        made: list[Update] = []
        while plan is not None:
            report.attempts += 1
            # Each attempt is an update of its own, so that one that failed can be made once more.
            self.epoch += 1
            made.append(Update(self.epoch, version))
            found = await self._attempt(plan, made, report)
            report.seconds = time.monotonic() - begun
            lost.update(found)
            if not found or not report.failed or report.attempts >= attempts:
                break
            try:
                plan = await self._without(version, lost)
            except UpdateError:
                if not report.committed:
                    raise
                break
        if not report.committed:
            raise UpdateError(version, {**lost, **report.failed})
        if not report.failed and not self.absent and not lost:
            self.plan = plan
        return report

    async def _without(self, version: int, lost: dict[str, str]) -> UpdatePlan:
        """Look at all ranks anew, and plan without sources that failed. Raises UpdateError: what no other holds."""
        try:
            return await self._prepare(lost)
        except (aiote.UsageError, UpdateError) as error:
            raise UpdateError(version, {**lost, "without them": str(error)}) from error
        finally:
            self.plan = None

    async def _attempt(self, plan: UpdatePlan, made: Sequence[Update], report: UpdateReport) -> dict[str, str]:
        """Try once; return the sources that failed, and why. `made` are the attempts so far, this one the last."""
        attempt = Attempt(self, plan, made, self._written, report.committed)
        with plain_errors():
            await attempt.run()
        report.sent.update(attempt.sent)
        report.committed = sorted({*report.committed, *(one.name for one in attempt.replicas if not one.failure)})
        report.failed.update({one.name: one.failure for one in attempt.replicas if one.failure})
        report.failed = {name: why for name, why in report.failed.items() if name not in report.committed}
        return attempt.lost

    def targets(self) -> list[Receiver]:
        """Return the targets of the plan."""
        return [Receiver(address, state, self._targets[address]) for address, state in self._described.items()]

    def sources(self) -> dict[str, tuple[int, SourceService]]:
        """Return the rank and the service of each source of the plan."""
        return {address: (state.rank, self._sources[address]) for address, state in self._states.items()}

    async def _ask(
        self,
        clients: dict[str, Any],
        method: str,
        failed: dict[str, str],
        *arguments: Any,
        refused: list[aiote.UsageError] | None = None,
    ) -> dict[str, Any]:
        """Call a method of several ranks at once; what fails stands in `failed` then, and UsageErrors in `refused`."""
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
