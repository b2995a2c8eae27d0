"""Move KV caches in a disaggregated deployment, from the pages of prefill engines to the pages of decode engines.

A `Cache` describes tensors in the engine's memory. A `Producer` offers requests whose caches a prefill rank computes. A
`Consumer` receives them into pages of a decode rank, pushed layer by layer or pulled (docs/kvcache.md).
`BlockingProducer` and `BlockingConsumer` do the same for programs that call synchronously. A `Group` leads ranks in
separate processes; each of these ranks serves a `Worker`. `PagePool` and `Router` serve programs without their own.
"""

from .blocking import BlockingConsumer, BlockingProducer, Finished
from .consumer import Consumer, Reception
from .group import Group, Worker
from .mapping import CacheMap, MappingError, PageRow, assign
from .moving import Written
from .offers import Offer
from .pool import Holding, PagePool, PagesExhausted
from .producer import Producer
from .protocol import TransferRefused
from .routing import Choice, NoMember, Router, block_hashes
from .tensors import Cache, CacheSpec, CacheTensor

__all__ = [
    "BlockingConsumer",
    "BlockingProducer",
    "Cache",
    "CacheMap",
    "CacheSpec",
    "CacheTensor",
    "Choice",
    "Consumer",
    "Finished",
    "Group",
    "Holding",
    "MappingError",
    "NoMember",
    "Offer",
    "PagePool",
    "PageRow",
    "PagesExhausted",
    "Producer",
    "Reception",
    "Router",
    "TransferRefused",
    "Worker",
    "Written",
    "assign",
    "block_hashes",
]
