"""The KV cache of a disaggregated deployment: prefill and decode engines that find each other and move caches.

`CacheLayout` says how a model's cache lies in the memory of each rank, `plan_transfer` what every rank of a prefill
group writes to every rank of a decode group, and `Route.move` turns that into the arguments of `aiote.Pages`.
"""

from .layout import CacheLayout, TokenSpan
from .plan import Move, PageFamily, PageTable, Route, Run, Side, TransferPlan, plan_transfer

__all__ = [
    "CacheLayout",
    "Move",
    "PageFamily",
    "PageTable",
    "Route",
    "Run",
    "Side",
    "TokenSpan",
    "TransferPlan",
    "plan_transfer",
]
