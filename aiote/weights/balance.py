"""Distribute bytes among the ranks that can send them, so that the busiest rank sends as little as possible.

All bytes that the same ranks can send form one class: a weight and the set of its `holders`. If classes may be divided
at will, max-flow min-cut gives the least load that the busiest rank can have:

    bound = max over sets X of ranks of    weight of the classes that only X holds / |X|

`shares` reaches this bound, and then continues below it: the ranks of the densest X are done, and the rest is a smaller
problem of the same kind. The result is the most even distribution possible, in whole bytes (each level is rounded up).
Newton's iteration finds X: try a level; if the maximum flow does not carry all weight, the minimum cut names a denser
X, which gives the next level (Dinkelbach, 1967). All arithmetic is on integers, so every rank computes the same result.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence

__all__ = ["place", "shares"]

Holders = tuple[int, ...]
Shares = dict[Holders, dict[int, int]]


def shares(weights: Mapping[Holders, int]) -> Shares:
    """Return how much of each class's weight each of its holders takes; together they take all of it."""
    found: Shares = {holders: dict.fromkeys(holders, 0) for holders in weights}
    for component in _components(weights):
        while component:
            flow, ranks = _densest(component)
            for holders in [holders for holders in component if ranks.issuperset(holders)]:
                _spread(found, component.pop(holders), flow[holders])
            component = _without(component, ranks)
    return found


# The classes, each with its weight, whose holders are the same set after the ranks that are done were removed.
Merged = dict[Holders, int]
Component = dict[Holders, Merged]


def _spread(found: Shares, classes: Merged, flow: Mapping[int, int]) -> None:
    """Divide the flow of a merged class among the classes in it, one class after another."""
    left = dict(flow)
    for holders, weight in classes.items():
        for rank in left:
            taken = min(weight, left[rank])
            left[rank] -= taken
            weight -= taken
            if taken:
                found[holders][rank] = taken


def _without(component: Component, ranks: set[int]) -> Component:
    """Return the classes after removing ranks that are done from their holders."""
    rest: Component = {}
    for holders, classes in component.items():
        left = tuple(rank for rank in holders if rank not in ranks)
        rest.setdefault(left, {}).update(classes)
    return rest


def _components(weights: Mapping[Holders, int]) -> list[Component]:
    """Return the classes in groups, such that no two groups share a rank."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = rank = parent[parent[rank]]
        return rank

    for holders in weights:
        for rank in holders:
            parent[root(rank)] = root(holders[0])
    groups: dict[int, Component] = {}
    for holders in sorted(weights, key=lambda holders: (len(holders), holders)):
        groups.setdefault(root(holders[0]), {})[holders] = {holders: weights[holders]}
    return list(groups.values())


def _densest(component: Component) -> tuple[Shares, set[int]]:
    """Return a flow of the classes, and the densest set of ranks; in the flow, these ranks have an equal load."""
    weights = {holders: sum(classes.values()) for holders, classes in component.items()}
    ranks = {rank for holders in weights for rank in holders}
    dense = ranks
    level = -(-sum(weights.values()) // len(ranks))
    while True:
        flow, reached = _flow(weights, level)
        if reached is None:
            return flow, dense
        dense = reached
        level = -(-sum(weight for holders, weight in weights.items() if dense.issuperset(holders)) // len(dense))


def _flow(weights: Mapping[Holders, int], level: int) -> tuple[Shares, set[int] | None]:
    """Return a flow that gives no rank more than `level`; if it does not carry all weight, also the ranks of the cut.

    The cut is the set of ranks whose `level` is too low for the classes that only they hold.
    """
    room: dict[int, int] = {rank: level for holders in weights for rank in holders}
    flow: Shares = {holders: dict.fromkeys(holders, 0) for holders in weights}
    at: dict[int, list[Holders]] = {rank: [] for rank in room}
    for holders, weight in weights.items():
        for rank in holders:
            at[rank].append(holders)
        left = weight
        # Give each holder an even share first, then whatever fits.
        for most in (-(-weight // len(holders)), weight):
            for rank in holders:
                amount = min(most, left, room[rank])
                flow[holders][rank] += amount
                room[rank] -= amount
                left -= amount
        while left:
            path, reached = _path(holders, flow, at, room)
            if path is None:
                return flow, reached
            left -= _push(path, flow, room, left)
    return flow, None


Step = tuple[Holders, int]


def _path(
    first: Holders, flow: Shares, at: Mapping[int, list[Holders]], room: Mapping[int, int]
) -> tuple[list[Step] | None, set[int]]:
    """Return the shortest path from a class to a rank with room, along flow that can be moved, and all ranks reached.

    The path is None if no rank with room can be reached.
    """
    came: dict[int, tuple[Holders, int | None]] = dict.fromkeys(first, (first, None))
    seen = {first}
    queue = deque(first)
    while queue:
        rank = queue.popleft()
        if room[rank]:
            path: list[Step] = []
            step: int | None = rank
            while step is not None:
                holders, before = came[step]
                path.append((holders, step))
                step = before
            return path[::-1], set(came)
        for holders in at[rank]:
            if holders not in seen and flow[holders][rank]:
                seen.add(holders)
                for other in holders:
                    if other not in came:
                        came[other] = (holders, rank)
                        queue.append(other)
    return None, set(came)


def _push(path: list[Step], flow: Shares, room: dict[int, int], most: int) -> int:
    """Move as much flow as fits along a path, and return it.

    Each class on the path gives up that much at the rank where the flow of the class before it arrives.
    """
    amount = min(most, room[path[-1][1]])
    for (_, rank), (holders, _) in itertools.pairwise(path):
        amount = min(amount, flow[holders][rank])
    before = None
    for holders, rank in path:
        flow[holders][rank] += amount
        if before is not None:
            flow[holders][before] -= amount
        before = rank
    room[path[-1][1]] -= amount
    return amount


Piece = tuple[int, Holders]


def place(pieces: Sequence[Piece], sent: Counter[int]) -> list[int]:
    """Return the holder that takes each piece as a whole, and add the weights to `sent`. A piece is (weight, holders).

    The heaviest piece is placed first, and of equal pieces the one with the fewest holders (longest processing time
    first); each goes to the holder with the least load so far. Then the busiest rank gives pieces away while that
    lowers the maximum. The rank that takes a piece may have to give one of its own away, and so on. For pieces of equal
    weight the result is optimal.
    """
    taken = [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda n: (-pieces[n][0], len(pieces[n][1]), n)):
        weight, holders = pieces[number]
        taken[number] = min(holders, key=lambda rank: (sent[rank], rank))
        sent[taken[number]] += weight
    while moves := _chain(pieces, taken, sent):
        for number, rank in moves:
            sent[taken[number]] -= pieces[number][0]
            sent[rank] += pieces[number][0]
            taken[number] = rank
    return taken


def _chain(pieces: Sequence[Piece], taken: Sequence[int], sent: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return moves of pieces to other ranks, after which these and the busiest rank have less than the latter has now.

    Returns an empty list if there are no such moves.
    """
    if not pieces:
        return []
    busiest = max(set(taken), key=lambda rank: (sent[rank], rank))
    most = sent[busiest]
    mine: dict[int, list[int]] = {}
    for number, rank in enumerate(taken):
        mine.setdefault(rank, []).append(number)
    # Each entry: a rank, its load once a piece has come to it, and the moves that bring the piece there.
    queue: deque[tuple[int, int, list[tuple[int, int]]]] = deque([(busiest, most, [])])
    seen = {busiest}
    while queue:
        rank, load, moves = queue.popleft()
        for number in mine.get(rank, ()):
            weight, holders = pieces[number]
            if load - weight >= most or not weight:
                continue
            for other in holders:
                if other not in seen:
                    chain = [*moves, (number, other)]
                    if sent[other] + weight < most:
                        return chain
                    seen.add(other)
                    queue.append((other, sent[other] + weight, chain))
    return []
