"""The KV cache of a disaggregated deployment: prefill and decode engines that move caches between their own pages.

A `Cache` describes tensors in the engine's memory. A `Producer` offers requests whose caches a prefill rank computes, a
`Consumer` receives them into pages of a decode rank, pushed layer by layer or pulled (docs/kvcache.md).
`BlockingProducer` and `BlockingConsumer` are theirs for programs that call synchronously. A `Group` leads ranks in
processes of their own, each of which serves a `Worker`. `PagePool` and `Router` are for programs that have none.
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
