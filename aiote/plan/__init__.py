"""The planner: what a transfer would take on NICs that one does not have, before there are ranks to make it.

It has no model of a service. `kvcache` and `moe` run the service itself, every rank of it, on the simulated network in
virtual time; `weights` has the service plan the update, and follows that plan. What a service decides, its plan shows.
"""

from .nics import PUBLISHED_NICS, Nics, nics_of
from .shapes import KV_SHAPES, MOE_SHAPES, KvShape, MoeShape, kv_shape, moe_shape

__all__ = [
    "KV_SHAPES",
    "MOE_SHAPES",
    "PUBLISHED_NICS",
    "KvShape",
    "MoeShape",
    "Nics",
    "kv_shape",
    "moe_shape",
    "nics_of",
]
