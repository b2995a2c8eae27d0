"""Choose the member for a prompt: the prefiller that is expected to have computed it first.

If a member has the first c of a prompt's n tokens in its cache, it must compute n - c tokens for the prompt, after its
*load*: the tokens of earlier prompts that it has not delivered yet. The prompt goes to the member with the least

    load + n - min(c, credit)

and among equals to the member that was chosen least recently. So prompts follow a hot prefix as long as that saves
time, and no longer. While the members stay and no prompt is delivered, these bounds hold for prompts of at most N
tokens (a delivery only lowers a load):

| excess of the chosen member's load over any other member's        | bound    |
|-------------------------------------------------------------------|----------|
| when it is chosen                                                 | `credit` |
| after the prompt was added to its load                            | N        |

**Prefixes.** A prompt is cut into blocks of `page_tokens` tokens. The hash of a block also covers all blocks before it,
so equal hashes mean equal prefixes. The index records for each block the members that were given it most recently. It
is only a belief, because members evict blocks on their own; a member that lost a block computes a little more. The
index holds `prefixes` blocks and `HOLDERS` members per block; it drops the least recently used blocks first.

**Excluded members.** Members that left, members that drain (a true attribute `draining`), and members that failed
within the last `pause` seconds, unless all failed. Stale members come after all others; when the registry cannot be
reached, all members are stale.

This module only computes: it sends no messages, and the caller passes the time. It also routes to decoders, which have
no prefixes.
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
    """No member can be chosen; the message says why."""


def block_hashes(tokens: Sequence[int] | Numbers, page_tokens: int) -> list[bytes]:
    """Return a hash for each whole page of a prompt; it covers the tokens of that page and all tokens before them."""
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
    """The members to ask: the first of `members` and, if it fails, the others in turn.

    `cached_tokens`: the tokens of the prompt that the first is believed to have. `cost`: the tokens added to its load.
    """

    members: tuple[Member, ...]
    cached_tokens: int
    cost: int
    hashes: tuple[bytes, ...] = field(repr=False)


class _Candidate:
    """The state of one run of a member. Its `serial` distinguishes it from earlier runs in the index of prefixes."""

    __slots__ = ("failed", "last", "load", "member", "serial")

    def __init__(self, member: Member, serial: int) -> None:
        self.member = member
        self.serial = serial
        self.load = 0
        self.last = 0
        self.failed = -math.inf


class _Prefixes:
    """The index of prefixes: the runs of members that were given each block. Drops the least recently used blocks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lengths(self, hashes: Sequence[bytes], serials: Iterable[int]) -> dict[int, int]:
        """Return for each run the number of consecutive blocks it has, from the first on; runs with 0 are absent."""
        left = set(serials)
        found: dict[int, int] = {}
        for number, block in enumerate(hashes, 1):
            left.intersection_update(self._blocks.get(block, ()))
            if not left:
                break
            found.update(dict.fromkeys(left, number))
        return found

    def drop(self, hashes: Sequence[bytes], serial: int) -> None:
        """Record that a run was not given these blocks after all."""
        for block in hashes:
            others = tuple(other for other in self._blocks.get(block, ()) if other != serial)
            if others:
                self._blocks[block] = others
            else:
                self._blocks.pop(block, None)

    def put(self, hashes: Sequence[bytes], serial: int) -> None:
        """Record that a run was given these blocks."""
        # Last block first, so that the end of a prompt is dropped first: without its beginning it would be useless.
        for block in reversed(hashes[: self.limit]):
            others = [other for other in self._blocks.get(block, ()) if other != serial]
            self._blocks[block] = (serial, *others[: HOLDERS - 1])
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)


class Router:
    """Chooses members of one role. Pass the registry's members to `see`, call `choose`, and report `delivered`.

    `alternatives`: the number of members in a choice besides the first. `credit`: the most tokens for which a cached
    prefix may count. `prefixes`: the most blocks in the index. `pause`: the seconds for which a failed member is
    excluded. Raises UsageError for bad numbers.
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
        """The number of choices that are not over yet."""
        return len(self._open)

    @property
    def blocks(self) -> int:
        """The number of blocks in the index."""
        return len(self._prefixes)

    @property
    def loads(self) -> dict[str, int]:
        """The tokens that each member was given and has not delivered."""
        return {name: candidate.load for name, candidate in self._candidates.items()}

    def see(self, members: Iterable[Member]) -> None:
        """Record the present members. Forget members that have left, and the earlier run of a restarted member."""
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
        """Choose members for a prompt and add its cost to the first one's load until it is over. Raises NoMember."""
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
        # Now, not on delivery, so that the next prompts of a burst with this prefix find it.
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
        """Record that a choice is over: delivered by one of its members, or (`by` None) by none of them. Idempotent.

        The members asked before that one are excluded for `pause` seconds. They may only be full or draining, so of
        this prompt they are believed to have what they had before the choice; report a member that really failed with
        `failed`. If no member delivered and no member is to blame, call `cancelled` instead.
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
        """Record that a choice is over because a member failed: exclude the member, and forget its cached blocks."""
        self._close(choice)
        candidate = self._note_failure(member, now)
        if candidate is not None:
            self._serial += 1
            candidate.serial = self._serial

    def cancelled(self, choice: Choice) -> None:
        """Record that a choice is not wanted any more, without blaming a member. Idempotent."""
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
        """Remove the blocks that the first member was believed to have only because it was chosen."""
        candidate = self._candidate_of(member)
        if candidate is not None:
            self._prefixes.drop(choice.hashes[choice.cached_tokens // self.page_tokens :], candidate.serial)

    def _note_failure(self, member: Member, now: float) -> _Candidate | None:
        candidate = self._candidate_of(member)
        if candidate is not None:
            candidate.failed = now
        return candidate

    def _candidate_of(self, member: Member) -> _Candidate | None:
        """Return the state of this run of a member, or None if it has left or been replaced."""
        candidate = self._candidates.get(member.name)
        return candidate if candidate is not None and candidate.member.incarnation == member.incarnation else None
