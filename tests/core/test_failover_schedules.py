"""Failover under thousands of schedules, and the proof that they would notice what is wrong.

`programs/soak/failover_schedules.py` plays a million of them. A failing schedule is repeated by `world_of(seed).run()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from aiote.core import failover
from aiote.core.control import ControlError
from aiote.core.failover import ChannelState, ChannelStates, Reconcile
from reference import recovery
from reference.channel_counts import Verdict
from reference.recovery import Post, Recovery, Stage, TrackedWork
from support.failover.forgetful import ForgetfulWorld, world_of
from support.failover.parts import FAULTS, Broken
from support.failover.world import World

SCHEDULES = 3000
LIMIT = 6000  # in which a fault has to be found


def missed(text: str, fault: str = "", world: type[World] = World) -> bool:
    """Tell whether a schedule fails with this text; a fault may show in other ways before."""
    for seed in range(LIMIT):
        try:
            world(seed, fault).run()
        except (Broken, ControlError) as error:
            if text in str(error):
                return True
        except (KeyError, AssertionError):
            continue
    return False


def test_counts_are_exact_in_thousands_of_random_schedules() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        try:
            tally += world_of(seed).run()
        except BaseException as error:
            error.add_note(f"to repeat: world_of({seed}).run()")
            raise
    assert all(tally[what] > SCHEDULES // 10 for what in ("deaths", "noticed by both", "cancelled", "acknowledgements"))
    assert tally["posts taken over"] > SCHEDULES
    assert tally["immediates and rewrites"] > SCHEDULES // 2
    assert tally["opened"] > SCHEDULES
    assert tally["nested"] > SCHEDULES // 100
    assert tally["forgotten"] > SCHEDULES // 100
    assert 0 < tally["lost"] < SCHEDULES // 10


def test_a_schedule_replays_bit_for_bit() -> None:
    for seed in range(50):
        assert world_of(seed).run() == world_of(seed).run()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_schedule_fails_when_the_engine_leaves_a_step_out(fault: str) -> None:
    assert missed(FAULTS[fault], fault)


def rewrites_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite with the immediates instead of sending the missing ones."""

    def rewrites(self: Recovery) -> list[Post]:
        self.stage = Stage.COUNTING
        return [Post(self, post.what, imm_data=self.imm_data, origin=post) for post in self.posts]

    monkeypatch.setattr(Recovery, "rewrites", rewrites)


def immediates_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send what is missing along with the rewrites."""
    original = Recovery.rewrites

    def rewrites(self: Recovery) -> list[Post]:
        missing = max(0, len(self.posts) - self.came)
        self.stage = Stage.COUNTING
        return original(self) + [Post(self, None, imm_data=self.imm_data) for _ in range(missing)]

    monkeypatch.setattr(Recovery, "rewrites", rewrites)


def one_rewrite_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send what is missing after the first rewrite of the immediate, not the last."""
    original = Recovery.advance

    def advance(self: Recovery) -> tuple[list[Post], list[Post]]:
        if self.stage is not Stage.REWRITING or self.open == 0 or all(post.rewrite for post in self.posts):
            return original(self)
        kept, self.open = self.open, 0
        again, over = original(self)
        self.open += kept
        return again, over

    monkeypatch.setattr(Recovery, "advance", advance)


def nothing_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the missing immediates alone."""
    monkeypatch.setattr(Recovery, "rewrites", lambda self: [])


def nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite, and leave the counts as they are."""
    original = Recovery.advance

    def advance(self: Recovery) -> tuple[list[Post], list[Post]]:
        self.came = len(self.posts)
        return original(self)

    monkeypatch.setattr(Recovery, "advance", advance)


def nested_recoveries_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take an immediate of a recovery that is lost again for arrived."""
    original = recovery.take_over

    def take_over(posts: list[Post], *numbers: object) -> list[Post]:
        again = original(posts, *numbers)
        for post in list(again):
            if isinstance(post.work, Recovery) and any(isinstance(one.work, Recovery) for one in post.work.posts):
                post.work.stage = Stage.COUNTING
                again.remove(post)
                again += recovery.resolved(post)
        return again

    monkeypatch.setattr("support.failover.world.take_over", take_over)


def the_first_down_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconcile when the own endpoint is shut, by what is known then: nothing came."""
    original = ChannelStates.record_shut

    def shut(self: ChannelStates, k: int) -> list[failover.Action]:
        return [*original(self, k), Reconcile(k, failover.Account())]

    monkeypatch.setattr(ChannelStates, "record_shut", shut)


def what_came_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send again all that was not confirmed, counts included."""

    def reconcile(unconfirmed: dict[int, tuple[int, int]], *_: object) -> dict[int, Verdict]:
        return {imm_data: Verdict(True, live, 0) for imm_data, (live, _) in unconfirmed.items()}

    monkeypatch.setattr(recovery, "reconcile", reconcile)


def opened_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open again while the other side is still on its way down."""
    original = ChannelStates.record_shut

    def shut(self: ChannelStates, k: int) -> list[failover.Action]:
        actions = original(self, k)
        self._channels[k].state = ChannelState.DOWN
        self._channels[k].until = 0.0
        return actions

    monkeypatch.setattr(ChannelStates, "record_shut", shut)


EARLY = "is counted before its bytes are there"
MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    rewrites_count: EARLY,
    immediates_at_once: EARLY,
    one_rewrite_is_enough: EARLY,
    nothing_is_rewritten: EARLY,
    nothing_is_counted: "a transfer is over without its count",
    nested_recoveries_let_go: "a transfer is over without its count",
    the_first_down_is_enough: "the peer says",
    what_came_is_ignored: EARLY,
    opened_too_early: "opened again while something moves",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_schedule_fails_when_the_protocol_leaves_a_step_out(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert missed(MUTATIONS[mutate])


def test_a_cancel_does_not_end_what_is_counted_again_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model finds the defect that it once had: `_let_go` took a recovery for idle that had forgotten counts."""
    original = recovery._let_go

    def let_go(posts: list[Post]) -> list[Post]:
        for post in posts:
            of = post.recovery
            if of is not None and post.rewrite is None and len(of.posts) == 1:
                of.came = max(0, of.came)
        return original(posts)

    monkeypatch.setattr(recovery, "_let_go", let_go)
    assert missed("of the immediate", world=ForgetfulWorld)


def test_forgotten_counts_are_sent_again_although_all_else_is_cancelled() -> None:
    work = TrackedWork()
    posts = [Post(work, "bytes", imm_data=7) for _ in range(2)]
    told = failover.Account(((7, 1),))
    rewrites = recovery.take_over(posts, {7: 4}, told, 4)
    assert len(rewrites) == 2
    assert recovery.cancel(work) == []
    assert recovery.resolved(rewrites[0]) == []
    again = recovery.resolved(rewrites[1])
    assert [post.imm_data for post in again] == [7] * 3
    assert all(post.live for post in again)
    assert work.open == 0
