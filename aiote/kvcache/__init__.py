"""The KV cache of a disaggregated deployment: prefill and decode engines that find each other and move caches.

`CacheLayout` says how a model's cache lies in the memory of each rank, `plan_transfer` what every rank of a prefill
group writes to every rank of a decode group, and `Route.move` turns that into the arguments of `aiote.Pages`.
`Decoder` has requests' caches filled in its memory, `Prefiller` fills them. A `Router` chooses among the members that
a registry of `aiote.discovery` knows.
"""

from .cache_layout import CacheLayout, TokenSpan
from .decoder import Decoder
from .job import Chunk, Job, JobEnded
from .pool import PagesExhausted
from .prefiller import Prefiller
from .routing import Choice, NoMember, Router, block_hashes
from .slot import PrefillError, Slot
from .traffic import PrefillStatistics
from .transfer_plan import Move, PageFamily, PageTable, Route, Run, Side, TransferPlan, plan_transfer

__all__ = [
    "CacheLayout",
    "Choice",
    "Chunk",
    "Decoder",
    "Job",
    "JobEnded",
    "Move",
    "NoMember",
    "PageFamily",
    "PageTable",
    "PagesExhausted",
    "PrefillError",
    "PrefillStatistics",
    "Prefiller",
    "Route",
    "Router",
    "Run",
    "Side",
    "Slot",
    "TokenSpan",
    "TransferPlan",
    "block_hashes",
    "plan_transfer",
]
