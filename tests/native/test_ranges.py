"""Which peer counts on which immediate, against sets of Python."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiote_native.counters.table import RangeTable

numbers, peers = st.integers(0, 31), st.integers(0, 31)
VALUES = 400


class Ranges(RuleBasedStateMachine):
    """Blocks come and go, peers are allowed and lost."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RangeTable()
        self.blocks: dict[int, tuple[range, set[int]]] = {}

    @rule(number=numbers, first=st.integers(0, VALUES), count=st.integers(1, 60))
    def add(self, number: int, first: int, count: int) -> None:
        taken = any(first < block.stop and block.start < first + count for block, _ in self.blocks.values())
        if number not in self.blocks and not taken:
            self.table.add(number, first, count)
            self.blocks[number] = range(first, first + count), set()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.blocks)))
        self.table.remove(number)
        del self.blocks[number]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), peer=peers)
    def allow(self, data: st.DataObject, peer: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.blocks)))
        self.table.allow(number, peer)
        self.blocks[number][1].add(peer)

    @rule(peer=peers)
    def lose(self, peer: int) -> None:
        self.table.orphan(peer)
        for _, allowed in self.blocks.values():
            allowed.discard(peer)

    @invariant()
    def agree(self) -> None:
        edges = {0, VALUES + 99, *(edge for block, _ in self.blocks.values() for edge in (block.start, block.stop))}
        for imm in {edge + by for edge in edges for by in (-1, 0) if edge + by >= 0}:
            allowed = next((allowed for block, allowed in self.blocks.values() if imm in block), None)
            for peer in range(0, 32, 5):
                wanted = allowed is None or peer in allowed
                # What says of how many stripes a write is made of is no part of the value.
                assert self.table.may_count(imm | 3 << 28, peer) is wanted


TestRanges = Ranges.TestCase
