"""A NIC of the simulated network, and the memory registered with it."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

import os

from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.sim.net cimport (
    BUCKETS, MAX_PIECES, Model, Net, NIC_BROKEN, NIC_SILENT, NIC_UP, find_memory, pthread_mutex_lock,
    pthread_mutex_unlock)
from aiote_native.structs cimport MAX_SGE, MAY_ALL


cdef int read_model(dict given, Model* model) except -1:
    """Fill in a model from numbers by name, or else defaults. Raises ValueError for numbers out of range."""
    model.latency = given.get("latency", 0)
    model.answer = given.get("answer", 0)
    model.jitter = given.get("jitter", 0)
    model.operation = given.get("operation", 0)
    model.per_byte = given.get("per_byte", 0.0)
    model.overlap = given.get("overlap", 0.0)
    model.depth = given.get("depth", 256)
    model.receives = given.get("receives", 4100)
    model.events = given.get("events", 256)
    model.pieces = given.get("pieces", 1)
    model.max_sge = given.get("max_sge", 1)
    model.refusals = given.get("refusals", 0)
    model.null = given.get("null", False)
    model.packet = given.get("packet", 0)
    model.lingers = given.get("lingers", False)
    model.forgets = given.get("forgets", 0)
    model.largest = given.get("largest", 1 << 30)
    if not (model.depth and model.receives and model.events and model.largest and 1 <= model.pieces <= MAX_PIECES):
        raise ValueError(f"expected depth, receives, events and largest from 1, and pieces from 1 to {MAX_PIECES}")
    if not 1 <= model.max_sge <= MAX_SGE:
        raise ValueError(f"max_sge is {model.max_sge}, expected 1 to {MAX_SGE}")
    return 0


@cython.no_gc_clear
cdef class SimDevice(NativeDevice):
    """NIC number `rail` of node `node`. With `offsets`, peers address its memory from 0, as with some real NICs."""

    def __cinit__(self):
        self.nic = NULL

    def __init__(self, World world, uint32_t node, uint32_t rail, dict model, bint offsets=False):
        """Add the NIC to the network. Raises ValueError for a model with numbers out of range."""
        if self.nic != NULL:
            raise RuntimeError("this device is open already")
        world.usable()
        self.epoch = fork_epoch()
        self.world = world
        self.offsets = offsets
        self.nic = <Nic*> calloc(1, sizeof(Nic))
        if self.nic == NULL:
            raise MemoryError
        self.nic.node = node
        self.nic.rail = rail
        try:
            read_model(model, &self.nic.model)
        except BaseException:
            free(self.nic)
            self.nic = NULL
            raise
        # Operations in flight point to their NIC, so the network owns the structure and keeps it until its own end.
        with nogil:
            pthread_mutex_lock(&world.net.lock)
            self.nic.next = world.net.nics
            world.net.nics = self.nic
            pthread_mutex_unlock(&world.net.lock)
        world.children += 1
        self.opened = True

    @property
    def closed(self) -> bool:
        return not self.opened

    @property
    def state(self) -> str:
        """The state of the NIC: up, silent or broken."""
        return {NIC_UP: "up", NIC_SILENT: "silent", NIC_BROKEN: "broken"}[self.nic.state]

    def change(self, str state, at=None, after=None) -> None:
        """Make the NIC up, silent or broken: now, `at` a time in nanoseconds, or `after` that many more events."""
        states = {"up": NIC_UP, "silent": NIC_SILENT, "broken": NIC_BROKEN}
        self.world.plan_fault(self, states[state], -1, at, after)

    def slow(self, uint64_t ns, at=None, after=None) -> None:
        """Delay each arrival by `ns` nanoseconds: from now, from the time `at` on, or `after` that many more events."""
        self.world.plan_fault(self, 0, ns, at, after)

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> SimMemory:
        return SimMemory(self, address, length, writable, access)

    def close(self) -> None:
        if not self.opened or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        self.opened = False
        self.world.children -= 1

    def __dealloc__(self):
        # The network owns the native half.
        if self.opened and self.children == 0 and self.epoch == fork_epoch():
            self.world.children -= 1


@cython.no_gc_clear
cdef class SimMemory(NicRegistration):
    """A memory registration under a random key, which is valid on its own NIC only."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, SimDevice device, uint64_t address, size_t length, bint writable, int access):
        check_process(device.epoch)
        if not device.opened or self.memory != NULL:
            raise RuntimeError("the device is closed, or the memory registered already")
        self.memory = <Memory*> calloc(1, sizeof(Memory))
        if self.memory == NULL:
            raise MemoryError
        self.memory.nic = device.nic
        self.memory.address = address
        self.memory.length = length
        self.memory.base = 0 if device.offsets else address
        self.memory.writable = writable
        self.memory.access = access
        self.device = device
        device.children += 1
        self.enlist()
        self.desc = self.memory
        self.key = self.memory.key
        self.base = self.memory.base
        self.length = length

    def enlist(self) -> None:
        """Draw an unused random key and enter the memory under it."""
        cdef Net* net = self.device.world.net
        cdef uint64_t key
        cdef bint taken = True
        while taken:
            key = int.from_bytes(os.urandom(8), "little")
            with nogil:
                pthread_mutex_lock(&net.lock)
                taken = find_memory(net, key) != NULL
                if not taken:
                    self.memory.key = key
                    self.memory.next = net.memory_table[key % BUCKETS]
                    net.memory_table[key % BUCKETS] = self.memory
                pthread_mutex_unlock(&net.lock)

    def close(self) -> None:
        self.drop()

    def __dealloc__(self):
        self.drop()

    cdef void drop(self) noexcept:
        cdef Memory** link
        cdef Net* net
        if self.memory == NULL or self.device is None or self.device.epoch != fork_epoch():
            return
        net = self.device.world.net
        with nogil:
            pthread_mutex_lock(&net.lock)
            link = &net.memory_table[self.memory.key % BUCKETS]
            while link[0] != NULL and link[0] != self.memory:
                link = &link[0].next
            if link[0] != NULL:
                link[0] = self.memory.next
            pthread_mutex_unlock(&net.lock)
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1
