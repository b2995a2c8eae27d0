"""Connectors: thin glue by which other projects use aiote without being patched. See docs/connectors.md.

Each module imports its host, and only the host's processes import it: `verl` is the module that verl's
`custom_backend_module` names, `vllm` holds what vLLM finds by its entry point, `vllm_moe` what a layer of its experts
is built with. What updates of weights share knows no host: `buckets` (pure) and `broadcast` (coroutines on an engine);
`host` runs these on the process's bridge.
"""

from .broadcast import UpdateError

__all__ = ["UpdateError"]
