"""One engine for a whole process, for programs that call synchronously or have an event loop of their own.

`acquire()` returns a `Bridge` to the engine, which lives on a thread of its own and is shared by all who acquire it.
`bridge.call(coroutine)` runs a coroutine beside the engine from any thread, `await bridge.run(coroutine)` from any
event loop. Both end only when the coroutine has ended, so what a cancelled transfer used belongs to the caller again.
"""

from .bridge import Bridge, acquire
from .calls import Call
from .promise import Promise, outlast
from .registered_memory import Registration

__all__ = ["Bridge", "Call", "Promise", "Registration", "acquire", "outlast"]
