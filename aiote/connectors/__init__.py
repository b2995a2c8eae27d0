"""Connectors: thin glue that lets other projects (hosts) use aiote without patches. See docs/connectors.md.

Each module imports its host, and only the host's processes import the module. verl imports `verl`, which its
`custom_backend_module` names; vLLM finds `vllm`, and torch finds `torch`, by their entry points. A program that uses
Ray imports `ray`; a program that builds layers of vLLM's experts imports `vllm_moe`. The parts that weight updates
share know no host: `buckets` (pure) and `broadcast` (coroutines on an engine); `host` runs these on the process's
bridge.
"""

from .broadcast import BroadcastError

__all__ = ["BroadcastError"]
