"""The KV cache of a disaggregated deployment: prefill and decode engines that find each other and move caches.

`CacheLayout` says how a model's cache lies in the memory of each rank, `plan_transfer` what every rank of a prefill
group writes to every rank of a decode group, and `Route.move` turns that into the arguments of `aiote.Pages`.
`Decoder` has requests' caches filled in its memory, `Prefiller` fills them. A `Registry` says who is there
(`RegistryServer` on one of the engines and `EmbeddedRegistry` on the others, or `etcd.EtcdRegistry`), and a `Router`
chooses among them.
"""

from .decoder import Decoder
from .embedded import EmbeddedRegistry
from .job import Chunk, Job, JobEnded
from .layout import CacheLayout, TokenSpan
from .mailroom import Mailroom
from .membership import Member, MemberEvent, Registry, RegistryError, Role, Seat
from .plan import Move, PageFamily, PageTable, Route, Run, Side, TransferPlan, plan_transfer
from .pool import PagesExhausted
from .prefiller import Prefiller
from .registry import RegistryServer
from .routing import Choice, NoMember, Router, block_hashes
from .slot import PrefillError, Slot
from .traffic import PrefillStatistics

__all__ = [
    "CacheLayout",
    "Choice",
    "Chunk",
    "Decoder",
    "EmbeddedRegistry",
    "Job",
    "JobEnded",
    "Mailroom",
    "Member",
    "MemberEvent",
    "Move",
    "NoMember",
    "PageFamily",
    "PageTable",
    "PagesExhausted",
    "PrefillError",
    "PrefillStatistics",
    "Prefiller",
    "Registry",
    "RegistryError",
    "RegistryServer",
    "Role",
    "Route",
    "Router",
    "Run",
    "Seat",
    "Side",
    "Slot",
    "TokenSpan",
    "TransferPlan",
    "block_hashes",
    "plan_transfer",
]
