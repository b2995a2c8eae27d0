"""A disaggregated generation that is small enough for a laptop but complete.

It consists of a transformer in numpy, a prefiller and a decoder that serve it over `aiote.kvcache`, and the code that
starts and ends their processes. `aiote demo kvcache` runs one of each and compares their tokens with those of a
generation in one process; `examples/kvcache` makes a cluster of them. `aiote demo moe` adds experts to the same
transformer, and spreads them over processes by `aiote.moe`.

    tokens.py         bytes to token numbers         model.py      the transformer, float32
    request_cache.py  a request's keys and values    weights.py    seeded weights, or a safetensors file
    settings.py       the options of a run           prefixes.py   the pages of a prefiller
    prefiller.py      decoder.py                     the two sides
    life.py           how a server ends              children.py   child processes that end with their parent
    run.py            the demo: starts both, hands out prompts, gathers tokens    child.py    its processes
    one_process.py    the generation in one process  prompts.py    the prompts
    moe_model.py      the transformer with experts   moe_rank.py   the processes that hold them
    moe_run.py        the demo with experts: starts them, kills one, compares
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
