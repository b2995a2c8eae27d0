"""The one that starts updates: it knows the ranks, has them plan, and decides who commits.

A replica gets a version when all its ranks have everything; one that fails stops no other. A source that fails ends
the attempt: the update is planned once more without it, and what no other source holds is named in the error. What was
written to `shadow` targets meanwhile is forgotten, the others are `torn` until the next commit.

A controller that dies takes its update with it, for every target's part of it is a stream that ends then. The next one
has a later epoch, before which the others' updates make way. Between two commits a death can leave the ranks of one
replica with two versions; `describe` shows that, and the next update mends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

import aiote

from .. import service
from .plan import UpdatePlan
from .protocol import (
    PlanMismatchError,
    Sent,
    SourceService,
    SourceState,
    StaleUpdateError,
    TargetService,
    TargetState,
    Update,
    UpdateOrder,
    Where,
    WriteTarget,
)
from .rank_memory import plain_errors
from .recipe import Recipe
from .source import in_thread, planned

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


class _Replica:
    """The ranks of one replica during an update."""

    def __init__(self, name: str, targets: list[_Target]) -> None:
        self.name, self.targets = name, targets
        self.failure = ""
        self.counted = self.committed = 0
        self.scope = anyio.CancelScope()

    def fail(self, reason: str) -> None:
        """Give it up."""
        self.failure = self.failure or reason
        self.scope.cancel()


class _Target:
    """A target as its controller has it."""

    def __init__(self, address: str, state: TargetState, client: TargetService) -> None:
        self.address, self.state, self.client = address, state, client
        self.lent: dict[str, list[bytes]] | None = None
        self.places: dict[str, Where] = {}
        self.imm = 0


class Controller:
    """Starts updates of targets by sources; for one task at a time.

    `engine` is its own; `sources` and `targets` are their engines' addresses, `recipe` and `gather` as of
    `plan_update`. `epoch` is greater for each controller of the same ranks; by default the clock says it, in
    nanoseconds. What a rank takes longer than `limit` seconds for makes it fail: a description, a plan, a lease, a
    commit.
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
        self.absent = {}
        self._states = await self._ask(self._sources, "describe", self.absent)
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
        sources, targets = list(self._states.values()), list(self._described.values())
        if not sources or not targets:
            raise UpdateError(None, self.absent)
        for side in (sources, targets):
            ranks = [one.rank for one in side]
            if len(set(ranks)) != len(ranks):
                raise aiote.UsageError(f"two ranks have the same number: {sorted(ranks)}")
        size = sum(one.layout.nbytes for one in targets)
        plan: UpdatePlan = await in_thread(size, lambda: planned(sources, targets, self.recipe, self.gather))
        failed: dict[str, str] = {}
        chosen = {address: client for address, client in self._sources.items() if address in self._states}
        digests = await self._ask(chosen, "prepare", failed, sources, targets, self.gather)
        if failed:
            raise UpdateError(None, failed)
        for address, digest in digests.items():
            if digest != plan.digest:
                raise PlanMismatchError(f"source {address} has another plan: it was given another recipe")
        self.plan = plan
        return plan

    async def update(self, version: int, *, attempts: int = 2) -> UpdateReport:
        """Bring a version to every target, and return what became of it.

        Each of up to `attempts` tries goes without the sources that failed in the last one. Cancelling it aborts the
        update everywhere; when it has ended, no target has more of it than what was committed, and nothing is written
        any more. Raises UpdateError where no replica has the version, and what `prepare` raises.
        """
        report = UpdateReport(version)
        begun = time.monotonic()
        if self.plan is None:
            await self.prepare()
        # Whatever happens now but the commit of all, the next update looks at the ranks anew.
        plan, self.plan = self.plan, None
        lost: dict[str, str] = {}
        while True:
            report.attempts += 1
            # Each attempt is an update of its own, so that one that failed can be made once more.
            self.epoch += 1
            if lost:
                plan = await self._without(version, lost)
            assert plan is not None
            lost = await self._attempt(plan, Update(self.epoch, version), report)
            report.seconds = time.monotonic() - begun
            if not lost:
                break
            if report.attempts == attempts:
                raise UpdateError(version, lost)
        if not report.committed:
            raise UpdateError(version, report.failed)
        if not report.failed and not self.absent:
            self.plan = plan
        return report

    async def _without(self, version: int, lost: dict[str, str]) -> UpdatePlan:
        """Plan without sources that failed. Raises UpdateError, which says what no other holds."""
        for address in lost:
            self._states.pop(address, None)
        try:
            return await self._plan()
        except (aiote.UsageError, UpdateError) as error:
            raise UpdateError(version, {**lost, "without them": str(error)}) from error
        finally:
            self.plan = None

    async def _attempt(self, plan: UpdatePlan, update: Update, report: UpdateReport) -> dict[str, str]:
        """Try once; return the sources that failed, and why."""
        attempt = _Attempt(self, plan, update)
        with plain_errors():
            await attempt.run()
        report.sent = attempt.sent
        report.committed = sorted(one.name for one in attempt.replicas if not one.failure)
        report.failed = {one.name: one.failure for one in attempt.replicas if one.failure}
        return attempt.lost

    def targets(self) -> list[_Target]:
        """Return the targets of the plan."""
        return [_Target(address, state, self._targets[address]) for address, state in self._described.items()]

    def sources(self) -> dict[str, tuple[int, SourceService]]:
        """Return the rank and the service of each source of the plan."""
        return {address: (state.rank, self._sources[address]) for address, state in self._states.items()}

    async def _ask(
        self, clients: dict[str, Any], method: str, failed: dict[str, str], *arguments: Any
    ) -> dict[str, Any]:
        """Call a method of several ranks at once; what fails stands in `failed` then."""
        answers: dict[str, Any] = {}

        async def ask(address: str, client: Any) -> None:
            try:
                with anyio.fail_after(self.limit):
                    answers[address] = await getattr(client, method)(*arguments)
            except (service.CallError, TimeoutError) as error:
                failed[address] = str(error) or f"{method} took longer than {self.limit} s"

        with plain_errors():
            async with anyio.create_task_group() as group:
                for address, client in clients.items():
                    group.start_soon(ask, address, client)
        return {address: answers[address] for address in clients if address in answers}


class _Attempt:
    """One try to bring a version to all replicas."""

    def __init__(self, controller: Controller, plan: UpdatePlan, update: Update) -> None:
        self.controller, self.update = controller, update
        self.sent: dict[int, Sent] = {}
        self.lost: dict[str, str] = {}
        self._plan = plan
        self._sources = controller.sources()
        replicas: dict[str, list[_Target]] = {}
        for target in controller.targets():
            replicas.setdefault(target.state.replica, []).append(target)
        self.replicas = [_Replica(name, targets) for name, targets in replicas.items()]
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Have memory lent, have it written, and commit where all is there."""
        async with anyio.create_task_group() as group:
            for replica in self.replicas:
                group.start_soon(self._replica, replica)
            with anyio.move_on_after(self.controller.limit) as late:
                await self._until(lambda: all(one.failure or _all_lent(one) for one in self.replicas))
            if late.cancelled_caught:
                for replica in self.replicas:
                    if not _all_lent(replica):
                        replica.fail(f"it lent no memory within {self.controller.limit} s")
            if not all(one.failure for one in self.replicas):
                await self._send()
            for replica in self.replicas:
                if self.lost:
                    replica.fail("a source was lost: " + "; ".join(self.lost.values()))

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _until(self, condition: Any) -> None:
        while not condition():
            await self._changed.wait()

    # Targets.

    async def _replica(self, replica: _Replica) -> None:
        """Follow the ranks of one replica to the end."""
        with replica.scope:
            async with anyio.create_task_group() as group:
                for target in replica.targets:
                    group.start_soon(self._target, replica, target)
        if not replica.failure and replica.committed < len(replica.targets):
            replica.failure = "it was given up"
        self._change()

    async def _target(self, replica: _Replica, target: _Target) -> None:
        senders = self._plan.senders.get(target.state.rank, ())
        addresses = [address for address, (rank, _) in self._sources.items() if rank in senders]
        stream: Any = target.client.update(UpdateOrder(self.update, addresses))
        try:
            async for step in stream:
                if step.kind == "lent":
                    target.lent, target.imm = dict(zip(addresses, step.lent, strict=True)), step.imm
                    target.places = step.places
                elif step.kind == "counted":
                    replica.counted += 1
                else:
                    replica.committed += 1
                self._change()
                if step.kind == "counted":
                    await self._until(lambda: replica.counted == len(replica.targets))
                    with anyio.fail_after(self.controller.limit):
                        await target.client.commit(self.update)
        except (aiote.AioteError, TimeoutError, ValueError) as error:
            replica.fail(f"rank {target.state.rank} at {target.address}: {error}")
        finally:
            # The memory is taken back before this returns, so that nothing of the update is written later.
            with anyio.move_on_after(self.controller.limit, shield=True):
                await stream.aclose()

    # Sources.

    async def _send(self) -> None:
        async with anyio.create_task_group() as group:
            for address, (rank, client) in self._sources.items():
                group.start_soon(self._source, group.cancel_scope, address, rank, client)

    async def _source(self, scope: anyio.CancelScope, address: str, rank: int, client: SourceService) -> None:
        destinations = [
            WriteTarget(target.state.rank, target.address, target.imm, target.lent.get(address, []), target.places)
            for replica in self.replicas
            if not replica.failure
            for target in replica.targets
            if target.lent is not None
        ]
        try:
            sent = await client.send(self.update, self._plan.digest, destinations)
        except (StaleUpdateError, PlanMismatchError) as error:
            for replica in self.replicas:
                replica.fail(f"source {rank}: {error}")
            return
        except aiote.AioteError as error:
            self.lost[address] = str(error)
            scope.cancel()
            return
        self.sent[rank] = sent
        for replica in self.replicas:
            for target in replica.targets:
                if target.state.rank in sent.failed:
                    replica.fail(
                        f"source {rank} could not write to rank {target.state.rank}: {sent.failed[target.state.rank]}"
                    )


def _all_lent(replica: _Replica) -> bool:
    return all(target.lent is not None for target in replica.targets)
