"""GPU memory of aiote's own: values that a kernel changes and a coroutine awaits, and memory that every rail reaches.

Arrays of other libraries need nothing of this: `Engine.register` takes them as they are.
"""

from .copies import copy
from .memory import DeviceArray, GpuMemory, WatchedValue, allocate

__all__ = ["DeviceArray", "GpuMemory", "WatchedValue", "allocate", "copy"]
