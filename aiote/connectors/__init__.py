"""Connectors: thin glue by which other projects use aiote without being patched. See docs/connectors.md.

Each module imports its host, and only the host's processes import it: `verl` is the module that verl's
`custom_backend_module` names, `vllm` holds what vLLM finds by its entry point, `torch` what torch does; `ray` is
imported by a program that uses Ray, `vllm_moe` by one that builds layers of vLLM's experts. What updates of weights
share knows no host: `buckets` (pure) and `broadcast` (coroutines on an engine); `host` runs these on the process's
bridge.
"""

from .broadcast import UpdateError

__all__ = ["UpdateError"]
