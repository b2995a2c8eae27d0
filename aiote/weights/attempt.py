"""One attempt of a controller to bring a version to all replicas: the steps of each target and each source.

A target takes part by a stream of steps (`protocol`), a source by one call. If a target fails, its replica fails and
the other replicas go on. If a source is lost, the other sources stop, and the replicas that still lack bytes fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote

from ..aio import Condition
from .plan import UpdatePlan
from .protocol import (
    Descriptors,
    Numbers,
    PlanMismatchError,
    Sent,
    SourceService,
    StaleUpdateError,
    Step,
    TargetService,
    TargetState,
    Update,
    UpdateOrder,
    WriteTarget,
    digest_of,
)

if TYPE_CHECKING:
    from .controller import Controller

__all__ = ["Attempt", "Receiver"]

NOTHING = Descriptors.of([])
SLOWEST = 16 << 20
"""The lowest rate, in bytes a second, at which a source counts as alive. The slowest that was measured sent 50 MiB a
second, with eight processes on two cores."""


class Replica:
    """The ranks of one replica during an update."""

    def __init__(self, name: str, targets: list[Receiver]) -> None:
        self.name, self.targets = name, targets
        self.failure = ""
        self.counted = self.committed = 0
        self.scope = anyio.CancelScope()

    @property
    def complete(self) -> bool:
        """Whether all ranks of the replica have every byte of the update."""
        return self.counted == len(self.targets)

    def fail(self, reason: str) -> None:
        """Cancel the replica's part in the attempt. The first reason is kept."""
        self.failure = self.failure or reason
        self.scope.cancel()


class Receiver:
    """A target in one attempt, as its controller sees it."""

    def __init__(self, address: str, state: TargetState, client: TargetService) -> None:
        self.address, self.state, self.client = address, state, client
        self.lent_regions: dict[str, Descriptors] | None = None
        self.places: Numbers = np.zeros((0, 2), np.uint64)
        self.shared = b""
        self.imms: dict[str, int] = {}
        self.steps: list[str] = []

    def for_source(self, address: str) -> WriteTarget:
        """Return the message that tells the source at `address` how to write to this target, which has lent memory."""
        assert self.lent_regions is not None
        # If the places differ from those that the target described, it was served anew since: send the new ones.
        moved = None if np.array_equal(self.places, self.state.places) else self.places
        lent = self.lent_regions.get(address, NOTHING)
        imm = self.imms.get(address, 0)
        return WriteTarget(self.state.rank, self.address, imm, lent, digest_of(self.state.places), moved, self.shared)

    def record_step(self, step: Step, sources: Sequence[str]) -> None:
        """Record a step of the target. Raises UsageError for a step out of order, or with impossible contents."""
        expected = ("lent", "counted", "committed")[len(self.steps) : len(self.steps) + 1]
        if (step.kind,) != expected:
            raise aiote.UsageError(f"it reported {step.kind!r} out of order, after {self.steps}")
        self.steps.append(step.kind)
        if step.kind != "lent":
            return
        if step.lent is None or step.places is None or step.places.shape[1:] != (2,):
            raise aiote.UsageError("it did not describe the memory that it lends")
        if len(step.imms) != len(sources):
            raise aiote.UsageError(f"it gives {len(step.imms)} immediates to {len(sources)} sources")
        regions, rest = divmod(step.lent.ends.size, max(1, len(sources)))
        step.lent.check(regions * len(sources) + rest)
        if rest or (len(step.places) and int(np.max(step.places[:, 0])) >= regions and sources):
            raise aiote.UsageError(
                f"it lends {step.lent.ends.size} regions to {len(sources)} sources; expected as many to each"
            )
        self.lent_regions = {
            one: step.lent.part(number * regions, (number + 1) * regions) for number, one in enumerate(sources)
        }
        self.imms, self.places = dict(zip(sources, step.imms, strict=True)), step.places
        self.shared = step.shared


class Attempt:
    """One attempt to bring a version to all replicas."""

    def __init__(
        self,
        controller: Controller,
        plan: UpdatePlan,
        made: Sequence[Update],
        written: dict[int, dict[int, Numbers]],
        committed: Sequence[str],
    ) -> None:
        self.controller, self.update = controller, made[-1]
        self.sent: dict[int, Sent] = {}
        self.lost: dict[str, str] = {}
        self._plan, self._written = plan, written
        self._sources = controller.sources()
        replicas: dict[str, list[Receiver]] = {}
        for target in controller.targets():
            several = replicas.setdefault(target.state.replica, [])
            # A target that committed in an earlier attempt has the bytes, even if others of its replica failed then.
            if target.state.update not in made:
                several.append(target)
        self.replicas = [Replica(name, targets) for name, targets in replicas.items() if name not in committed]
        self._changed = Condition()

    async def run(self) -> None:
        """Let targets lend memory, let sources write to it, and commit the replicas that have every byte."""
        async with anyio.create_task_group() as group:
            for replica in self.replicas:
                group.start_soon(self._replica, replica)
            with anyio.move_on_after(self.controller.limit) as late:
                await self._changed.until(lambda: all(one.failure or _all_lent(one) for one in self.replicas))
            if late.cancelled_caught:
                for replica in self.replicas:
                    if not _all_lent(replica):
                        replica.fail(f"it lent no memory within {self.controller.limit} s (limit)")
            if not all(one.failure for one in self.replicas):
                await self._ask_sources()
            with anyio.move_on_after(self.controller.limit) as late:
                await self._changed.until(
                    lambda: self.lost or all(one.failure or one.complete for one in self.replicas)
                )
            for replica in self.replicas:
                if late.cancelled_caught and not (replica.failure or replica.complete):
                    replica.fail(
                        f"it did not have every byte {self.controller.limit} s (limit) after the sources had ended"
                    )
                # A complete replica needs no source any more, so it does not matter which source is lost.
                if self.lost and not replica.complete:
                    replica.fail("a source was lost: " + "; ".join(self.lost.values()))

    def _change(self) -> None:
        self._changed.wake_all()

    # Targets.

    async def _replica(self, replica: Replica) -> None:
        """Follow all ranks of one replica until they have committed or the replica fails."""
        with replica.scope:
            async with anyio.create_task_group() as group:
                for target in replica.targets:
                    group.start_soon(self._target, replica, target)
        if not replica.failure and replica.committed < len(replica.targets):
            replica.failure = "it was given up"
        self._change()

    async def _target(self, replica: Replica, target: Receiver) -> None:
        senders = self._plan.senders.get(target.state.rank, ())
        ranks = {address: rank for address, (rank, _) in self._sources.items() if rank in senders}
        addresses, written = list(ranks), self._written[target.state.rank]
        stream: Any = target.client.update(
            UpdateOrder(self.update, addresses, [written[rank] for rank in ranks.values()])
        )
        try:
            async for step in stream:
                target.record_step(step, addresses)
                replica.counted += step.kind == "counted"
                self._change()
                if step.kind == "counted":
                    await self._changed.until(lambda: replica.complete)
                    with anyio.fail_after(self.controller.limit):
                        await target.client.commit(self.update)
                        target.record_step(await anext(stream), addresses)
                    replica.committed += 1
                    break
            if len(target.steps) < 3:
                raise aiote.UsageError(f"the target ended the update before the commit, after {target.steps}")
        except (aiote.AioteError, StopAsyncIteration, TimeoutError, ValueError) as error:
            why = str(error) or f"its commit took longer than {self.controller.limit} s (limit)"
            replica.fail(f"rank {target.state.rank} at {target.address}: {why}")
        finally:
            # The end of the stream makes the target revoke its leases, so that sources cannot write after this returns.
            with anyio.move_on_after(self.controller.limit, shield=True):
                await stream.aclose()

    # Sources.

    async def _ask_sources(self) -> None:
        async with anyio.create_task_group() as group:
            for address, (rank, client) in self._sources.items():
                group.start_soon(self._source, group.cancel_scope, address, rank, client)

    async def _source(self, scope: anyio.CancelScope, address: str, rank: int, client: SourceService) -> None:
        destinations = [
            target.for_source(address)
            for replica in self.replicas
            if not replica.failure
            for target in replica.targets
            if target.lent_regions is not None
        ]
        limit = self.controller.limit + self._bytes(rank) / SLOWEST
        try:
            with anyio.fail_after(limit):
                sent = await client.send(self.update, self._plan.digest, destinations)
        except TimeoutError:
            self._lose(scope, {address: f"source {rank} did not send its part within {limit:.0f} s"})
            return
        except (StaleUpdateError, PlanMismatchError) as error:
            for replica in self.replicas:
                replica.fail(f"source {rank}: {error}")
            return
        except aiote.AioteError as error:
            self._lose(scope, {address: str(error)})
            return
        if wrong := self._check_blamed(rank, sent):
            self._lose(scope, {address: f"source {rank} {wrong}"})
            return
        self.sent[rank] = sent
        if sent.lost:
            known = {number: one for one, (number, _) in self._sources.items()}
            self._lose(scope, {known[number]: why for number, why in sent.lost.items()})
            return
        for replica in self.replicas:
            for target in replica.targets:
                if target.state.rank in sent.failed:
                    replica.fail(
                        f"source {rank} could not write to rank {target.state.rank}: {sent.failed[target.state.rank]}"
                    )

    def _bytes(self, rank: int) -> int:
        """Return how many bytes a source sends and gathers; 0 for a source whose shards are all empty."""
        traffic = self._plan.traffic
        return traffic.sent.get(rank, 0) + traffic.gathered.get(rank, 0)

    def _check_blamed(self, rank: int, sent: Sent) -> str:
        """Return an error if a source blames ranks with which the plan gives it nothing to do; else an empty string."""
        plan = self._plan
        if others := sent.lost.keys() - (plan.gathers_from(rank) if sent.lost else set()):
            return f"reports that it cannot read from sources {sorted(others)}, but the plan lets it read "
            "from others only"
        if others := {target for target in sent.failed if rank not in plan.senders.get(target, ())}:
            return f"reports that it cannot write to targets {sorted(others)}, but the plan lets it write to "
            "others only"
        return ""

    def _lose(self, scope: anyio.CancelScope, lost: dict[str, str]) -> None:
        """Record lost sources, and stop the other sources unless every replica is complete or has failed."""
        self.lost.update(lost)
        if not all(one.failure or one.complete for one in self.replicas):
            scope.cancel()


def _all_lent(replica: Replica) -> bool:
    return all(target.lent_regions is not None for target in replica.targets)
