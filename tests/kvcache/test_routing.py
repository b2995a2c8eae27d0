"""Routing: never to one who left or drains, never far out of balance, and never more memory than was said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import aiote
from aiote.discovery import Member
from aiote.kvcache import NoMember, Router, block_hashes
from aiote.kvcache.routing import HOLDERS

PAGE = 4
LONGEST = 40
CREDIT = 16
PREFIXES = 12
PAUSE = 2.0


def member(name: str, incarnation: int = 1, role: str = "prefill", stale: bool = False, **attributes) -> Member:
    return Member(name, role, b"", incarnation, attributes, stale)


def router_of(*names: str, **settings) -> Router:
    router = Router(PAGE, **settings)
    router.see(member(name) for name in names)
    return router


def prompt(first: int, count: int) -> list[int]:
    return [first] * count


prompts = st.builds(prompt, st.integers(0, 3), st.integers(1, LONGEST))


class Routing(RuleBasedStateMachine):
    """A router beside what it ought to know, kept naively."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(PAGE, alternatives=2, credit=CREDIT, prefixes=PREFIXES, pause=PAUSE)
        self.here: dict[str, Member] = {}
        self.open: list[tuple[object, tuple[str, int]]] = []
        self.failed: dict[tuple[str, int], float] = {}
        self.now = 0.0
        self.incarnation = 0

    def see(self) -> None:
        decoder = member("decoder", role="decode")
        self.router.see([*self.here.values(), decoder])

    @rule(name=st.sampled_from("abcdef"), again=st.booleans())
    def join(self, name, again):
        if again or name not in self.here:
            self.incarnation += 1
            self.here[name] = member(name, self.incarnation)
            self.see()

    @rule(name=st.sampled_from("abcdef"))
    def leave(self, name):
        self.here.pop(name, None)
        self.see()

    @rule(name=st.sampled_from("abcdef"), stale=st.booleans(), draining=st.booleans())
    def change(self, name, stale, draining):
        if name in self.here:
            self.here[name] = member(name, self.here[name].incarnation, stale=stale, draining=draining)
            self.see()

    @rule(seconds=st.floats(0, 3))
    def later(self, seconds):
        self.now += seconds

    def sits_out(self, one: Member) -> bool:
        return self.now - self.failed.get((one.name, one.incarnation), -99) < PAUSE

    @rule(tokens=prompts)
    def choose(self, tokens):
        working = {name: one for name, one in self.here.items() if not one.attributes.get("draining")}
        before = self.router.loads
        if not working:
            with pytest.raises(NoMember):
                self.router.choose(tokens, self.now)
            return
        choice = self.router.choose(tokens, self.now)
        names = [one.name for one in choice.members]
        assert len(set(names)) == len(names) <= 3
        assert all(working[one.name] == one and working[one.name].stale == one.stale for one in choice.members)
        fit = [one for one in working.values() if not self.sits_out(one)] or list(working.values())
        assert {one.name for one in choice.members} <= {one.name for one in fit}
        best = [one.name for one in fit if not one.stale] or [one.name for one in fit]
        assert names[0] in best
        assert before[names[0]] - min(before[name] for name in best) <= CREDIT
        assert 0 <= choice.cached_tokens <= len(tokens)
        assert choice.cost == max(len(tokens) - choice.cached_tokens, 1)
        self.open.append((choice, (names[0], choice.members[0].incarnation)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        choice, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        by = data.draw(st.sampled_from([None, *choice.members, "cancelled", "failed"]))
        if by == "cancelled":
            self.router.cancelled(choice)
            return
        if by == "failed":
            failed = [data.draw(st.sampled_from(choice.members))]
            self.router.failed(choice, failed[0], self.now)
        else:
            failed = choice.members[: choice.members.index(by)] if by else choice.members
            self.router.delivered(choice, by, self.now)
            self.router.delivered(choice, None, self.now + 1)  # once only
        self.failed.update({(one.name, one.incarnation): self.now for one in failed})

    @invariant()
    def loads_are_what_is_open(self):
        wanted = dict.fromkeys(self.here, 0)
        for choice, (name, incarnation) in self.open:
            if name in wanted and self.here[name].incarnation == incarnation:
                wanted[name] += choice.cost
        assert self.router.loads == wanted
        assert self.router.open == len(self.open)

    @invariant()
    def memory_is_bounded(self):
        assert self.router.blocks <= PREFIXES
        assert all(len(serials) <= HOLDERS for serials in self.router._prefixes._blocks.values())


TestRouting = Routing.TestCase


@given(st.lists(prompts, max_size=60), st.integers(1, 5), st.integers(0, 64))
def test_loads_of_members_that_stay_differ_by_one_prompt_at_most(drawn, count, credit):
    """With members that stay, and no deliveries, loads differ by one prompt at most."""
    router = router_of(*"abcde"[:count], credit=credit)
    for tokens in drawn:
        router.choose(tokens, 0.0)
        loads = router.loads.values()
        assert max(loads) - min(loads) <= max(LONGEST, 1)


def test_a_hot_prefix_does_not_overload_its_member():
    router = router_of("a", "b", credit=16)
    hot = prompt(1, 32)
    first = router.choose([*hot, 2], 0.0)
    router.delivered(first, first.members[0], 0.0)
    chosen = [router.choose([*hot, number], 0.0).members[0].name for number in range(200)]
    assert chosen[0] == first.members[0].name
    assert 60 <= chosen.count("a") <= 140


def test_a_prompt_goes_to_the_member_that_has_its_prefix():
    router = router_of("a", "b", "c")
    first = router.choose(prompt(1, 16), 0.0)
    router.delivered(first, first.members[0], 0.0)
    for length in (16, 19, 24):
        again = router.choose(prompt(1, length), 0.0)
        assert again.members[0] == first.members[0]
        assert again.cached_tokens >= 16
        router.delivered(again, again.members[0], 0.0)
    other = router.choose(prompt(2, 16), 0.0)
    assert (other.members[0] == first.members[0], other.cached_tokens) == (False, 0)


def test_a_member_that_failed_or_came_anew_has_no_prefix():
    router = router_of("a", pause=PAUSE)
    choice = router.choose(prompt(1, 16), 0.0)
    router.delivered(choice, None, 0.0)
    assert router.choose(prompt(1, 16), 0.0).cached_tokens == 0  # all failed, so it is asked all the same
    assert router.choose(prompt(1, 16), 0.0).cached_tokens == 16
    router.see([member("a", 2)])
    assert router.choose(prompt(1, 16), 0.0).cached_tokens == 0


def test_a_member_that_refuses_keeps_its_other_prefixes():
    """It was full, or draining: what it has computed is there, and the prompt that it refused is not."""
    router = router_of("a", "b", pause=PAUSE)
    first = router.choose(prompt(1, 16), 0.0)
    router.delivered(first, first.members[0], 0.0)
    longer = router.choose(prompt(1, 32), 0.0)
    assert (longer.members[0], longer.cached_tokens) == (first.members[0], 16)
    router.delivered(longer, longer.members[1], 0.0)
    other = router.choose(prompt(2, 16), PAUSE)
    router.delivered(other, None, PAUSE)
    router.see([first.members[0]])  # the one that delivered the longer one has left
    assert router.choose(prompt(1, 32), 2 * PAUSE).cached_tokens == 16
    assert router.choose(prompt(2, 16), 2 * PAUSE).cached_tokens == 0


def test_stale_members_come_last():
    router = Router(PAGE)
    router.see([member("a", stale=True), member("b")])
    for _ in range(5):
        choice = router.choose(prompt(1, 16), 0.0)
        assert [one.name for one in choice.members] == ["b", "a"]
    router.see([member("a", stale=True), member("b", stale=True)])
    assert len(router.choose(prompt(1, 16), 0.0).members) == 2


def test_choosing_without_a_member_fails_with_the_reason():
    router = Router(PAGE)
    with pytest.raises(NoMember, match="no member for prefill: none is known"):
        router.choose([1], 0.0)
    router.see([member("a", draining=True), member("b", role="decode")])
    with pytest.raises(NoMember, match="all 1 are draining"):
        router.choose([1], 0.0)


@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24))
def test_hashes_are_equal_where_prefixes_are(one, other):
    hashes = block_hashes(one, PAGE), block_hashes(np.asarray(other, np.uint32), PAGE)
    assert [len(found) for found in hashes] == [len(one) // PAGE, len(other) // PAGE]
    for number, pair in enumerate(zip(*hashes, strict=False), 1):
        assert (pair[0] == pair[1]) == (one[: number * PAGE] == other[: number * PAGE])


@pytest.mark.parametrize("wrong", [{"page_tokens": 0}, {"alternatives": -1}, {"credit": 1.5}, {"prefixes": 0}])
def test_wrong_settings_of_a_router_are_refused_by_name(wrong):
    with pytest.raises(aiote.UsageError, match=next(iter(wrong))):
        Router(**{"page_tokens": PAGE, **wrong})
