"""The engine's recovery of a dead channel is the twin of `reference.recovery`, which random schedules prove.

Both get the same lost requests, confirmed counts and account of the peer. Either both refuse it, or they post the same
at once and after each end of a post, in whatever order the posts end and transfers are cancelled.
"""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.core.failover import Account, FailoverError
from reference.recovery import Post, Recovery, TrackedWork, cancel, resolved, take_over
from support.checkout import compiled

SOURCE = Path(__file__).parent / "recoveries" / "recoveries.pyx"
IMM_DATA = st.sampled_from([0, 7, 2**28 + 7, 2**32 - 1])
POSTS = st.lists(
    st.one_of(
        st.tuples(IMM_DATA, st.sampled_from([0, 64]), st.booleans()),
        st.tuples(st.none(), st.just(64), st.booleans()),
    ),
    max_size=12,
)
COUNTS = st.dictionaries(IMM_DATA, st.integers(1, 4))
CAME = st.dictionaries(IMM_DATA, st.one_of(st.integers(-4, 4), st.integers(-20, 4)))


@pytest.fixture(scope="module")
def recoveries(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Compile the module against the installed declarations."""
    built = compiled.module(SOURCE, tmp_path_factory.mktemp("recoveries"))
    spec = importlib.util.spec_from_file_location("recoveries", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reference:
    """The same of `reference.recovery`."""

    def __init__(self, posts: list[tuple[int | None, int, bool]], confirmed: dict[int, int], forgettable: int) -> None:
        self.confirmed, self.forgettable = confirmed, forgettable
        self.works = [TrackedWork() for _ in posts]
        self.lost = [
            Post(work, number if length else None, imm_data=imm_data)
            for number, (work, (imm_data, length, _)) in enumerate(zip(self.works, posts, strict=True))
        ]
        self.open: list[Post] = []
        for work, (_, _, cancelled) in zip(self.works, posts, strict=True):
            work.cancelled = cancelled

    def take_over(self, arrived: dict[int, int]) -> bool:
        try:
            self.open = take_over(self.lost, self.confirmed, Account(tuple(arrived.items())), self.forgettable)
        except FailoverError:
            return False
        return True

    @staticmethod
    def named(post: Post) -> tuple[str, int]:
        """A lost request that counts is written again without its count, by its recovery."""
        if isinstance(post.work, Recovery) and post.what is None:
            assert post.imm_data is not None
            return "counts", post.imm_data
        assert isinstance(post.what, int)
        return "bytes", post.what

    def under_way(self) -> list[tuple[str, int]]:
        return sorted(map(self.named, self.open))

    def end(self, name: tuple[str, int]) -> None:
        post = next(post for post in self.open if self.named(post) == name)
        self.open.remove(post)
        self.open += resolved(post)

    def cancel(self, number: int) -> None:
        self.open += cancel(self.works[number])

    def over(self) -> list[int]:
        return [number for number, work in enumerate(self.works) if work.open == 0]


def living(side: Any, cancelled: set[int]) -> list[int]:
    """Return the transfers that are over; a cancelled one may end sooner or later in one of the two."""
    return [number for number in side.over() if number not in cancelled]


@settings(max_examples=400)
@given(posts=POSTS, confirmed=COUNTS, came=CAME, forgets=st.booleans(), ended=st.integers(0, 1), data=st.data())
def test_the_engine_recovers_as_the_reference_does(
    recoveries: ModuleType,
    posts: list[tuple[int | None, int, bool]],
    confirmed: dict[int, int],
    came: dict[int, int],
    forgets: bool,
    ended: int,
    data: st.DataObject,
) -> None:
    arrived = {imm_data: confirmed.get(imm_data, 0) + came.get(imm_data, 0) for imm_data in confirmed | came}
    arrived = {imm_data: times for imm_data, times in arrived.items() if times}
    native = recoveries.Dead(posts, confirmed, ended, forgets)
    reference = Reference(posts, confirmed, ended * recoveries.PARTS if forgets else 0)
    cancelled = {number for number, (_, _, given_up) in enumerate(posts) if given_up}
    with closing(native):
        compare(native, reference, arrived, cancelled, data)


def compare(
    native: Any, reference: Reference, arrived: dict[int, int], cancelled: set[int], data: st.DataObject
) -> None:
    """Recover both; end and cancel requests in a drawn order, until all are over."""
    honest = reference.take_over(arrived)
    assert native.take_over(arrived) == honest
    if not honest:
        return
    count = len(reference.works)
    while True:
        assert native.under_way() == reference.under_way()
        assert living(native, cancelled) == living(reference, cancelled)
        if not reference.open:
            break
        left = sorted({*range(count)} - cancelled)
        if left and data.draw(st.integers(0, 4)) == 0:
            number = data.draw(st.sampled_from(left))
            cancelled.add(number)
            native.cancel(number)
            reference.cancel(number)
        else:
            post = data.draw(st.sampled_from(reference.under_way()))
            native.end(post)
            reference.end(post)
    assert native.over() == reference.over() == [*range(count)]
