"""The KV cache of a disaggregated deployment: prefill and decode engines that find each other and move caches.

`CacheLayout` says how a model's cache lies in the memory of each rank, `plan_transfer` what every rank of a prefill
group writes to every rank of a decode group, and `Route.move` turns that into the arguments of `aiote.Pages`.
`Decoder` has requests' caches filled in its memory, `Prefiller` fills them. A `Router` chooses among the members that
a registry of `aiote.discovery` knows.

`Producer` and `Consumer` move caches as inference engines hold them: many tensors in groups, whose pages are the
engine's (docs/kvcache.md). `BlockingProducer` and `BlockingConsumer` are theirs for programs that call
synchronously.
"""

from .blocking import BlockingConsumer, BlockingProducer, Finished
from .cache_layout import CacheLayout, TokenSpan
from .consumer import Consumer, Reception
from .decoder import Decoder
from .group import Group, Worker
from .job import Chunk, Job, JobEnded
from .mapping import CacheMap, MappingError, PageRow, assign
from .moving import Written
from .offers import Offer
from .pool import Holding, PagePool, PagesExhausted
from .prefiller import Prefiller
from .producer import Producer
from .protocol import TransferRefused
from .routing import Choice, NoMember, Router, block_hashes
from .slot import PrefillError, Slot
from .tensors import Cache, CacheSpec, CacheTensor
from .traffic import PrefillStatistics
from .transfer_plan import Move, PageFamily, PageTable, Route, Run, Side, TransferPlan, plan_transfer

__all__ = [
    "BlockingConsumer",
    "BlockingProducer",
    "Cache",
    "CacheLayout",
    "CacheMap",
    "CacheSpec",
    "CacheTensor",
    "Choice",
    "Chunk",
    "Consumer",
    "Decoder",
    "Finished",
    "Group",
    "Holding",
    "Job",
    "JobEnded",
    "MappingError",
    "Move",
    "NoMember",
    "Offer",
    "PageFamily",
    "PagePool",
    "PageRow",
    "PageTable",
    "PagesExhausted",
    "PrefillError",
    "PrefillStatistics",
    "Prefiller",
    "Producer",
    "Reception",
    "Route",
    "Router",
    "Run",
    "Side",
    "Slot",
    "TokenSpan",
    "TransferPlan",
    "TransferRefused",
    "Worker",
    "Written",
    "assign",
    "block_hashes",
    "plan_transfer",
]
