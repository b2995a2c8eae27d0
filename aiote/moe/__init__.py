"""Mixture of experts: send tokens to the ranks that hold their experts, and return the experts' results summed.

Every rank enters `async with aiote.moe.open_group(engine, members, rank, config) as moe:`, then calls `dispatch` and
`combine` (docs/moe.md). It must not know what the experts compute, nor the other services.
"""

from .batch import Batch
from .config import MoeConfig
from .group import MoeGroup
from .opening import open_group
from .round import Round
from .states import GroupBrokenError, MoeOverflowError
from .statistics import MoeStatistics

__all__ = [
    "Batch",
    "GroupBrokenError",
    "MoeConfig",
    "MoeGroup",
    "MoeOverflowError",
    "MoeStatistics",
    "Round",
    "open_group",
]
