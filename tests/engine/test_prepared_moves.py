"""Layers that are written by one request move what single page writes move, and count the same."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager

import numpy as np
import pytest

import aiote
from aiote.rails import PageIndex
from aiote.transfers import Move, PreparedMoves
from support.engines.opening import pair

PIECE, SIZE, IMM = 16, 4096, 1000


def random_layers(
    rng: random.Random,
) -> tuple[list[list[tuple[int, int, int]]], list[tuple[list[int], list[int]] | None]]:
    """Return the moves of some layers (source offset, target offset, pattern), and the offsets of each pattern."""
    counts = [rng.choice([0, 1, 3, 8]) for _ in range(3)]
    slots = [rng.sample(range(8), count) for count in counts]
    offsets = [
        ([PIECE * slot for slot in rng.sample(range(8), len(there))], [PIECE * slot for slot in there])
        for there in slots
    ]
    layers, places = [], iter(range(0, SIZE, 8 * PIECE))
    for _ in range(rng.randint(1, 6)):
        layers.append([(rng.randrange(0, SIZE // 2, PIECE), next(places), rng.randrange(3)) for _ in range(2)])
    return layers, [pair if pair[0] else None for pair in offsets]


@asynccontextmanager
async def two_memories(provider):
    async with pair(provider) as (left, right):
        source, target = np.arange(SIZE, dtype=np.uint32).astype(np.uint8), np.zeros(SIZE, np.uint8)
        ours, theirs = left.register(source), right.register(target)
        peer = await left.connect(right.address)
        remote = left.attach(theirs.descriptor)
        yield left, right, peer, (source, target), (ours, remote)


def indices(offsets):
    return [None if each is None else (PageIndex(each[0]), PageIndex(each[1])) for each in offsets]


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("provider", ["sim", "local"])
async def test_a_run_of_layers_moves_and_counts_as_page_writes_do(provider, seed):
    rng = random.Random(seed)
    layers, offsets = random_layers(rng)
    async with two_memories(provider) as (_, right, peer, (source, target), (ours, remote)):
        moves = [
            (7 * place, [Move(ours, here, remote, there, pattern, PIECE) for here, there, pattern in layer])
            for place, layer in enumerate(layers)
        ]
        prepared = PreparedMoves.of(peer, moves)
        expected, needs, chosen = np.zeros_like(target), [], list(range(len(layers)))
        for layer in layers:
            needs.append(0)
            for here, there, pattern in layer:
                for near, far in zip(*(offsets[pattern] or ([], [])), strict=True):
                    expected[there + far :][:PIECE] = source[here + near :][:PIECE]
                    needs[-1] += 1
        begin, most = 0, rng.choice([16, 20, 1000])
        with right.counters(IMM, [need for each in needs for need in (each, *[0] * 6)]) as row:
            while begin < len(chosen):
                run = prepared.run(chosen[begin:], indices(offsets), IMM, most)
                assert run.pieces == sum(needs[begin : begin + run.layers]) <= most
                assert run.layers == len(chosen) - begin or run.pieces + needs[begin + run.layers] > most
                begin += run.layers
                await prepared.start(run, None)
            await row.wait(len(row))
        assert (target == expected).all()


@pytest.mark.anyio
async def test_what_needs_a_closer_look_makes_no_run():
    async with two_memories("sim") as (_, _, peer, _, (ours, remote)):
        prepared = PreparedMoves.of(peer, [(0, [Move(ours, 0, remote, SIZE - 64, 0, PIECE)])])
        fits = [(PageIndex([0, PIECE]), PageIndex([0, 48]))]
        assert prepared.run([0], fits, IMM, 2).pieces == 2
        assert prepared.run([0], [(PageIndex([0, PIECE]), PageIndex([0, 49]))], IMM, 2) is None
        assert prepared.run([0], [(PageIndex([-1]), PageIndex([0]))], IMM, 2) is None
        assert prepared.run([0], [(PageIndex([SIZE]), PageIndex([0]))], IMM, 2) is None
        assert prepared.run([0], [(PageIndex([0]), PageIndex([0, 1]))], IMM, 2) is None
        assert prepared.run([0], fits, IMM, 1) is None
        assert prepared.run([0], fits, 1 << 28, 2) is None
        link = peer._connection.link
        link.unfinished += link.limit - 1
        assert prepared.run([0], fits, IMM, 4).layers == 1
        assert prepared.run([0, 0], fits, IMM, 4) is None
        link.unfinished -= link.limit - 1
        run = prepared.run([0], fits, IMM, 2)
        await ours.aclose()
        assert prepared.run([0], fits, IMM, 2) is None
        with pytest.raises(aiote.ClosedError):
            prepared.start(run, None)


@pytest.mark.anyio
async def test_memory_that_cannot_be_written_at_once_is_not_prepared():
    async with two_memories("sim") as (left, right, peer, _, (ours, _)):
        readable = left.attach(right.register(np.zeros(SIZE, np.uint8), "read").descriptor)
        assert PreparedMoves.of(peer, [(0, [Move(ours, 0, readable, 0, 0, PIECE)])]) is None
        assert PreparedMoves.of(peer, [(0, [])]) is None
        async with right.register(np.zeros(SIZE, np.uint8)).lease(slice(0, SIZE), left.address) as lease:
            lent = left.attach(lease.descriptor)
            assert PreparedMoves.of(peer, [(0, [Move(ours, 0, lent, 0, 0, PIECE)])]) is None
