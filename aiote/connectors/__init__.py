"""Connectors: thin glue that lets other projects (hosts) use aiote without patches. See docs/connectors.md.

Each module imports its host, and only the host's processes import the module: `verl`, `vllm` and `torch` by their entry
points, `ray` and `vllm_moe` by a program. What weight updates share must not know a host: `buckets` (pure) and
`bucket_broadcast` (coroutines on an engine); `host` runs these on the process's bridge.
"""

from .bucket_broadcast import BroadcastError

__all__ = ["BroadcastError"]
