"""The planner: predict what a transfer takes on NICs that are not at hand, before any rank is deployed.

`kvcache` and `moe` run every rank of the service itself on the simulated network in virtual time; `weights` lets the
service plan the update, and follows that plan. So a prediction contains the decisions that the service would make. It
must not have models of the services.
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
