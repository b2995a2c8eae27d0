"""One engine for a whole process, for programs that call it synchronously or from an event loop of their own.

`acquire()` returns a `Bridge` to the engine. The engine runs on a thread of its own, and all callers of `acquire` share
it. `bridge.call(coroutine)` runs a coroutine on the engine's loop from any thread, `await bridge.run(coroutine)` from
any event loop. Both return or raise only after the coroutine has ended. So the memory of a cancelled transfer belongs
to the caller again.
"""

from .bridge import Bridge, acquire
from .calls import Call
from .held import HeldContext
from .promise import Promise, outlast
from .registered_memory import Registration

__all__ = ["Bridge", "Call", "HeldContext", "Promise", "Registration", "acquire", "outlast"]
