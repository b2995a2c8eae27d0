"""What becomes of unconfirmed posts: rewritten first, counted last, and nothing is over before its recovery is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.failover import Account, FailoverError, Received
from reference import recovery
from reference.recovery import MessageNumbers, Post, Recovery, TrackedWork, cancel, resolved, take_over

IMM_DATA = 5


def counted(*works: TrackedWork) -> list[Post]:
    return [Post(work, f"bytes {at}", imm_data=IMM_DATA) for at, work in enumerate(works)]


def came(n: int, imm_data: int = IMM_DATA) -> Account:
    return Account(((imm_data, n),) if n else ())


def immediates(posts: list[Post]) -> list[Post]:
    assert all(post.what is None and post.imm_data == IMM_DATA for post in posts)
    return posts


def test_confirmed_posts_end_their_work() -> None:
    work = TrackedWork()
    first, second = Post(work, "a"), Post(work, "b")
    assert (resolved(first), work.open) == ([], 1)
    assert (resolved(second), work.open) == ([], 0)


def test_what_came_altogether_is_over() -> None:
    works = [TrackedWork(), TrackedWork()]
    assert take_over(counted(*works), {IMM_DATA: 3}, came(5)) == []
    assert [work.open for work in works] == [0, 0]


def test_uncounted_posts_are_posted_again() -> None:
    work, gone = TrackedWork(), TrackedWork()
    write, dropped = Post(work, "bytes"), Post(gone, "bytes")
    cancel(gone)
    assert take_over([write, dropped], {}, Account()) == [write]
    assert (work.open, gone.open) == (1, 0)


def test_the_missing_count_waits_for_the_last_rewrite() -> None:
    works = [TrackedWork(), TrackedWork(), TrackedWork()]
    rewrites = take_over(counted(*works), {IMM_DATA: 1}, came(2))
    assert [(post.what, post.imm_data) for post in rewrites] == [(f"bytes {at}", None) for at in range(3)]
    assert resolved(rewrites[2]) == resolved(rewrites[0]) == []
    missing = immediates(resolved(rewrites[1]))
    assert len(missing) == 2
    assert resolved(missing[0]) == []
    assert [work.open for work in works] == [1, 1, 1]
    assert resolved(missing[1]) == []
    assert [work.open for work in works] == [0, 0, 0]


def test_a_lost_rewrite_is_posted_again() -> None:
    work = TrackedWork()
    (rewrite,) = take_over(counted(work), {}, came(0))
    assert take_over([rewrite], {}, Account()) == [rewrite]
    (missing,) = resolved(rewrite)
    resolved(missing)
    assert work.open == 0


def test_a_lost_immediate_is_recovered_in_its_turn() -> None:
    """Along with a write of the same immediate: its bytes come first, and the outer recovery waits for the inner."""
    old, new = TrackedWork(), TrackedWork()
    (rewrite,) = take_over(counted(old), {}, came(0))
    (lost,) = immediates(resolved(rewrite))
    (again,) = take_over([lost, *counted(new)], {}, came(1))
    assert (again.what, again.imm_data) == ("bytes 0", None)
    (missing,) = immediates(resolved(again))
    assert (old.open, new.open) == (1, 1)
    resolved(missing)
    assert (old.open, new.open) == (0, 0)


def test_a_lost_immediate_that_came_is_over() -> None:
    work = TrackedWork()
    (rewrite,) = take_over(counted(work), {}, came(0))
    assert take_over(resolved(rewrite), {IMM_DATA: 4}, came(5)) == []
    assert work.open == 0


def test_an_immediate_alone_has_nothing_to_rewrite() -> None:
    work = TrackedWork()
    (missing,) = immediates(take_over([Post(work, None, imm_data=IMM_DATA)], {}, came(0)))
    resolved(missing)
    assert work.open == 0


def test_thousands_of_nested_recoveries_end_their_work() -> None:
    """Deeper than any stack."""
    work = TrackedWork()
    posts = immediates(take_over([Post(work, None, imm_data=IMM_DATA)], {}, came(0)))
    for _ in range(5000):
        posts = immediates(take_over(posts, {}, came(0)))
    resolved(posts[0])
    assert work.open == 0


def test_what_was_cancelled_before_ends_at_once() -> None:
    live, gone = TrackedWork(), TrackedWork()
    posts = counted(live, gone)
    cancel(gone)
    (rewrite,) = take_over(posts, {}, came(1))
    assert (rewrite.origin, gone.open) == (posts[0], 0)
    assert resolved(rewrite) == []
    assert live.open == 0


def test_what_is_cancelled_while_it_is_rewritten_ends_with_that() -> None:
    live, gone = TrackedWork(), TrackedWork()
    first, second = take_over(counted(live, gone), {}, came(0))
    assert cancel(gone) == []
    assert (gone.open, second.live, first.live) == (1, False, True)
    assert resolved(second) == []
    assert gone.open == 0
    assert len(immediates(resolved(first))) == 1


def test_what_is_cancelled_after_its_rewrite_does_not_wait_for_the_others() -> None:
    live, gone = TrackedWork(), TrackedWork()
    first, second = take_over(counted(live, gone), {}, came(0))
    assert resolved(second) == []
    assert cancel(gone) == []
    assert (gone.open, live.open) == (0, 1)
    assert len(immediates(resolved(first))) == 1


def test_a_count_that_nobody_wants_any_more_is_not_posted() -> None:
    work = TrackedWork()
    (rewrite,) = take_over(counted(work), {}, came(0))
    (missing,) = resolved(rewrite)
    assert missing.live
    cancel(work)
    assert (missing.live, work.open) == (False, 0)
    assert resolved(missing) == []


def test_impossible_numbers_change_nothing() -> None:
    work = TrackedWork()
    posts = [Post(work, "plain"), *counted(work)]
    with pytest.raises(FailoverError):
        take_over(posts, {}, came(2))
    with pytest.raises(FailoverError):
        take_over(posts, {}, came(1, imm_data=IMM_DATA + 1))
    assert (work.open, work.taken) == (2, {})


def test_messages_are_sent_again_only_if_they_did_not_arrive() -> None:
    works = [TrackedWork() for _ in range(4)]
    posts = [Post(work, "text", number=number) for work, number in zip(works, (2, 3, 4, 5), strict=True)]
    cancel(works[1])
    assert take_over(posts, {}, Account((), Received(2, ((5, 7),)))) == posts[1:3]
    assert [work.open for work in works] == [0, 1, 1, 0]


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_counts_are_exact_whatever_is_lost(wanted: list[bool], source: random.Random) -> None:
    """All posts of one immediate on one channel after the other; those not wanted are cancelled at some time."""
    works = [TrackedWork() for _ in wanted]
    flying, counts, doomed = counted(*works), 0, [work for work, live in zip(works, wanted, strict=True) if not live]
    for _ in range(12):
        arrived = [post for post in flying if source.random() < 0.4]
        confirmed = [post for post in arrived if source.random() < 0.5]
        unconfirmed = [post for post in flying if post not in confirmed]
        if doomed and source.random() < 0.5:
            flying += cancel(doomed.pop())
        new = [again for post in confirmed for again in resolved(post)]
        counts += sum(post.imm_data is not None for post in arrived)
        told = sum(post.imm_data is not None for post in arrived), sum(post.imm_data is not None for post in confirmed)
        flying = new + take_over(unconfirmed, {IMM_DATA: told[1]}, came(told[0]))
        for post in [post for post in flying if not post.live]:
            flying.remove(post)
            flying += resolved(post)
    while flying:
        post = flying.pop()
        counts += post.imm_data is not None and post.live
        flying += resolved(post)
    assert sum(wanted) <= counts <= len(wanted)
    assert all(work.open == 0 for work, live in zip(works, wanted, strict=True) if live)


def test_a_recovery_says_where_it_stands() -> None:
    (rewrite,) = take_over(counted(TrackedWork()), {}, came(0))
    assert isinstance(rewrite.work, Recovery)
    assert rewrite.work.stage is recovery.Stage.REWRITING
    (missing,) = resolved(rewrite)
    assert missing.work.stage is recovery.Stage.COUNTING
    resolved(missing)
    assert missing.work.stage is recovery.Stage.OVER


@given(st.permutations(range(1, 30)), st.integers(0, 29))
def test_each_message_is_new_once(numbers: list[int], cut: int) -> None:
    taken = MessageNumbers()
    for number in numbers[:cut]:
        assert taken.arrive(number)
        assert not taken.arrive(number)
    mark = taken.mark()
    assert {number for number in range(-1, 40) if number in mark} == set(numbers[:cut])
    assert mark.high == next(number for number in range(30) if number + 1 not in numbers[:cut])
    for number in numbers[cut:]:
        assert taken.arrive(number)
    assert taken.mark() == Received(29, ())


def test_message_numbers_below_one_are_refused() -> None:
    for number in (0, -1):
        with pytest.raises(FailoverError, match="at least 1"):
            MessageNumbers().arrive(number)


def test_more_gaps_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "GAPS_LIMIT", 3)
    taken = MessageNumbers()
    taken.arrive(2)
    taken.arrive(4)
    with pytest.raises(FailoverError, match="missing between messages that arrived"):
        taken.arrive(6)
