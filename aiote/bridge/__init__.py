"""One engine for a whole process, for programs that call it synchronously or from an event loop of their own.

`acquire()` returns a `Bridge` to the engine, which runs on a thread of its own. `bridge.call(coroutine)` and `await
bridge.run(coroutine)` return or raise only after the coroutine has ended, so the memory of a cancelled transfer belongs
to the caller again. It must not know its callers.
"""

from .bridge import Bridge, acquire
from .calls import Call
from .held import HeldContext
from .promise import Promise, outlast
from .registered_memory import Registration

__all__ = ["Bridge", "Call", "HeldContext", "Promise", "Registration", "acquire", "outlast"]
