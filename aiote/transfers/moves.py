"""Writes to one peer that are checked once, in layers: each request then brings only the offsets of the pieces.

This module must not know how the native core posts them, or anything of caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.striping import NO_IMMEDIATE
from ..errors import ClosedError
from ..rails import Core, LayerMoves, PageIndex
from .streams import order_behind, pools_of
from .transfer import Transfer

if TYPE_CHECKING:
    from ..rails import LayerRun
    from .peer import Peer
    from .regions import Region, RemoteRegion

__all__ = ["Move", "PreparedMoves"]


class Move(NamedTuple):
    """Pieces of `nbytes` bytes that move from one memory to another, both counted from an offset. Moves with the same
    number of a pattern have the same offsets of pieces in a request.
    """

    source: Region
    source_offset: int
    target: RemoteRegion
    target_offset: int
    pattern: int
    nbytes: int


class LayersTransfer(Transfer):
    """The transfer of some layers. The native core makes it without calling `__init__`."""

    @property
    def description(self) -> str:
        """The operation in words, for error messages."""
        return f"write_imm of {self.total_bytes} bytes in layers"


class PreparedMoves:
    """The moves of layers to one peer. It belongs to the connection, and holds no resource."""

    def __init__(self, moves: LayerMoves, sources: Iterable[Region]) -> None:
        self._moves = moves
        self._pools = pools_of(source.memory for source in sources)

    @classmethod
    def of(cls, peer: Peer, layers: Sequence[tuple[int, Sequence[Move]]]) -> PreparedMoves | None:
        """Prepare layers: what each of them adds to a request's first immediate, and its moves.

        Return None if the moves are to be written one by one: the peer is not connected, memory belongs to a lease or
        cannot be written, or there is none.
        """
        link = peer._connection.link
        flat = [move for _, moves in layers for move in moves]
        if link is None or not flat or any(move.target.lease or not move.target.writable for move in flat):
            return None
        core = flat[0].source.memory.owner
        assert isinstance(core, Core)
        prepared = LayerMoves(core, len(flat))
        try:
            for immediate, moves in layers:
                for one in moves:
                    at, onto = one.source, one.target
                    begin, target_begin = at.start + one.source_offset, onto.start + one.target_offset
                    room, target_room = at.nbytes - one.source_offset, onto.nbytes - one.target_offset
                    prepared.add(link, at.memory, begin, room, onto.memory, target_begin, target_room, 1, 1)
                    prepared.place(one.pattern, one.nbytes)
                prepared.end_layer(immediate)
        except (ValueError, OverflowError):
            return None
        return cls(prepared, {move.source.memory: move.source for move in flat}.values())

    def run(
        self, layers: list[int], offsets: list[tuple[PageIndex, PageIndex] | None], imm: int, most: int
    ) -> LayerRun | None:
        """Make a request of the first of these layers, as many as have up to `most` pieces together.

        `offsets` has the offsets of each pattern's pieces on both sides, None for none. Return None if the layers are
        to be written one by one, which waits for room and names what is wrong.
        """
        return self._moves.run(layers, offsets, imm, most)

    def start(self, run: LayerRun, stream: Any) -> Transfer:
        """Start a request that `run` has just made; `stream` is as in `Engine.write`. Raises UsageError."""
        order = None
        if self._pools or stream is not None:
            order = order_behind(self._pools, stream, "write_imm of layers")
        transfer = run.start(LayersTransfer, run.owner, NO_IMMEDIATE, order=order)
        if transfer is None:
            raise ClosedError("the peer or the engine was closed while the layers were submitted")
        return transfer
