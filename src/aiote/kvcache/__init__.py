"""The KV cache of a disaggregated deployment: prefill and decode engines that find each other and move caches.

`CacheLayout` says how a model's cache lies in the memory of each rank, `plan_transfer` what every rank of a prefill
group writes to every rank of a decode group, and `Route.move` turns that into the arguments of `aiote.Pages`.
`Decoder` has requests' caches filled in its memory, `Prefiller` fills them.
"""

from .decoder import Decoder
from .job import Chunk, Job, JobEnded
from .layout import CacheLayout, TokenSpan
from .mailroom import Mailroom
from .plan import Move, PageFamily, PageTable, Route, Run, Side, TransferPlan, plan_transfer
from .pool import PagesExhausted
from .prefiller import Prefiller
from .slot import PrefillError, Slot

__all__ = [
    "CacheLayout",
    "Chunk",
    "Decoder",
    "Job",
    "JobEnded",
    "Mailroom",
    "Move",
    "PageFamily",
    "PageTable",
    "PagesExhausted",
    "PrefillError",
    "Prefiller",
    "Route",
    "Run",
    "Side",
    "Slot",
    "TokenSpan",
    "TransferPlan",
    "plan_transfer",
]
