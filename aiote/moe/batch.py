"""The rows that a rank's experts get in a round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arrays import elements
from .config import Sizes
from .plan import RoundPlan

if TYPE_CHECKING:
    from .memory import LaneMemory
    from .round import Round

__all__ = ["Batch"]


class Batch:
    """The rows of a round for this rank's experts: views of the group's memory, valid until `combine`.

    In layout "grouped" `x` is (experts of the rank, rows, hidden), and expert i has the first `expert_num_tokens[i]`
    rows. In "contiguous" it is (rows, hidden), and expert i's rows begin at `offsets[i]`. In "rank" it is (ranks,
    tokens, hidden), and rank r has sent the first `source_num_tokens[r]`. Rows are in the order of source rank, token
    and k; the content between them is undefined. `scales` has the same layout. The caller puts the experts' results
    into `y`, or passes an array of that shape to `combine`.
    """

    def __init__(
        self,
        round: Round,
        plan: RoundPlan,
        sizes: Sizes,
        memory: LaneMemory,
        *,
        like: Any,
        dropped: NDArray[np.bool_] | None,
        active: NDArray[np.bool_],
    ) -> None:
        self.round = round
        self.dropped = dropped
        """Which of this rank's own rows (tokens, k) were dropped; None if no row was."""
        self.active = active
        """Which ranks take part (ranks,)."""
        self.demand = plan.demand
        """The value of `rows` that is enough for this round."""
        self._plan, self._sizes, self._memory, self._like = plan, sizes, memory, like
        self._leading_shape = {
            "grouped": (sizes.experts_of(plan.me), sizes.rows),
            "contiguous": (sizes.placed,),
            "rank": (sizes.ranks, sizes.config.tokens),
        }[sizes.config.layout]

    @property
    def x(self) -> Any:
        """The tokens, as an array of the kind that was dispatched here."""
        config = self._sizes.config
        return elements(self._memory.placed, 0, (*self._leading_shape, config.hidden), config.dtype, self._like)

    @property
    def scales(self) -> Any:
        """The tokens' scales; None with `scales=0`."""
        config = self._sizes.config
        if not config.scales:
            return None
        shape = (*self._leading_shape, config.scales)
        return elements(self._memory.placed, self._sizes.scales_at, shape, config.scale_dtype, self._like)

    @property
    def y(self) -> Any:
        """Memory that the experts may put their results into; `combine` sends them from there without a copy."""
        config = self._sizes.config
        return elements(self._memory.y, 0, (*self._leading_shape, config.hidden), config.out_dtype, self._like)

    @property
    def answered(self) -> NDArray[np.bool_] | None:
        """Whose experts' results the sums include (ranks,), once `combine` has ended; None before."""
        return self.round.answered

    @property
    def expert_num_tokens(self) -> NDArray[np.int32]:
        """How many rows each of this rank's experts has (experts of the rank,)."""
        return self._plan.expert_rows().astype(np.int32)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The first row of each of this rank's experts, among all rows of the layout, and then the last one's end."""
        return self._plan.offsets()

    @property
    def source_num_tokens(self) -> NDArray[np.int32]:
        """How many rows each rank has sent to this one (ranks,); with copies by rank, how many tokens."""
        return self._plan.sent[:, self._plan.me].astype(np.int32)

    @property
    def expert_source_tokens(self) -> NDArray[np.int32]:
        """How many rows each of this rank's experts has from each source rank (experts of the rank, ranks)."""
        plan = self._plan
        return plan.kept[:, plan.me, : self._sizes.experts_of(plan.me)].T.astype(np.int32)

    @property
    def token(self) -> NDArray[np.int32]:
        """The number of each row's token at its source (...), undefined between rows; `source` costs more."""
        rows: NDArray[np.int32] = elements(
            self._memory.placed, self._sizes.token_at, (*self._leading_shape, 1), "int32", np.empty(0, np.int32)
        )
        return rows[..., 0]

    @property
    def topk_ids(self) -> Any:
        """In layout "rank": which of this rank's experts each token is for (ranks, tokens, k); -1 for other ranks'."""
        return self._memory.topk_ids

    @property
    def topk_weights(self) -> Any:
        """The weights of each row's token (..., k), as the source gave them."""
        top_k = self._sizes.config.top_k
        shape = (*self._leading_shape, top_k)
        return elements(self._memory.placed, self._sizes.weights_at, shape, "float32", np.empty(0, np.float32))

    @property
    def source(self) -> NDArray[np.int32]:
        """The origin of each row: rank, token and k (..., 3), -1 where there is no row; k is 0 in layout "rank"."""
        sizes, plan = self._sizes, self._plan
        placed = self._memory.on_host(self._memory.placed)
        found = np.full((len(placed), 3), -1, np.int32)
        # Read the rows alone: a read of shared memory that was never touched allocates a page.
        for source in range(sizes.ranks):
            if sizes.whole:
                first, count = source * sizes.config.tokens, int(plan.sent[source, plan.me])
                found[first : first + count] = source, 0, 0
                found[first : first + count, 1] = self._numbers_of(placed[first : first + count])[:, 0]
                continue
            for expert in np.flatnonzero(plan.kept[source, plan.me]).tolist():
                first = int(plan.base[plan.me, expert] + plan.before[source, plan.me, expert])
                chosen = slice(first, first + int(plan.kept[source, plan.me, expert]))
                numbers = self._numbers_of(placed[chosen])
                named = numbers[:, 1:] == sizes.first_expert_of(plan.me) + expert
                found[chosen, 0], found[chosen, 1] = source, numbers[:, 0]
                found[chosen, 2] = _slots(named, numbers[:, 0])
        return found[: math.prod(self._leading_shape)].reshape(*self._leading_shape, 3)

    def _numbers_of(self, rows: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Return the token of each row, and the experts that the token names (rows, 1 + k)."""
        return rows[:, self._sizes.token_at : self._sizes.weights_at].copy().view(np.int32)


def _slots(named: NDArray[np.bool_], tokens: NDArray[np.int32]) -> list[int]:
    """Return the k of each row of an expert; the rows of a token that names it more than once get its ks in order."""
    slots: list[int] = []
    earlier = 0
    for line, token in enumerate(tokens.tolist()):
        earlier = earlier + 1 if line and tokens[line - 1] == token else 0
        # The source wrote the row's content, which may lack an id that its counts promise.
        slots.append(int(next(iter(np.flatnonzero(named[line])[earlier:]), -1)))
    return slots
