"""Sharing out bytes among the ranks that could send them, so that the busiest rank sends as little as possible.

What can be sent by the same ranks is one class: a weight and the set of its `holders`. If it may be divided at will,
the least that the busiest rank can have is given by max-flow min-cut,

    bound = max over sets X of ranks of    weight of the classes that only X holds / |X|

`shares` reaches it, and goes on below it: the ranks of the densest X are done, the rest is a smaller problem of the
same kind. The result is the most even distribution there is, in whole bytes (each level is rounded up). X is found by
Newton's iteration: try a level; where a maximum flow does not fit, the cut names a denser X, which gives the next
level (Dinkelbach, 1967). All arithmetic is on integers, so every rank computes the same.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence

__all__ = ["place", "shares"]

Holders = tuple[int, ...]
Shares = dict[Holders, dict[int, int]]


def shares(weights: Mapping[Holders, int]) -> Shares:
    """Return how much of each class's weight each of its holders takes; nothing is left over."""
    found: Shares = {holders: dict.fromkeys(holders, 0) for holders in weights}
    for component in _components(weights):
        while component:
            flow, ranks = _densest(component)
            for holders in [holders for holders in component if ranks.issuperset(holders)]:
                _spread(found, component.pop(holders), flow[holders])
            component = _without(component, ranks)
    return found


# A class whose set of holders has shrunk: several classes may then have the same one, each with its weight.
Merged = dict[Holders, int]
Component = dict[Holders, Merged]


def _spread(found: Shares, classes: Merged, flow: Mapping[int, int]) -> None:
    """Give the flow of one merged class to the classes in it, one after another."""
    left = dict(flow)
    for holders, weight in classes.items():
        for rank in left:
            taken = min(weight, left[rank])
            left[rank] -= taken
            weight -= taken
            if taken:
                found[holders][rank] = taken


def _without(component: Component, ranks: set[int]) -> Component:
    """Return the classes with the holders that are not done."""
    rest: Component = {}
    for holders, classes in component.items():
        left = tuple(rank for rank in holders if rank not in ranks)
        rest.setdefault(left, {}).update(classes)
    return rest


def _components(weights: Mapping[Holders, int]) -> list[Component]:
    """Return the classes by groups that share no rank."""
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
    """Return a flow of the classes, and the ranks of the densest set, on which it is level."""
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
    """Return a flow in which no rank has more than `level`, or the ranks of the cut that forbids one."""
    room: dict[int, int] = {rank: level for holders in weights for rank in holders}
    flow: Shares = {holders: dict.fromkeys(holders, 0) for holders in weights}
    at: dict[int, list[Holders]] = {rank: [] for rank in room}
    for holders, weight in weights.items():
        for rank in holders:
            at[rank].append(holders)
        left = weight
        # First an even share for each, then whatever fits.
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
    """Return the shortest path from a class to a rank with room, over flow that can be moved; and all ranks reached."""
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
    """Move as much as fits along a path: each class gives up as much at the rank where the one before it arrives."""
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
    """Return which of its holders takes each piece, given by weight and holders, whole; add the weights to `sent`.

    Each goes to the holder with least so far, the heaviest first, and of equal ones those with the fewest holders
    (longest processing time first). Then the busiest rank gives a piece away as long as that helps, to a rank which
    may have to give one away for it, and so on: for pieces of one weight the result is the best there is.
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
    """Return moves of pieces to other ranks after which the busiest rank has less and no other as much as it had."""
    if not pieces:
        return []
    busiest = max(set(taken), key=lambda rank: (sent[rank], rank))
    most = sent[busiest]
    mine: dict[int, list[int]] = {}
    for number, rank in enumerate(taken):
        mine.setdefault(rank, []).append(number)
    # What a rank would have, once a piece has come to it, and the moves that bring it there.
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
