"""A rank of the same host that lies about its mapping, rewrites what was checked, counts too much, or stores late."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup, round
from aiote.moe.config import Sizes
from aiote.moe.memory import RankMemory
from aiote.moe.posting import OutboxWrite
from aiote.moe.wire import ANSWER, PAYLOAD, Route, route_bytes, slot_of
from support.engines.opening import opened, until
from support.moe.ranks import Tokens, all_of, check_rows, compute, ranks, reference, whole_round
from support.moe.sharing import pairs_mapped

CONFIG = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, rows=36, placement="direct")
HONEST, LIAR = range(2)
RNG = np.random.default_rng(46)
each_placement = pytest.mark.parametrize("placement", ["direct", "packed"])


def local() -> Any:
    """Open an engine."""
    return opened("local")


def given(config: MoeConfig = CONFIG) -> list[Tokens]:
    """Return tokens of two ranks, of which each has rows for both."""
    made = [Tokens(RNG, config, 6, wild=False) for _ in range(2)]
    for one in made:
        one.ids[:, 0] = np.arange(6)
        one.ids[:, 1] = (one.ids[:, 0] + 1) % 6
    return made


async def one_round(group: MoeGroup, tokens: list[Tokens]) -> None:
    """Make one rank's part of a round, which is right."""
    own = tokens[group.rank]
    batch = await group.dispatch(own.x, own.ids, own.weights)
    check_rows(group, batch, tokens)
    out = await group.combine(batch, compute(group, batch))
    assert out.tobytes() == reference(group.config, own).tobytes()


async def liar_round(group: MoeGroup, tokens: list[Tokens]) -> None:
    """Make the liar's part, however it ends."""
    with suppress(GroupBrokenError, aiote.PeerError, aiote.TransferError):
        own = tokens[group.rank]
        batch = await group.dispatch(own.x, own.ids, own.weights)
        await group.combine(batch, compute(group, batch))


async def test_a_rank_that_claims_memory_that_was_not_shared_with_it_is_named():
    async with ranks(local, 2, replace(CONFIG, shared_memory="off")) as groups:
        groups[LIAR].mapped_inboxes.rank_bits |= 3
        tokens = given()

        async def honest() -> None:
            with pytest.raises(aiote.PeerError, match="rank 1: it claims to write to memory that was not shared"):
                await one_round(groups[HONEST], tokens)

        await all_of(honest, lambda: liar_round(groups[LIAR], tokens))


class Changing(np.ndarray):
    """Memory that its owner changes as soon as something was read from it."""

    def _spoil(self, found: Any) -> Any:
        held = np.array(found, copy=True).view(np.ndarray)
        self.view(np.ndarray)[...] = 0xFFFFFFFF
        return held

    def __getitem__(self, which: Any) -> Any:
        return self._spoil(self.view(np.ndarray)[which])

    def copy(self, order: Any = "C") -> Any:
        """Return what is there, and change it."""
        return self._spoil(self.view(np.ndarray))


def test_a_route_is_read_once():
    sizes = Sizes(CONFIG, 2)
    words = np.zeros(route_bytes(sizes) // 4, np.uint32)
    experts, copies, bits = np.array([1, 0, 2, 0, 3, 0]), np.array([2, 2]), np.array([2], np.uint32)
    Route(1, 4, 6, experts, copies, bits).write(words)
    memory = words.view(Changing)
    found = Route.read(memory, sizes, 1, 4)
    assert (words == 0xFFFFFFFF).all(), "it was changed after the first read"
    assert (found.tokens, found.experts.tolist(), found.copies.tolist()) == (6, experts.tolist(), [2, 2])
    assert (found.maps(0), found.maps(1)) == (False, True)


@each_placement
async def test_a_rank_that_rewrites_its_route_after_the_check_changes_nothing(placement, monkeypatch):
    config = replace(CONFIG, placement=placement)
    async with ranks(local, 2, config) as groups:
        assert pairs_mapped(groups) == [[1], [0]]
        mapped = groups[LIAR].mapped_inboxes.lanes[0][HONEST]

        class Rewritten(Route):
            @classmethod
            def read(cls, *given: Any) -> Route:
                found = Route.read(*given)
                mapped.routes[:, LIAR] = RNG.integers(0, 1 << 32, mapped.routes[:, LIAR].shape, np.uint32)
                return found

        monkeypatch.setattr(round, "Route", Rewritten)
        for _ in range(3):
            tokens = given(config)
            await all_of(*[lambda g=g, t=tokens: one_round(g, t) for g in groups])


async def test_a_rank_that_rewrites_the_experts_of_its_copies_after_the_check_spoils_its_own_rows(monkeypatch):
    """Results go where the checked ids said, and every sum of others' rows is right."""
    config = MoeConfig(
        experts=6, top_k=2, hidden=8, tokens=6, rows=36, copies="rank", reduce="expert", dtype="float32",
        out_dtype="float32",
    )  # fmt: skip
    async with ranks(local, 2, config) as groups:
        sizes, mapped = groups[LIAR].sizes, groups[LIAR].mapped_inboxes.lanes[0][HONEST]
        unfold = round.unfold

        def rewritten(memory: Any, plan: Any, source: int, rows: Any, nbytes: int) -> bool:
            fits = unfold(memory, plan, source, rows, nbytes)
            if plan.me == HONEST and source == LIAR:
                mapped.received[LIAR * sizes.private :, sizes.ids_at : sizes.weights_at] = 0x7F
            return fits

        monkeypatch.setattr(round, "unfold", rewritten)
        tokens = given(config)
        for one in tokens:
            one.weights[...] = 1

        async def one(group: MoeGroup) -> None:
            own = tokens[group.rank]
            batch = await group.dispatch(own.x, own.ids, own.weights)
            assert (batch.source[..., 2] >= -1).all()
            out = await group.combine(batch, compute(group, batch))
            assert np.allclose(out, reference(config, own), rtol=1e-4, atol=1e-4)

        await all_of(*[lambda g=g: one(g) for g in groups])


@each_placement
@pytest.mark.parametrize("kind", [PAYLOAD, ANSWER])
async def test_a_rank_that_counts_too_much_breaks_the_round(placement, kind):
    config = replace(CONFIG, placement=placement)
    async with ranks(local, 2, config) as groups:
        await whole_round(groups, given(config))
        posting, slot = groups[LIAR].posting, slot_of(0, kind, 1)
        assert posting is not None
        extra = posting.post_writes([OutboxWrite(HONEST, 0, 0, 0)] * 2, slot)
        tokens = given(config)

        async def honest() -> None:
            with pytest.raises(GroupBrokenError, match="more writes of round 1 came than the ranks owe"):
                await one_round(groups[HONEST], tokens)

        await all_of(honest, lambda: liar_round(groups[LIAR], tokens))
        for _, transfer in extra:
            await transfer


async def test_a_rank_that_describes_memory_of_another_length_is_written_to_over_rails(monkeypatch):
    """So is one whose descriptor is of nothing, or of another engine's memory."""
    lies: list[bytes] = []
    describe = RankMemory.describe

    async def lying(memory: RankMemory, rank: int, peer: aiote.Peer) -> bytes:
        told = await describe(memory, rank, peer)
        return lies[0] if lies and rank == HONEST else told

    monkeypatch.setattr(RankMemory, "describe", lying)
    async with ranks(local, 2, CONFIG) as groups:
        honest, liar = (group.engine for group in groups)
        for nbytes in (1, groups[0].memory.map.inbox - 1, groups[0].memory.map.inbox + 4096):
            lies[:] = [(await liar.share_memory(nbytes, [honest.address])).descriptor]
            await all_of(*[group.reset for group in groups])
            assert pairs_mapped(groups) == [[], [0]]
            await whole_round(groups, given())
        for lie in (b"x", groups[HONEST].memory._shared.descriptor, bytes(4096)):
            lies[:] = [lie]
            await all_of(*[group.reset for group in groups])
            assert pairs_mapped(groups) == [[], [0]]
            await whole_round(groups, given())


MASK = replace(CONFIG, placement="packed", on_loss="mask", rows=None)


def lines_of(inbox: Any) -> list[Any]:
    """Return all that a rank may write to in what it has mapped."""
    return [inbox.received, inbox.answers, *([inbox.routes] if hasattr(inbox, "routes") else [])]


async def test_a_rank_that_scribbles_over_its_slots_spoils_rows_of_its_own_alone():
    """It does so in every turn of the loop, before and after its rows are counted; nobody is masked for it."""
    async with ranks(local, 3, MASK) as groups:
        assert pairs_mapped(groups) == [[1, 2], [0, 2], [0, 1]]
        liar, honest = groups[LIAR], [groups[0], groups[2]]
        stop = anyio.Event()

        async def scribbles() -> None:
            while not stop.is_set():
                for inbox in liar.mapped_inboxes.lanes[0].values():
                    for lines in lines_of(inbox):
                        lines[...] = RNG.integers(0, 256, lines.shape, np.uint8)
                await anyio.sleep(0)

        async def one(group: MoeGroup, tokens: list[Tokens]) -> None:
            own = tokens[group.rank]
            batch = await group.dispatch(own.x, own.ids, own.weights)
            y = np.zeros(batch.y.shape, batch.y.dtype)
            for expert, count in enumerate(batch.expert_num_tokens.tolist()):
                for line in range(count):
                    source, token, _ = batch.source[expert, line].tolist()
                    if source != LIAR:
                        assert batch.x[expert, line].tobytes() == tokens[source].x[token].tobytes()
            compute(group, batch, y)
            out = await group.combine(batch, y)
            assert group.active.all()
            if group is not liar:
                assert out.tobytes() == reference(MASK, own).tobytes()

        async def rounds() -> None:
            for _ in range(4):
                tokens = [Tokens(RNG, MASK, 6, wild=False) for _ in groups]
                for each in tokens:
                    # The experts of the liar answer nobody: its answers are what it likes, too.
                    each.ids[...] = [[0, 5], [1, 4], [4, 0], [5, 1], [0, 4], [1, 5]]
                await all_of(*[lambda g=g, t=tokens: one(g, t) for g in (*honest, liar)])
            stop.set()

        await all_of(scribbles, rounds)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, placement="packed"), MASK])
async def test_a_rank_that_stores_for_ever_after_it_was_replaced_meets_nobody(config):
    """As one that was stopped in the middle of a copy, and goes on when another has taken its place."""
    async with ranks(local, 2, config) as groups:
        await whole_round(groups, given(config))
        mapped = groups[LIAR].mapped_inboxes.lanes[0][HONEST]
        members = [group.engine.address for group in groups]
        groups[LIAR].engine.abort()
        if config.on_loss == "mask":
            await until(lambda: not groups[HONEST].active[LIAR])
        await groups.start(members, LIAR)
        assert pairs_mapped(groups) == [[1], [0]]
        stop = anyio.Event()

        async def stores() -> None:
            while not stop.is_set():
                for lines in lines_of(mapped):
                    lines[...] = RNG.integers(0, 256)
                await anyio.sleep(0)

        async def makes() -> None:
            for _ in range(3):
                await whole_round(groups, given(config))
            stop.set()

        await all_of(stores, makes)
