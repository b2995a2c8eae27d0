"""Which rails of two engines are joined.

Both sides compute the same pairs from the two offers, so they need no agreement about them. Rails are joined if they
use the same wire format. If one side has more rails of a format, each of the other side's rails serves several of them.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_PAIRS", "pair_rails"]

MAX_PAIRS = 16


def pair_rails(initiator: Sequence[str], acceptor: Sequence[str]) -> list[tuple[int, int]]:
    """Return (initiator's rail, acceptor's rail) for each pair, from the wire formats of the rails of both.

    With a rails of one format here and b there, max(a, b) pairs are made, and rail i of each side serves pair i modulo
    its number. There are at most `MAX_PAIRS` pairs; an empty list means that the two have no format in common.
    """
    pairs: list[tuple[int, int]] = []
    for wire in dict.fromkeys(initiator):
        ours = [i for i, name in enumerate(initiator) if name == wire]
        theirs = [i for i, name in enumerate(acceptor) if name == wire]
        if theirs:
            pairs.extend((ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(max(len(ours), len(theirs))))
    return pairs[:MAX_PAIRS]
