"""A device of streams: it consists only of the memory that its peers may reach, and the keys of that memory."""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close, read

import os

from aiote_native.cuda.copies cimport CopyQueues, queue_look, queue_state, queue_wait
from aiote_native.cuda.driver import device_of as ordinal_at, error_of
from aiote_native.cuda.descriptors cimport SOCKET_NAME
from aiote_native.cuda.sharing cimport Export, export_memory, find_functions, publish
from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.status cimport check
from aiote_native.status import StatusError
from aiote_native.streams.giving cimport start_giving, stop_giving
from aiote_native.streams.lending cimport is_lent, lent_room, let_go
from aiote_native.streams.receiving cimport stream_poll
from aiote_native.streams.sending cimport stream_flush, stream_post
from aiote_native.streams.stream cimport (
    BUCKETS, DEVICE_SHIFT, NAME_BYTES, SHARED_DEVICES, STREAM_DEPTH, find_memory, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock)
from aiote_native.structs cimport MAX_SGE, MAY_ALL

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK

cdef enum:
    # Bytes in flight at once, which have to be copied before a cancellation is confirmed. With 4 MiB a cancellation
    # takes half a millisecond longer over TCP, with 1 MiB it takes no less time, and neither makes a transfer faster.
    WINDOW = 2 << 20
    LARGEST = WINDOW // 2  # bytes of one frame: the next one is there while one is copied

cdef str NOT_SHARED = "sharing is switched off, or the rail reaches other hosts"


cdef class StreamDevice(NativeDevice):
    """The memory of one rail. With `shares`, processes of this host open each other's GPU memory."""

    def __cinit__(self):
        self.registry = NULL
        self.gpus = {}
        self.stages = True
        self.notify_fd = -1

    def __init__(self, bint shares=False):
        if self.registry != NULL:
            raise RuntimeError("this device is open already")
        self.epoch = fork_epoch()
        self.registry = <Registry*> calloc(1, sizeof(Registry))
        if self.registry == NULL:
            raise MemoryError
        pthread_mutex_init(&self.registry.lock, NULL)
        self.shares = self.registry.shares = shares
        if shares:
            self.notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            check(-errno if self.notify_fd < 0 else 0, "eventfd")
        self.registry.notify_fd = self.notify_fd

    @property
    def closed(self) -> bool:
        return self.registry == NULL

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        return StreamMemory(self, address, length, writable, access)

    def register_gpu(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        """Register memory of a GPU; its bytes go through pinned memory, or by reference.

        Raises StatusError with the driver's error.
        """
        cdef int number = ordinal_at(address)
        cdef CopyQueues gpu
        if number not in self.gpus:
            gpu = CopyQueues(number, address)
            self.gpus[number] = gpu
            if number < SHARED_DEVICES:
                with nogil:
                    pthread_mutex_lock(&self.registry.lock)
                    self.registry.gpus[number] = gpu.queues
                    pthread_mutex_unlock(&self.registry.lock)
        self.gpus[number].require_sound()
        return StreamMemory(self, address, length, writable, access, self.gpus[number])

    @property
    def served(self) -> int | None:
        return 0 if self.registry == NULL else self.registry.served

    @property
    def async_fd(self) -> int:
        return self.notify_fd

    def events(self) -> list[tuple[str, int]]:
        """Return ("unshared", code) if peers have failed to open exports since the last call.

        The code is that of the last failure: the driver's, or -errno.
        """
        cdef uint64_t value, refusals
        if self.registry == NULL or self.notify_fd < 0:
            return []
        read(self.notify_fd, &value, sizeof(value))
        with nogil:
            pthread_mutex_lock(&self.registry.lock)
            refusals = self.registry.refusals
            pthread_mutex_unlock(&self.registry.lock)
        news = [("unshared", self.registry.refused)] if refusals != self.reported_refusals else []
        self.reported_refusals = refusals
        return news

    def close(self) -> None:
        if self.registry == NULL or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        self.stop_threads()
        for gpu in self.gpus.values():
            gpu.close()
        self.gpus.clear()
        free(self.registry)
        self.registry = NULL
        self.close_descriptor()

    cdef int give(self, Export* made) except -1:
        """Let peers get the descriptors of an export's segments; start the thread for that if needed.

        Raises StatusError and MemoryError.
        """
        if self.giver == NULL:
            self.giver = start_giving(self.registry)
        memcpy(made.handle.bytes, self.giver.name, SOCKET_NAME)
        return 0

    cdef void stop_threads(self) noexcept:
        if self.giver != NULL:
            stop_giving(self.giver)
            self.giver = NULL

    cdef void close_descriptor(self) noexcept:
        if self.notify_fd >= 0:
            close(self.notify_fd)
            self.notify_fd = -1

    def __dealloc__(self):
        # If an engine was never closed, its channels still use the registry, so it is not freed then.
        if self.children == 0 and self.epoch == fork_epoch():
            self.stop_threads()
            free(self.registry)
            self.close_descriptor()


cdef bint is_same(const Export* one, const Export* other) noexcept nogil:
    """Return whether an earlier export is in use and of the same memory as a new one."""
    return (one.uses != 0 and one.base == other.base and one.buffer == other.buffer
            and one.handle.size == other.handle.size)


@cython.no_gc_clear
cdef class StreamMemory(NicRegistration):
    """A memory registration under a random key, which peers cannot guess."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, StreamDevice device, uint64_t address, size_t length, bint writable, int access,
                 CopyQueues gpu=None):
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
        self.memory.device = -1
        if gpu is not None:
            self.memory.gpu = gpu.queues
            self.gpu = gpu
            self.ordinal = gpu.device
            self.memory.device = gpu.device if gpu.device < SHARED_DEVICES else -1
        self.device = device
        device.children += 1
        if gpu is not None:
            self.export()
        self.enlist()
        self.desc = self.memory
        self.key = self.memory.key
        self.base = address
        self.length = length

    @property
    def failure(self) -> str:
        """The error that broke the device of the memory; empty for a sound one."""
        return error_of(self.gpu.error) if self.gpu is not None and self.gpu.error else ""

    cdef int export(self) except -1:
        """Find or make the export that other processes open, or record in `unshared` why there cannot be one."""
        cdef Registry* registry = self.device.registry
        cdef Export* made = NULL
        cdef Export* same
        self.unshared = NOT_SHARED
        if registry.shares:
            find_functions()  # needed to open the peers' exports, even if this memory cannot be exported
        if not registry.shares or self.memory.length == 0:
            return 0
        made = <Export*> calloc(1, sizeof(Export))
        if made == NULL:
            raise MemoryError
        try:
            export_memory(self.gpu.queues.out.context, self.memory.address, self.memory.length, made)
            if made.handle.segments:
                self.device.give(made)
        except StatusError as error:
            free(made.parts)
            free(made)
            self.unshared = f"{error.operation}: {error.strerror}"
            return 0
        self.unshared = ""
        with nogil:
            pthread_mutex_lock(&registry.lock)
            same = registry.exports
            while same != NULL and not is_same(same, made):
                same = same.next
            if same == NULL:
                made.next = registry.exports
                registry.exports = made
                publish(made)
            else:
                free(made.parts)
                free(made)
                made = same
            made.uses += 1
            made.holds += 1
            self.memory.exported = made
            pthread_mutex_unlock(&registry.lock)
        return 0

    def enlist(self) -> None:
        """Draw an unused random key and enter the memory under it; its highest bits tell the memory's device."""
        cdef Registry* registry = self.device.registry
        cdef uint64_t key
        cdef bint taken = True
        while taken:
            key = (int.from_bytes(os.urandom(8), "little") >> (64 - DEVICE_SHIFT)
                   | <uint64_t> (1 + self.memory.device) << DEVICE_SHIFT)
            with nogil:
                pthread_mutex_lock(&registry.lock)
                taken = find_memory(registry, key) != NULL
                if not taken:
                    self.memory.key = key
                    self.memory.next = registry.table[key % BUCKETS]
                    registry.table[key % BUCKETS] = self.memory
                pthread_mutex_unlock(&registry.lock)

    def bind(self, bytes holder) -> None:
        """Make the key serve only the peer of that name.

        Raises ValueError for a malformed name, and RuntimeError after the end of the registration.
        """
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
        return (self.is_shared() or queue_state(&self.memory.gpu.out, self.last_out) == 0
                or queue_state(&self.memory.gpu.back, self.last_back) == 0)

    cdef bint is_shared(self) noexcept:
        """Return whether peers copy from the memory, or have its allocation open after its last registration ended."""
        cdef Registry* registry = self.device.registry
        cdef bint shared
        with nogil:
            pthread_mutex_lock(&registry.lock)
            shared = is_lent(registry, self.memory) or (
                self.memory.exported != NULL and self.memory.exported.uses == 0 and self.memory.exported.known != 0)
            pthread_mutex_unlock(&registry.lock)
        return shared

    def close(self) -> None:
        """End the registration. After this returns, no peer's bytes go to the memory any more. Idempotent."""
        self.drop()

    def __dealloc__(self):
        self.drop()

    cdef void unlist(self) noexcept:
        """Remove the key from the table, if it is there."""
        cdef Registry* registry = self.device.registry
        cdef Memory** link
        # Wait without the GIL: a native thread holds the lock while one call copies, some twenty microseconds.
        with nogil:
            pthread_mutex_lock(&registry.lock)
            link = &registry.table[self.memory.key % BUCKETS]
            while link[0] != NULL and link[0] != self.memory:
                link = &link[0].next
            if link[0] != NULL:
                link[0] = self.memory.next
                registry.epoch += 1
                if self.memory.exported != NULL:
                    self.memory.exported.uses -= 1
                    registry.withdrawn += self.memory.exported.uses == 0
                if self.memory.gpu != NULL:
                    self.last_out = self.memory.gpu.out.posted
                    self.last_back = self.memory.gpu.back.posted
            pthread_mutex_unlock(&registry.lock)

    cdef void drop(self) noexcept:
        if self.memory == NULL or self.device is None or self.device.epoch != fork_epoch():
            return
        self.unlist()
        if self.gpu is not None:
            # The copies posted while the key was valid have to end before the owner may use the memory again.
            with nogil:
                queue_wait(&self.memory.gpu.out, self.last_out)
                queue_wait(&self.memory.gpu.back, self.last_back)
            self.gpu = None
        if self.memory.exported != NULL:
            with nogil:
                pthread_mutex_lock(&self.device.registry.lock)
                let_go(self.device.registry, self.memory.exported)
                pthread_mutex_unlock(&self.device.registry.lock)
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1


cdef int checked(bytes name) except -1:
    if len(name) != NAME_BYTES:
        raise ValueError(f"the peer's name has {len(name)} bytes, expected {NAME_BYTES}")
    return 0


cdef bint stream_disconnect(void* impl) noexcept nogil:
    return False


cdef void share_operations(RailOps* operations):
    """Set the operations that are the same over all wires."""
    operations.post = stream_post
    operations.flush = stream_flush
    operations.poll = stream_poll
    operations.disconnect = stream_disconnect
    operations.room = lent_room


@cython.no_gc_clear
cdef class StreamEndpoint(NativeEndpoint):
    """The common part of the endpoints of all wires. A base class: each kind has its own native half."""

    def __dealloc__(self):
        self.drop(self.device)

    cdef int usable(self, StreamDevice device) except -1:
        """Raise RuntimeError unless the endpoint may be opened on a device."""
        if self.impl_slot()[0] != NULL or device.closed:
            raise RuntimeError("the endpoint is open already, or its device is closed")
        return check_process(device.epoch)

    cdef void begin(self, StreamDevice device, Stream* stream, const Wire* wire, const RailOps* ops):
        """Set up the endpoint on a device, over a wire."""
        self.device = device
        device.children += 1
        self.ops = ops
        self.largest = LARGEST
        self.depth = STREAM_DEPTH
        self.window = WINDOW
        self.max_sge = MAX_SGE
        stream.wire = wire
        stream.registry = device.registry
        stream.shares = device.shares

    def name(self, bytes peer) -> None:
        """Set the peer's name, before the endpoint is handed to a channel.

        Raises ValueError for a malformed name, and RuntimeError after the endpoint was closed or handed over.
        """
        cdef Stream* stream = <Stream*> self.impl_slot()[0]
        checked(peer)
        if stream == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        memcpy(stream.peer, <const char*> peer, NAME_BYTES)
        stream.named = True

    cdef NativeDevice device_of(self):
        return self.device
