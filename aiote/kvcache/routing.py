"""Which prefiller gets a prompt: the one that will have computed it first, as far as can be told.

A prompt of n tokens, of which a member has the first c in its cache, costs it n - c more, and waits for its *load*:
what it was given before and has not delivered yet. The prompt goes to the member for which

    load + n - min(c, credit)

is least; among equals, to the one that was given something least recently. So a hot prefix keeps its place as long as
that is worth it, and no longer. With members that stay, and prompts of at most N tokens, at any moment

| between any two members                                           | bound    |
|-------------------------------------------------------------------|----------|
| the load of the chosen one may be above another's, when chosen    | `credit` |
| and once the prompt is on it                                      | N        |

as long as nothing is delivered: deliveries only take away.

**Prefixes.** A prompt is cut in blocks of a page's tokens; the hash of a block covers all blocks before it as well, so
equal hashes mean equal prefixes. The index says of a block which members were given it last. It is a belief: members
forget by themselves, and who was wrong computes a little more. The index holds `prefixes` blocks, least recently used
ones go first, and `HOLDERS` members for each.

**Who is left out.** Members that left, that drain (an attribute `draining` that is true) and those that failed within
the last `pause` seconds, unless all failed. Members that are stale come after all that are not: where the registry is
out of touch, all are.

This module computes: it sends nothing, and is told the time. It routes to decoders as well, which have no prefixes.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import aiote

from ..core.masked_arrays import require_unmasked
from ..core.paging import integer
from ..discovery import Member

__all__ = ["Choice", "NoMember", "Router", "block_hashes"]

Numbers: TypeAlias = NDArray[np.uint32]

HOLDERS = 8
HASH_BYTES = 16


class NoMember(aiote.AioteError):
    """There is nobody who could be asked; the message says who was left out, and why."""


def block_hashes(tokens: Sequence[int] | Numbers, page_tokens: int) -> list[bytes]:
    """Return a hash for each whole page of a prompt, which covers that page's tokens and all before them."""
    size = integer("page_tokens", page_tokens, 1) * 4
    require_unmasked("block_hashes: tokens", tokens)
    data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    chain = hashlib.blake2b(digest_size=HASH_BYTES)
    out = []
    for start in range(0, len(data) - size + 1, size):
        chain.update(data[start : start + size])
        out.append(chain.digest())
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Who is to be asked: the first of `members`, and where it fails the others in turn.

    `cached_tokens`: how many of the prompt the first is believed to have. `cost`: the tokens that it was charged for.
    """

    members: tuple[Member, ...]
    cached_tokens: int
    cost: int
    hashes: tuple[bytes, ...] = field(repr=False)


class _Candidate:
    """What is known of one run of a member. `serial` tells it from earlier runs in the index of prefixes."""

    __slots__ = ("failed", "last", "load", "member", "serial")

    def __init__(self, member: Member, serial: int) -> None:
        self.member = member
        self.serial = serial
        self.load = 0
        self.last = 0
        self.failed = -math.inf


class _Prefixes:
    """Which runs of members were given which blocks; the least recently used blocks are forgotten first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lengths(self, hashes: Sequence[bytes], serials: Iterable[int]) -> dict[int, int]:
        """Return of each run how many blocks in a row it has, from the first one on; 0 is left out."""
        left = set(serials)
        found: dict[int, int] = {}
        for number, block in enumerate(hashes, 1):
            left.intersection_update(self._blocks.get(block, ()))
            if not left:
                break
            found.update(dict.fromkeys(left, number))
        return found

    def drop(self, hashes: Sequence[bytes], serial: int) -> None:
        """Take note that a run was not given these blocks after all."""
        for block in hashes:
            others = tuple(other for other in self._blocks.get(block, ()) if other != serial)
            if others:
                self._blocks[block] = others
            else:
                self._blocks.pop(block, None)

    def put(self, hashes: Sequence[bytes], serial: int) -> None:
        """Take note that a run was given these blocks."""
        # Last block first, so that what is forgotten first is the end of a prompt: without its beginning it is no use.
        for block in reversed(hashes[: self.limit]):
            others = [other for other in self._blocks.get(block, ()) if other != serial]
            self._blocks[block] = (serial, *others[: HOLDERS - 1])
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)


class Router:
    """Choose members of one role; `see` the registry's members, `choose`, and say when a choice is `delivered`.

    `alternatives` is how many are named besides the first. `credit` is the most tokens for which a cached prefix may
    count, `prefixes` the most blocks that are remembered, `pause` how many seconds one that failed sits out.
    Raises UsageError for bad numbers.
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        role: str = "prefill",
        alternatives: int = 2,
        credit: int = 4096,
        prefixes: int = 1 << 16,
        pause: float = 2.0,
    ) -> None:
        self.page_tokens = integer("page_tokens", page_tokens, 1)
        self.role = role
        self._alternatives = integer("alternatives", alternatives, 0)
        self._credit = integer("credit", credit, 0)
        self._prefixes = _Prefixes(integer("prefixes", prefixes, 1))
        self._pause = pause
        self._candidates: dict[str, _Candidate] = {}
        self._open: dict[Choice, _Candidate] = {}
        self._serial = 0
        self._turn = 0

    @property
    def open(self) -> int:
        """How many choices are not delivered yet."""
        return len(self._open)

    @property
    def blocks(self) -> int:
        """How many blocks are remembered."""
        return len(self._prefixes)

    @property
    def loads(self) -> dict[str, int]:
        """The tokens that each member was given and has not delivered."""
        return {name: candidate.load for name, candidate in self._candidates.items()}

    def see(self, members: Iterable[Member]) -> None:
        """Take the members as they are now; those that are not among them have left, and so has an earlier run."""
        here = {member.name: member for member in members if member.role == self.role}
        for name in self._candidates.keys() - here.keys():
            del self._candidates[name]
        for name, member in here.items():
            candidate = self._candidates.get(name)
            if candidate is None or candidate.member.incarnation != member.incarnation:
                self._candidates[name] = self._make_candidate(member)
            else:
                candidate.member = member

    def _make_candidate(self, member: Member) -> _Candidate:
        self._serial += 1
        return _Candidate(member, self._serial)

    def choose(self, tokens: Sequence[int] | Numbers, now: float) -> Choice:
        """Choose for a prompt, and charge the first for it until `delivered`. Raises NoMember."""
        there = self._there(now)
        hashes = block_hashes(tokens, self.page_tokens)
        blocks = self._prefixes.lengths(hashes, (candidate.serial for candidate in there))
        cached = {candidate: blocks.get(candidate.serial, 0) * self.page_tokens for candidate in there}

        def score(candidate: _Candidate) -> tuple[bool, int, int]:
            return candidate.member.stale, candidate.load - min(cached[candidate], self._credit), candidate.last

        order = sorted(there, key=score)[: 1 + self._alternatives]
        first = order[0]
        cost = max(len(tokens) - cached[first], 1)
        choice = Choice(tuple(candidate.member for candidate in order), cached[first], cost, tuple(hashes))
        self._turn += 1
        first.last = self._turn
        first.load += cost
        self._open[choice] = first
        # At once, not when it is delivered: the next of a burst with this prefix is to find it.
        self._prefixes.put(choice.hashes, first.serial)
        return choice

    def _there(self, now: float) -> list[_Candidate]:
        working = [
            candidate for candidate in self._candidates.values() if not candidate.member.attributes.get("draining")
        ]
        there = [candidate for candidate in working if now - candidate.failed >= self._pause] or working
        if not there:
            why = f"all {len(self._candidates)} are draining" if self._candidates else "none is known"
            raise NoMember(f"no member for {self.role}: {why}")
        return there

    def delivered(self, choice: Choice, by: Member | None, now: float) -> None:
        """Take note that a choice is over: delivered by one of its members, or by nobody. Idempotent.

        Those that were asked before that one sit out. They may merely be full, or draining, so of this prompt they are
        believed to have what they had before, and no more; of what has failed in earnest say `failed`. Where nobody
        delivered and that is no member's fault, say `cancelled`.
        """
        if not self._close(choice):
            return
        for member in choice.members:
            if by is not None and member.name == by.name:
                self._believe(choice, member)
                return
            self._note_failure(member, now)
            if member is choice.members[0]:
                self._disbelieve(choice, member)

    def failed(self, choice: Choice, member: Member, now: float) -> None:
        """Take note that a choice is over, for one member failed: it sits out, and what it had cached is forgotten."""
        self._close(choice)
        candidate = self._note_failure(member, now)
        if candidate is not None:
            self._serial += 1
            candidate.serial = self._serial

    def cancelled(self, choice: Choice) -> None:
        """Take note that a choice is not wanted any more, which is nobody's fault. Idempotent."""
        self._close(choice)

    def _close(self, choice: Choice) -> bool:
        candidate = self._open.pop(choice, None)
        if candidate is not None:
            candidate.load -= choice.cost
        return candidate is not None

    def _believe(self, choice: Choice, member: Member) -> None:
        candidate = self._candidate_of(member)
        if candidate is not None:
            self._prefixes.put(choice.hashes, candidate.serial)

    def _disbelieve(self, choice: Choice, member: Member) -> None:
        """Take back what was believed of the first member because it was chosen."""
        candidate = self._candidate_of(member)
        if candidate is not None:
            self._prefixes.drop(choice.hashes[choice.cached_tokens // self.page_tokens :], candidate.serial)

    def _note_failure(self, member: Member, now: float) -> _Candidate | None:
        candidate = self._candidate_of(member)
        if candidate is not None:
            candidate.failed = now
        return candidate

    def _candidate_of(self, member: Member) -> _Candidate | None:
        """Return what is known of this run of a member."""
        candidate = self._candidates.get(member.name)
        return candidate if candidate is not None and candidate.member.incarnation == member.incarnation else None
