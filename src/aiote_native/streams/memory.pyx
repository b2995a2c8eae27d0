"""A device of streams: nothing but the memory that its peers may reach, and under which keys."""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

import os

from aiote_native.forks cimport fork_epoch, own
from aiote_native.streams.stream cimport (
    BUCKETS, find_memory, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock)


cdef class StreamDevice(NativeDevice):
    """The memory of one rail."""

    def __cinit__(self):
        self.registry = NULL

    def __init__(self):
        if self.registry != NULL:
            raise RuntimeError("this device is open already")
        self.epoch = fork_epoch()
        self.registry = <Registry*> calloc(1, sizeof(Registry))
        if self.registry == NULL:
            raise MemoryError
        pthread_mutex_init(&self.registry.lock, NULL)

    @property
    def closed(self) -> bool:
        return self.registry == NULL

    def register(self, uint64_t address, size_t length, bint writable=True, bint remote=True) -> StreamMemory:
        return StreamMemory(self, address, length, writable, remote)

    def close(self) -> None:
        if self.registry == NULL or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        free(self.registry)
        self.registry = NULL


cdef class StreamMemory(Registration):
    """A memory registration under a random key, which nobody can guess."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, StreamDevice device, uint64_t address, size_t length, bint writable, bint remote):
        own(device.epoch)
        if device.registry == NULL or self.memory != NULL:
            raise RuntimeError("the device is closed, or the memory registered already")
        self.memory = <Memory*> calloc(1, sizeof(Memory))
        if self.memory == NULL:
            raise MemoryError
        self.memory.address = address
        self.memory.length = length
        self.memory.writable = writable
        self.memory.remote = remote
        self.device = device
        device.children += 1
        self.enlist()
        self.desc = self.memory
        self.key = self.memory.key
        self.base = address
        self.length = length

    def enlist(self) -> None:
        """Draw a key that is free and enter the memory under it."""
        cdef Registry* registry = self.device.registry
        cdef uint64_t key
        cdef bint taken = True
        while taken:
            key = int.from_bytes(os.urandom(8), "little")
            pthread_mutex_lock(&registry.lock)
            taken = find_memory(registry, key) != NULL
            if not taken:
                self.memory.key = key
                self.memory.next = registry.table[key % BUCKETS]
                registry.table[key % BUCKETS] = self.memory
            pthread_mutex_unlock(&registry.lock)

    def close(self) -> None:
        """End the registration; when it returns no peer's bytes go there any more. Idempotent."""
        cdef Registry* registry = self.device.registry
        cdef Memory** place
        if self.memory == NULL or self.device.epoch != fork_epoch():
            return
        with nogil:
            # A native thread holds the lock for as long as one call copies, some twenty microseconds.
            pthread_mutex_lock(&registry.lock)
            place = &registry.table[self.memory.key % BUCKETS]
            while place[0] != self.memory:
                place = &place[0].next
            place[0] = self.memory.next
            registry.epoch += 1
            pthread_mutex_unlock(&registry.lock)
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1
