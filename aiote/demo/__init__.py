"""A disaggregated generation that is small enough for a laptop but complete.

`aiote demo kvcache` runs a transformer in numpy (`model`) in a prefiller and a decoder over `aiote.kvcache`, and
compares their tokens with a generation in one process (`one_process`); `examples/kvcache` makes a cluster of them.
`aiote demo moe` spreads experts over processes by `aiote.moe` (`moe_run`). It must not know what lies below the public
API.
"""

from . import tokens, weights
from .children import Child
from .faults import DemoError
from .life import Orders, leave_with_parent, live, tell
from .model import Model, TokenSpan
from .prefixes import PrefixPages
from .request_cache import RequestCache, plan
from .settings import Settings

__all__ = [
    "Child",
    "DemoError",
    "Model",
    "Orders",
    "PrefixPages",
    "RequestCache",
    "Settings",
    "TokenSpan",
    "leave_with_parent",
    "live",
    "plan",
    "tell",
    "tokens",
    "weights",
]
