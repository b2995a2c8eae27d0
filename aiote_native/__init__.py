"""The compiled floor of aiote: memory, work requests, completions and counts. It knows nothing of asyncio.

It must not know `aiote`. Only `aiote.rails`, `aiote.gpu` and `aiote.moe.kernels` import this package; everything else
goes through the Rail contract.
"""

import sys

# Its locks protect what native threads share; what Python objects share, the GIL does. To import an extension that
# says so has a free-threaded interpreter switch the GIL on, for all of the program, with no more than a warning.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "aiote needs the GIL, which this free-threaded interpreter runs without: start it with PYTHON_GIL=1 (or "
        "python -X gil=1), or use an ordinary build of Python"
    )

try:
    import aiote_native.system.base  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "aiote_native.system.base":
        raise
    raise ImportError(
        f"{__path__[0]} is aiote's source, which is not compiled there. Run `make venv`, then a command of .venv/bin "
        "(pytest, aiote), or python -P, which does not import from the folder that it is started in. "
        "`make develop` compiles the source so that it is imported from here, too."
    ) from None
