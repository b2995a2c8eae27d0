"""Move KV caches in a disaggregated deployment, from the pages of prefill engines to the pages of decode engines.

A `Cache` describes tensors. A `Producer` offers requests whose caches a prefill rank computes, a `Consumer` receives
them into pages of a decode rank; `BlockingProducer` and `BlockingConsumer` do so for synchronous programs. A `Group`
leads ranks in separate processes. It must not know the model, nor the other services.
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
