"""An endpoint for one peer, with its own address vector and completion queue.

One endpoint a peer, not one for all: closing it flushes and ends what flows between these two and touches nobody
else, which is what a confirmed cancellation rests on. The queue is its own as well, so that nothing stale is left in
it after the close.

Two endpoints of one process that are joined over shm share their memory: 1.17 hands out the other's mapping instead of
making one, and a poll that meets anything of an endpoint that was closed crashes. So each knows its twin, and closing
one severs the other: from then on it is neither polled nor posted to, and says nothing until its owner hears of the
loss and closes it.
"""

cimport cython
from libc.errno cimport EAGAIN, ENOTCONN
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strdup

import mmap
import os

from aiote_native.forks cimport check_process
from aiote_native.libfabric.device cimport Device
from aiote_native.libfabric.fabric cimport (
    FI_ADDR_STR, FI_ADDR_UNSPEC, FI_AV_TABLE, FI_COMPLETION, FI_CQ_FORMAT_DATA, FI_DELIVERY_COMPLETE, FI_EAGAIN,
    FI_EAVAIL, FI_GETWAIT, FI_RECV, FI_REMOTE_CQ_DATA, FI_TRANSMIT, FI_WAIT_FD, FI_WAIT_NONE, fi_av_attr,
    fi_av_insert, fi_av_open, fi_av_remove, fi_close, fi_control, fi_cq_attr, fi_cq_data_entry, fi_cq_err_entry,
    fi_cq_open,
    fi_cq_read, fi_cq_readerr, fi_enable, fi_endpoint, fi_ep_bind, fi_getname, fi_info, fi_msg, fi_msg_rma,
    fi_readmsg, fi_recv, fi_rma_iov, fi_sendmsg, fi_trywait, fi_writemsg, fid, iovec)
from aiote_native.libfabric.library cimport symbols
from aiote_native.libfabric.sockets cimport aiote_close_accepted, aiote_moved, aiote_shutdown_sockets
from aiote_native.libfabric.srd cimport srd_bytes, srd_free, srd_new, srd_poll, srd_repost, srd_send, srd_shut, srd_want
from aiote_native.provider cimport NativeDevice
from aiote_native.status cimport check
from aiote_native.structs cimport (
    Completion, MAX_SGE, OP_READ, OP_RECV, OP_SEND, POLL_BATCH, Post, RailOps, WorkRequest)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef enum:
    SRD_RECEIVES = 128   # of immediates and messages together
    SRD_SENDS = 64       # pieces of messages
    SHM_INJECTED = 4096  # up to so many bytes go through shared memory, without a system call for each

# Every open endpoint without a wait descriptor, for finding twins; the lock is held while a twin is polled, posted to
# or closed, by whichever engine.
cdef FabricEndpoint* here = NULL
cdef pthread_mutex_t here_lock
pthread_mutex_init(&here_lock, NULL)


cdef void enlist(FabricEndpoint* self) noexcept nogil:
    global here
    pthread_mutex_lock(&here_lock)
    self.prev = NULL
    self.next = here
    if here != NULL:
        here.prev = self
    here = self
    pthread_mutex_unlock(&here_lock)


cdef void find_twin(FabricEndpoint* self, const char* name, size_t length) noexcept nogil:
    cdef FabricEndpoint* other
    pthread_mutex_lock(&here_lock)
    other = here
    while other != NULL:
        if other.name_length == length and memcmp(other.name, name, length) == 0:
            self.twin = other
        other = other.next
    pthread_mutex_unlock(&here_lock)


cdef void sever_twin(FabricEndpoint* self) noexcept nogil:
    """Leave the list, and have nobody touch what is about to be closed. The lock is held."""
    global here
    cdef FabricEndpoint* other = here
    while other != NULL:
        if other.twin == self or (other == self.twin and not self.severed):
            other.severed = True
        other = other.next
    if self.prev != NULL:
        self.prev.next = self.next
    elif here == self:
        here = self.next
    if self.next != NULL:
        self.next.prev = self.prev
    self.next = self.prev = NULL


cdef int post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    """Post one operation; to the twin of a closed one -EAGAIN, for as long as nobody has heard of that."""
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    cdef int code = -EAGAIN
    if self.srd != NULL and args.opcode == OP_RECV:
        return srd_want(self.srd, args, wr)
    if self.srd != NULL and args.opcode == OP_SEND:
        return srd_send(self.srd, args, wr)
    if self.twin == NULL:
        return post_one(self, args, wr)
    pthread_mutex_lock(&here_lock)
    if not self.severed:
        code = post_one(self, args, wr)
    pthread_mutex_unlock(&here_lock)
    return code


cdef int post_one(FabricEndpoint* self, const Post* args, WorkRequest* wr) noexcept nogil:
    """Post one operation.

    A completion means delivery where the provider is able to: by default tcp reports when the socket buffer took the
    data, and replaces a connection that breaks then without an error, so that what it held is lost. A message over shm
    is the exception: shm of 2.5.1 crashes in its own progress when both sides of a pair send with
    FI_DELIVERY_COMPLETE, and has no connection that could lose it. A read over shm asks for it, or the reader would
    copy from the other process at once, whatever lies at that address by now: its owner may have closed the engine.
    """
    cdef iovec local
    cdef fi_msg message
    cdef void* desc = <void*> args.desc
    if self.ep == NULL:
        return -ENOTCONN
    if args.opcode == OP_RECV:
        return <int> fi_recv(self.ep, args.local, args.length, desc, FI_ADDR_UNSPEC, wr)
    if args.opcode == OP_SEND:
        local.iov_base = args.local
        local.iov_len = args.length
        message.msg_iov = &local
        message.desc = &desc
        message.iov_count = 1
        message.addr = self.peer
        message.context = wr
        message.data = 0
        return <int> fi_sendmsg(self.ep, &message, self.send_flags)
    return post_rma(self, args, wr)


cdef int post_rma(FabricEndpoint* self, const Post* args, WorkRequest* wr) noexcept nogil:
    """Post a write or a read of all SGEs. What an immediate counts for is in the upper half of its data."""
    cdef iovec local[MAX_SGE]
    cdef fi_rma_iov remote[MAX_SGE]
    cdef void* desc[MAX_SGE]
    cdef fi_msg_rma rma
    cdef int i
    # One element also for a length of 0: with none, some providers never complete (udp;ofi_rxd), others ignore the key.
    local[0].iov_base = args.local
    local[0].iov_len = remote[0].len = args.length
    remote[0].addr = args.remote
    for i in range(args.more_sge):
        local[i + 1].iov_base = args.more[i].local
        local[i + 1].iov_len = remote[i + 1].len = args.more[i].length
        remote[i + 1].addr = args.more[i].remote
    for i in range(1 + args.more_sge):
        remote[i].key = args.key
        desc[i] = <void*> args.desc
    rma.msg_iov = local
    rma.desc = desc
    rma.iov_count = rma.rma_iov_count = 1 + args.more_sge
    rma.addr = self.peer
    rma.rma_iov = remote
    rma.context = wr
    rma.data = args.imm | (args.parts - 1) << 32
    if args.opcode == OP_READ:
        return <int> fi_readmsg(self.ep, &rma, self.read_flags)
    return <int> fi_writemsg(self.ep, &rma, self.write_flags | (FI_REMOTE_CQ_DATA if args.with_imm else 0))


cdef int take_error(FabricEndpoint* self, Completion* out) noexcept nogil:
    cdef fi_cq_err_entry entry
    memset(&entry, 0, sizeof(entry))
    cdef ssize_t got = fi_cq_readerr(self.cq, &entry, 0)
    if got < 1:
        return 0
    out.wr = <WorkRequest*> entry.op_context
    out.status = -entry.err if entry.err != 0 else -EAGAIN
    out.provider_errno = entry.prov_errno
    out.length = 0
    return 1


cdef int poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    cdef int got = 0
    if self.srd != NULL:
        return srd_poll(self.srd, self.cq, out, capacity)
    if self.twin == NULL:
        return poll_one(self, out, capacity)
    pthread_mutex_lock(&here_lock)
    if not self.severed:
        got = poll_one(self, out, capacity)
    pthread_mutex_unlock(&here_lock)
    return got


cdef int poll_one(FabricEndpoint* self, Completion* out, int capacity) noexcept nogil:
    cdef fi_cq_data_entry entries[POLL_BATCH]
    cdef ssize_t got
    cdef int i
    if capacity > POLL_BATCH:
        capacity = POLL_BATCH
    got = fi_cq_read(self.cq, entries, capacity)
    if got == -FI_EAGAIN:
        return 0
    if got == -FI_EAVAIL:
        return take_error(self, out)
    if got < 0:
        return <int> got
    for i in range(<int> got):
        out[i].status = 0
        out[i].provider_errno = 0
        out[i].length = entries[i].len
        # Only this flag tells an arrived immediate: the tcp of 1.17 sets neither FI_RMA nor a length with it. Messages
        # never carry data here, so a receive cannot be mistaken for one.
        if entries[i].flags & FI_REMOTE_CQ_DATA:
            out[i].wr = NULL
            out[i].imm = <uint32_t> entries[i].data
            out[i].times = 1 + <uint32_t> (entries[i].data >> 32 & 0xFF) if self.counts else 1
        else:
            out[i].wr = <WorkRequest*> entries[i].op_context
    return <int> got


cdef int arm(void* impl) noexcept nogil:
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    cdef fid* one
    if not self.waits:
        return 0
    one = &self.cq.fid
    return 0 if fi_trywait(self.fabric, &one, 1) == 0 else 1


cdef bint disconnect(void* impl) noexcept nogil:
    """Shut down the sockets of an rxm endpoint.

    Its close in 1.17 reads the completions that are left as if all were its own, and an immediate that arrived and was
    not read has no context: the process crashes. Without a wire nothing arrives, and what is under way ends with errors
    that are read in the ordinary way; then the close finds nothing.
    """
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    if not self.disconnects:
        return False
    aiote_shutdown_sockets(self.name, self.name_length, self.peer_name, self.peer_name_length)
    return True


cdef void shut(void* impl) noexcept nogil:
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    if self.ep == NULL:
        return
    if self.waits:
        fi_close(&self.ep.fid)
        # A connection that it accepted, and whose request it had not read, is forgotten open and watched: by rxm in
        # 1.17, by tcp in 2.5. With the latter a request that came later would use the freed listener.
        aiote_close_accepted(self.name, self.name_length)
    else:
        pthread_mutex_lock(&here_lock)
        sever_twin(self)
        # Nor is this one polled from here on: what it would meet is gone.
        self.severed = True
        fi_close(&self.ep.fid)
        pthread_mutex_unlock(&here_lock)
    self.ep = NULL
    srd_shut(self.srd)


cdef void release(void* impl) noexcept nogil:
    cdef FabricEndpoint* self = <FabricEndpoint*> impl
    shut(impl)
    if self.cq != NULL:
        fi_close(&self.cq.fid)
    if self.shared_av:
        if self.inserted:
            fi_av_remove(self.av, &self.peer, 1, 0)
    elif self.av != NULL:
        fi_close(&self.av.fid)
    srd_free(self.srd)
    free(self)


cdef RailOps operations
operations.post = post
operations.poll = poll
operations.arm = arm
operations.disconnect = disconnect
operations.shut = shut
operations.release = release


cdef int sge_limit_of(const fi_info* info) noexcept:
    """Return how many SGEs a write may have: more than one where an immediate has room for what it counts for.

    Of both limits the smaller counts: rxm has its own `rma_iov_limit`, and only its `iov_limit` is the core provider's.
    efa says 4 for each and would emulate it; its immediates have 4 bytes.
    """
    if info.domain_attr.cq_data_size < 8:
        return 1
    return <int> min(info.tx_attr.iov_limit, info.tx_attr.rma_iov_limit, MAX_SGE)


@cython.no_gc_clear
cdef class Endpoint(NativeEndpoint):
    """An enabled endpoint: its address travels to the peer, the peer's is set by `connect`."""

    def __cinit__(self):
        self.impl = NULL

    def __dealloc__(self):
        self.drop(self.device)

    def __init__(self, Device device, bint waits=True, size_t queue=4096, str mark=""):
        """Open and enable; `waits` asks for a wait descriptor, which shm does not have.

        `mark` is how the name of one without begins, in /dev/shm: this process's own, and no other's. Raises
        StatusError.
        """
        if self.impl != NULL or device.domain == NULL:
            raise RuntimeError("the endpoint is open already, or its device is closed")
        check_process(device.epoch)
        self.impl = <FabricEndpoint*> calloc(1, sizeof(FabricEndpoint))
        if self.impl == NULL:
            raise MemoryError
        self.device = device
        device.children += 1
        self.ops = &operations
        self.largest = device.info.ep_attr.max_msg_size
        self.depth = device.info.tx_attr.size
        self.max_sge = sge_limit_of(device.info)
        self.forgets = device.quirks.forgets
        self.impl.counts = self.max_sge > 1
        self.gathers_from = 0 if waits else SHM_INJECTED + 1
        try:
            self.mark = b"fi_shm://" + mark.encode()
            self.open(waits, queue)
        except BaseException:
            self.close()
            raise

    cdef int open(self, bint waits, size_t queue) except -1:
        cdef fi_cq_attr cq_attr
        cdef fi_av_attr av_attr
        cdef int descriptor = -1
        cdef char name[NAME_BYTES]
        cdef size_t length = sizeof(name)
        cdef bint shm
        memset(&cq_attr, 0, sizeof(cq_attr))
        memset(&av_attr, 0, sizeof(av_attr))
        # Where nothing arrives without a posted receive, this queue cannot overflow.
        cq_attr.size = queue if self.device.quirks.message_limit == 0 else self.device.info.tx_attr.size + SRD_RECEIVES
        cq_attr.format = FI_CQ_FORMAT_DATA
        cq_attr.wait_obj = FI_WAIT_FD if waits else FI_WAIT_NONE
        av_attr.type = FI_AV_TABLE
        av_attr.count = 1
        self.impl.fabric = self.device.fabric
        self.impl.waits = waits
        self.impl.write_flags = FI_COMPLETION | FI_DELIVERY_COMPLETE
        self.open_endpoint(waits)
        check(fi_cq_open(self.device.domain, &cq_attr, &self.impl.cq, NULL), "fi_cq_open")
        self.impl.shared_av = self.device.quirks.shared_av
        if self.impl.shared_av:
            self.impl.av = self.device.av
        else:
            check(fi_av_open(self.device.domain, &av_attr, &self.impl.av, NULL), "fi_av_open")
        check(fi_ep_bind(self.impl.ep, &self.impl.cq.fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)")
        check(fi_ep_bind(self.impl.ep, &self.impl.av.fid, 0), "fi_ep_bind(av)")
        check(fi_enable(self.impl.ep), "fi_enable")
        if waits:
            check(fi_control(&self.impl.cq.fid, FI_GETWAIT, &descriptor), "fi_control(FI_GETWAIT)")
            self.wait_fd = descriptor
        check(fi_getname(&self.impl.ep.fid, name, &length), "fi_getname")
        self.address = name[:length]
        if length > NAME_BYTES:
            raise ValueError(f"the provider's address has {length} bytes, more than {NAME_BYTES}")
        memcpy(self.impl.name, name, length)
        self.impl.name_length = length
        self.impl.disconnects = self.device.info.fabric_attr.prov_name.startswith(b"tcp;ofi_rxm")
        self.tcp = self.device.info.fabric_attr.prov_name.startswith(b"tcp")
        shm = self.device.info.fabric_attr.prov_name.startswith(b"shm")
        self.impl.send_flags = FI_COMPLETION | (FI_DELIVERY_COMPLETE if self.tcp else 0)
        self.impl.read_flags = FI_COMPLETION | (FI_DELIVERY_COMPLETE if shm else 0)
        if not waits:
            enlist(self.impl)
        return self.open_srd() if self.device.quirks.receives_for_immediates else 0

    cdef int open_srd(self) except -1:
        """Post the receives that immediates and messages consume."""
        cdef uint64_t mtu = self.device.quirks.message_limit
        cdef size_t size = srd_bytes(SRD_RECEIVES, SRD_SENDS, mtu)
        cdef uint8_t[::1] memory
        self.pool_memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = self.pool_memory
        self.pool = self.device.register(<uint64_t> &memory[0], size, True, 0)
        self.impl.srd = srd_new(self.impl.ep, &memory[0], self.pool.desc, SRD_RECEIVES, SRD_SENDS, mtu)
        return check(srd_repost(self.impl.srd), "fi_recv")

    cdef void channel_closed(self):
        self.close_pool()
        NativeEndpoint.channel_closed(self)

    cdef void drop(self, NativeDevice home) noexcept:
        cdef bint held = self.impl != NULL
        NativeEndpoint.drop(self, home)
        if held:
            self.close_pool()

    cdef void close_pool(self) noexcept:
        """Close the memory of the receives, after the endpoint."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    cdef int open_endpoint(self, bint waits) except -1:
        """Open the endpoint; one that is found by its name in /dev/shm under a name that is never used again.

        The provider's own names (process, number) are used again as soon as one is closed, so that a peer which still
        has the old address would reach another's endpoint.
        """
        cdef fi_info* info = self.device.info
        if waits or info.addr_format != FI_ADDR_STR:
            return check(fi_endpoint(self.device.domain, info, &self.impl.ep, NULL), "fi_endpoint")
        cdef bytes name = self.mark + os.urandom(8).hex().encode()
        info = symbols().dupinfo(info)
        if info == NULL:
            raise MemoryError
        try:
            free(info.src_addr)
            info.src_addr = strdup(name)
            info.src_addrlen = len(name) + 1
            return check(fi_endpoint(self.device.domain, info, &self.impl.ep, NULL), "fi_endpoint")
        finally:
            symbols().freeinfo(info)

    def connect(self, bytes address) -> None:
        """Name the one peer endpoint that this one talks to. Raises StatusError when the address is not accepted."""
        if self.impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        check_process(self.device.epoch)
        if not self.impl.waits:
            find_twin(self.impl, <const char*> address, len(address))
            if self.impl.twin == NULL and address.startswith(self.mark):
                # One of this process that is closed: shm of 2.5.1 keeps its name, and crashes on what is gone.
                check(-ENOTCONN, "connect endpoint")
        cdef int inserted = fi_av_insert(self.impl.av, <const char*> address, 1, &self.impl.peer, 0, NULL)
        check(inserted if inserted < 0 else (0 if inserted == 1 else -22), "fi_av_insert")
        self.impl.inserted = True
        if self.impl.srd != NULL:
            self.impl.srd.peer = self.impl.peer
        self.peer_address = address
        self.impl.peer_name_length = min(len(address), sizeof(self.impl.peer_name))
        memcpy(self.impl.peer_name, <const char*> address, self.impl.peer_name_length)

    def moved(self) -> int:
        """Return how many bytes its connections have received or seen acknowledged; -1 where the provider is not tcp.

        Looks through all of the process's descriptors, for libfabric does not show its sockets.
        """
        if not self.tcp or self.peer_address is None:
            return -1
        return aiote_moved(<const char*> self.address, len(self.address),
                           <const char*> self.peer_address, len(self.peer_address))

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl

    cdef NativeDevice device_of(self):
        return self.device
