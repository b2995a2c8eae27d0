"""A device of streams: nothing but the memory that its peers may reach, and under which keys."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import os

from aiote_native.cuda.copies cimport Gpu, queue_look, queue_state, queue_wait
from aiote_native.cuda.driver import device_of as ordinal_at
from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.streams.receiving cimport stream_poll
from aiote_native.streams.sending cimport stream_flush, stream_post
from aiote_native.streams.stream cimport (
    BUCKETS, NAME_BYTES, STREAM_DEPTH, find_memory, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock)
from aiote_native.structs cimport MAX_SGE, MAY_ALL

cdef enum:
    # Bytes on their way at once, which have to be copied before a cancellation is confirmed: with 4 MiB half a
    # millisecond more over TCP, with 1 MiB no less than with these, and no transfer is faster.
    WINDOW = 2 << 20
    LARGEST = WINDOW // 2  # of one frame: while one is copied the next one is there


cdef class StreamDevice(NativeDevice):
    """The memory of one rail."""

    def __cinit__(self):
        self.registry = NULL
        self.gpus = {}
        self.stages = True

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

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        return StreamMemory(self, address, length, writable, access)

    def register_gpu(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        """Register memory of a GPU, whose bytes go through pinned memory. Raises StatusError as the driver does."""
        number = ordinal_at(address)
        if number not in self.gpus:
            self.gpus[number] = Gpu(number, address)
        self.gpus[number].require_sound()
        return StreamMemory(self, address, length, writable, access, self.gpus[number])

    @property
    def served(self) -> int | None:
        return 0 if self.registry == NULL else self.registry.served

    def close(self) -> None:
        if self.registry == NULL or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        for gpu in self.gpus.values():
            gpu.close()
        self.gpus.clear()
        free(self.registry)
        self.registry = NULL

    def __dealloc__(self):
        # What a channel still has of it, whose engine was never closed, uses this memory.
        if self.children == 0 and self.epoch == fork_epoch():
            free(self.registry)


@cython.no_gc_clear
cdef class StreamMemory(Registration):
    """A memory registration under a random key, which nobody can guess."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, StreamDevice device, uint64_t address, size_t length, bint writable, int access, Gpu gpu=None):
        check_process(device.epoch)
        if device.registry == NULL or self.memory != NULL:
            raise RuntimeError("the device is closed, or the memory registered already")
        self.memory = <Memory*> calloc(1, sizeof(Memory))
        if self.memory == NULL:
            raise MemoryError
        self.memory.address = address
        self.memory.length = length
        self.memory.writable = writable
        self.memory.access = access
        if gpu is not None:
            self.memory.gpu = gpu.queues
            self.gpu = gpu
            self.ordinal = gpu.device
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
            with nogil:
                pthread_mutex_lock(&registry.lock)
                taken = find_memory(registry, key) != NULL
                if not taken:
                    self.memory.key = key
                    self.memory.next = registry.table[key % BUCKETS]
                    registry.table[key % BUCKETS] = self.memory
                pthread_mutex_unlock(&registry.lock)

    def bind(self, bytes holder) -> None:
        """Have the key serve the peer of that name alone. Raises ValueError for what is none."""
        cdef const char* name = holder
        checked(holder)
        if self.memory == NULL:
            raise RuntimeError("the registration has ended")
        with nogil:
            pthread_mutex_lock(&self.device.registry.lock)
            memcpy(self.memory.holder, name, NAME_BYTES)
            self.memory.bound = True
            pthread_mutex_unlock(&self.device.registry.lock)

    def retire(self) -> bool:
        if self.memory == NULL or self.device.epoch != fork_epoch():
            return False
        self.unlist()
        if self.gpu is None:
            return False
        queue_look(&self.memory.gpu.out)
        queue_look(&self.memory.gpu.back)
        return (queue_state(&self.memory.gpu.out, self.last_out) == 0
                or queue_state(&self.memory.gpu.back, self.last_back) == 0)

    def close(self) -> None:
        """End the registration; when it returns no peer's bytes go there any more. Idempotent."""
        self.drop()

    def __dealloc__(self):
        self.drop()

    cdef void unlist(self) noexcept:
        """Take the key out of the table, if it is there."""
        cdef Registry* registry = self.device.registry
        cdef Memory** link
        # A native thread holds the lock for as long as one call copies, some twenty microseconds.
        with nogil:
            pthread_mutex_lock(&registry.lock)
            link = &registry.table[self.memory.key % BUCKETS]
            while link[0] != NULL and link[0] != self.memory:
                link = &link[0].next
            if link[0] != NULL:
                link[0] = self.memory.next
                registry.epoch += 1
                if self.memory.gpu != NULL:
                    self.last_out = self.memory.gpu.out.posted
                    self.last_back = self.memory.gpu.back.posted
            pthread_mutex_unlock(&registry.lock)

    cdef void drop(self) noexcept:
        if self.memory == NULL or self.device is None or self.device.epoch != fork_epoch():
            return
        self.unlist()
        if self.gpu is not None:
            # What was posted while the key was good is over before the memory is its owner's again.
            with nogil:
                queue_wait(&self.memory.gpu.out, self.last_out)
                queue_wait(&self.memory.gpu.back, self.last_back)
            self.gpu = None
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1


cdef int checked(bytes name) except -1:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a peer's name has {NAME_BYTES} bytes, got {len(name)}")
    return 0


cdef bint stream_disconnect(void* impl) noexcept nogil:
    return False


cdef void share_operations(RailOps* operations):
    """Set those operations that are the same over all wires."""
    operations.post = stream_post
    operations.flush = stream_flush
    operations.poll = stream_poll
    operations.disconnect = stream_disconnect


@cython.no_gc_clear
cdef class StreamEndpoint(NativeEndpoint):
    """What the endpoints of all wires have in common. A base class: each kind has its own native half."""

    def __dealloc__(self):
        self.drop(self.device)

    cdef int usable(self, StreamDevice device) except -1:
        """Check that one may be opened on a device."""
        if self.impl_slot()[0] != NULL or device.closed:
            raise RuntimeError("the endpoint is open already, or its device is closed")
        return check_process(device.epoch)

    cdef void begin(self, StreamDevice device, Stream* stream, const Wire* wire, const RailOps* ops):
        """Be an endpoint of a device, over a wire."""
        self.device = device
        device.children += 1
        self.ops = ops
        self.largest = LARGEST
        self.depth = STREAM_DEPTH
        self.window = WINDOW
        self.max_sge = MAX_SGE
        stream.wire = wire
        stream.registry = device.registry

    def name(self, bytes peer) -> None:
        """Say whose the other end is, before the endpoint is handed over. Raises ValueError for no name."""
        cdef Stream* stream = <Stream*> self.impl_slot()[0]
        checked(peer)
        if stream == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        memcpy(stream.peer, <const char*> peer, NAME_BYTES)
        stream.named = True

    cdef NativeDevice device_of(self):
        return self.device
