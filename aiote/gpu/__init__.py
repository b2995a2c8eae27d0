"""GPU memory that aiote allocates: values that a kernel changes and a coroutine awaits, and memory for all rails.

Arrays of other libraries do not need this package: `Engine.register` takes them as they are. It must not know engines.
"""

from .copies import copy
from .memory import DeviceArray, GpuMemory, WatchedValue, allocate

__all__ = ["DeviceArray", "GpuMemory", "WatchedValue", "allocate", "copy"]
