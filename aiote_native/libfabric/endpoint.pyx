"""Endpoints of libfabric, and the receives and messages of EFA's NICs."""

cimport cython
from libc.errno cimport EAGAIN, EMSGSIZE, ENOTCONN, EPROTO
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strdup

import mmap
import os

from aiote_native.engine.provider cimport NativeDevice
from aiote_native.engine.structs cimport (
    MAX_SGE, OP_READ, OP_RECV, OP_SEND, POLL_BATCH, Completion, Post, RailOps, WorkRequest)
from aiote_native.libfabric.device cimport LibfabricDevice, symbols
from aiote_native.libfabric.fabric cimport (
    FI_ADDR_STR, FI_ADDR_UNSPEC, FI_AV_TABLE, FI_COMPLETION, FI_CQ_FORMAT_DATA, FI_DELIVERY_COMPLETE, FI_EAGAIN,
    FI_EAVAIL, FI_GETWAIT, FI_RECV, FI_REMOTE_CQ_DATA, FI_TRANSMIT, FI_WAIT_FD, FI_WAIT_NONE, fi_av_attr, fi_av_insert,
    fi_av_open, fi_av_remove, fi_close, fi_control, fi_cq_attr, fi_cq_data_entry, fi_cq_err_entry, fi_cq_open,
    fi_cq_read, fi_cq_readerr, fi_enable, fi_endpoint, fi_ep_bind, fi_getname, fi_info, fi_msg, fi_msg_rma, fi_readmsg,
    fi_recv, fi_rma_iov, fi_sendmsg, fi_trywait, fi_writemsg, fid, iovec)
from aiote_native.libfabric.sockets cimport aiote_close_accepted, aiote_moved, aiote_shutdown_sockets
from aiote_native.system.base cimport check, check_process

# Receives and messages of EFA's NICs: a pool that both immediates and messages consume, and messages in pieces.
#
# With FI_RX_CQ_DATA each immediate consumes a posted receive; without a posted receive, it waits in the network. A
# completion queue with room for all receives and all sends therefore cannot overflow. EFA's messages are at most one
# MTU long. Each endpoint owns receives of the MTU's size; a consumed receive is posted again in the same batch. A
# mailbox's message is sent in pieces with their offsets, and put together in the receive that the peer's mailbox has
# posted. Pieces come in any order. The values in a piece's header are checked against the length of that receive.
#
# The caller holds the engine's lock.


cdef size_t srd_bytes(uint32_t buffers, uint32_t sends, uint64_t mtu) noexcept nogil:
    return (<size_t> buffers + sends) * mtu


cdef Srd* srd_new(fid_ep* ep, uint8_t* memory, void* desc, uint32_t buffers, uint32_t sends,
                  uint64_t mtu) except NULL:
    """Lay out receives and sends in `memory`, which has `srd_bytes` bytes. Raises MemoryError."""
    cdef Srd* self = <Srd*> calloc(1, sizeof(Srd))
    cdef uint32_t i
    if self == NULL:
        raise MemoryError
    self.posted = <Buffer*> calloc(buffers, sizeof(Buffer))
    self.pieces = <PieceSend*> calloc(sends, sizeof(PieceSend))
    if self.posted == NULL or self.pieces == NULL:
        srd_free(self)
        raise MemoryError
    self.ep = ep
    self.memory = memory
    self.desc = desc
    self.buffers = buffers
    self.sends = sends
    self.mtu = mtu
    for i in range(buffers):
        self.posted[i].home = self
        self.posted[i].memory = memory + i * mtu
        self.posted[i].next = self.spare
        self.spare = &self.posted[i]
    for i in range(sends):
        self.pieces[i].memory = memory + (buffers + i) * mtu
        self.pieces[i].next = self.spare_sends
        self.spare_sends = &self.pieces[i]
    return self


cdef void srd_shut(Srd* self) noexcept nogil:
    """Record that the endpoint was freed, so that no operation is posted on it."""
    if self != NULL:
        self.ep = NULL


cdef void srd_free(Srd* self) noexcept nogil:
    if self != NULL:
        free(self.posted)
        free(self.pieces)
        free(self)


cdef int srd_repost(Srd* self) noexcept nogil:
    """Post every consumed receive that is free; receives that the NIC does not take now are posted next time.

    Does nothing once the endpoint is shut, because the remaining entries of its queue may be polled after that.
    """
    cdef Buffer* buffer
    cdef int code
    while self.spare != NULL and self.ep != NULL:
        buffer = self.spare
        code = <int> fi_recv(self.ep, buffer.memory, self.mtu, self.desc, FI_ADDR_UNSPEC, buffer)
        if code != 0:
            return code if code != -EAGAIN else 0
        self.spare = buffer.next
    return 0


cdef int srd_want(Srd* self, const Post* args, WorkRequest* wr) noexcept nogil:
    """Keep a receive of the mailbox for the next message; return 0, or -EAGAIN if there are too many."""
    cdef Wanted* wanted
    if self.wanted_count == MAX_WAITING:
        return -EAGAIN
    wanted = &self.wanted[self.wanted_count]
    wanted.wr = wr
    wanted.memory = <uint8_t*> args.local
    wanted.length = args.length
    wanted.got = 0
    wanted.number = wanted.total = 0
    self.wanted_count += 1
    return 0


cdef uint32_t room_of(const Srd* self) noexcept nogil:
    cdef const PieceSend* piece = self.spare_sends
    cdef uint32_t room = 0
    while piece != NULL:
        room += 1
        piece = piece.next
    return room


cdef Outgoing* outgoing_of(Srd* self, const WorkRequest* wr) noexcept nogil:
    cdef uint32_t i
    for i in range(MAX_WAITING):
        if self.outgoing[i].wr == wr:
            return &self.outgoing[i]
    return NULL


cdef int srd_send(Srd* self, const Post* args, WorkRequest* wr) noexcept nogil:
    """Send a message in pieces; return -EAGAIN without sending any piece if there is no room for all of them."""
    cdef uint64_t most = self.mtu - HEADER
    cdef uint32_t count = <uint32_t> ((args.length + most - 1) // most) if args.length else 1
    cdef Outgoing* outgoing = outgoing_of(self, NULL)
    cdef uint64_t offset = 0
    if count > self.sends:
        return -EMSGSIZE
    if self.ep == NULL:
        return -ENOTCONN
    if outgoing == NULL or room_of(self) < count:
        return -EAGAIN
    self.numbered += 1
    outgoing.wr = wr
    outgoing.pieces = count
    outgoing.status = outgoing.provider_errno = 0
    for _piece in range(count):
        prepare(self, args, wr, offset, min(most, args.length - offset))
        offset += most
    # Pieces that the NIC does not take now are sent when it has room. The next poll reports a refusal.
    srd_flush(self)
    return 0


cdef void prepare(Srd* self, const Post* args, WorkRequest* wr, uint64_t offset, uint64_t length) noexcept nogil:
    cdef PieceSend* piece = self.spare_sends
    cdef PieceHeader* header = <PieceHeader*> piece.memory
    self.spare_sends = piece.next
    header.number = self.numbered
    header.offset = <uint32_t> offset
    header.total = <uint32_t> args.length
    header.length = <uint32_t> length
    memcpy(piece.memory + HEADER, <uint8_t*> args.local + offset, length)
    piece.wr = wr
    piece.next = self.unsent
    self.unsent = piece


cdef int srd_flush(Srd* self) noexcept nogil:
    """Send the pieces that wait for room at the NIC, in any order."""
    cdef PieceSend* piece
    cdef iovec local
    cdef fi_msg message
    cdef int code
    while self.unsent != NULL and self.ep != NULL:
        piece = self.unsent
        local.iov_base = piece.memory
        local.iov_len = HEADER + (<PieceHeader*> piece.memory).length
        message.msg_iov = &local
        message.desc = &self.desc
        message.iov_count = 1
        message.addr = self.peer
        message.context = piece
        message.data = 0
        code = <int> fi_sendmsg(self.ep, &message, FI_COMPLETION)
        if code != 0:
            return code if code != -EAGAIN else 0
        self.unsent = piece.next
    return 0


cdef bint srd_owns_send(const Srd* self, const void* context) noexcept nogil:
    return <const PieceSend*> context >= self.pieces and <const PieceSend*> context < self.pieces + self.sends


cdef bint srd_owns_receive(const Srd* self, const void* context) noexcept nogil:
    return <const Buffer*> context >= self.posted and <const Buffer*> context < self.posted + self.buffers


cdef bint srd_sent(Srd* self, PieceSend* piece, int status, int provider_errno, Completion* out) noexcept nogil:
    """Take the end of a piece; if it was the last piece, report the message in `out` and return True."""
    cdef Outgoing* outgoing = outgoing_of(self, piece.wr)
    piece.next = self.spare_sends
    self.spare_sends = piece
    if outgoing == NULL:
        return False
    if status != 0:
        outgoing.status = status
        outgoing.provider_errno = provider_errno
    outgoing.pieces -= 1
    if outgoing.pieces:
        return False
    out.wr = outgoing.wr
    out.status = outgoing.status
    out.provider_errno = outgoing.provider_errno
    out.length = 0
    outgoing.wr = NULL
    return True


cdef void srd_spent(Srd* self, Buffer* buffer) noexcept nogil:
    """Make a consumed receive free, so that it is posted again."""
    buffer.next = self.spare
    self.spare = buffer


cdef int srd_received(Srd* self, Buffer* buffer, uint64_t length, Completion* out) noexcept nogil:
    """Take an arrived piece; return 1 if its message is complete and in `out`, 0 if not, or a negative error number."""
    cdef PieceHeader* header = <PieceHeader*> buffer.memory
    cdef Wanted* wanted = NULL
    cdef uint32_t i
    if (length < HEADER or header.length != length - HEADER or header.offset > header.total
            or header.length > header.total - header.offset or header.number == 0):
        srd_spent(self, buffer)
        return -EPROTO
    for i in range(self.wanted_count):
        if self.wanted[i].number == header.number:
            wanted = &self.wanted[i]
            break
        if self.wanted[i].number == 0 and wanted == NULL:
            wanted = &self.wanted[i]
    if wanted == NULL:
        buffer.next = self.held
        self.held = buffer
        return 0
    if wanted.number == 0:
        wanted.number = header.number
        wanted.total = header.total
    if header.total != wanted.total or header.total > wanted.length or wanted.got + header.length > wanted.total:
        srd_spent(self, buffer)
        return -EPROTO
    memcpy(wanted.memory + header.offset, buffer.memory + HEADER, header.length)
    wanted.got += header.length
    srd_spent(self, buffer)
    if wanted.got < wanted.total:
        return 0
    out.wr = wanted.wr
    out.status = out.provider_errno = 0
    out.length = wanted.total
    self.wanted_count -= 1
    wanted[0] = self.wanted[self.wanted_count]
    return 1


cdef int srd_held(Srd* self, Completion* out) noexcept nogil:
    """Take pieces that waited for a receive, until one completes a message; return as `srd_received` does."""
    cdef Buffer* buffer = self.held
    cdef Buffer* following
    cdef int got = 0
    self.held = NULL
    while buffer != NULL:
        following = buffer.next
        if got == 0:
            got = srd_received(self, buffer, HEADER + (<PieceHeader*> buffer.memory).length, out)
        else:
            buffer.next = self.held
            self.held = buffer
        buffer = following
    return got


cdef int take_srd(Srd* self, const fi_cq_data_entry* entry, Completion* out) noexcept nogil:
    """Take one completion of a receive or a piece; return 1 if `out` has an entry, 0, or a negative error number."""
    cdef int got
    out.status = out.provider_errno = 0
    out.length = entry.len
    if entry.flags & FI_REMOTE_CQ_DATA and (
            entry.op_context == NULL or srd_owns_receive(self, entry.op_context)):
        if entry.op_context != NULL:
            srd_spent(self, <Buffer*> entry.op_context)
        out.wr = NULL
        out.imm = <uint32_t> entry.data
        out.times = 1
        return 1
    if srd_owns_send(self, entry.op_context):
        return srd_sent(self, <PieceSend*> entry.op_context, 0, 0, out)
    if srd_owns_receive(self, entry.op_context):
        got = srd_received(self, <Buffer*> entry.op_context, entry.len, out)
        return got
    out.wr = <WorkRequest*> entry.op_context
    return 1


cdef int srd_poll(Srd* self, fid_cq* cq, Completion* out, int capacity) noexcept nogil:
    """Report ended and arrived messages and immediates, and post the consumed receives again at once."""
    cdef fi_cq_data_entry entries[POLL_BATCH]
    cdef ssize_t got
    cdef int i, code, found = 0
    code = srd_held(self, &out[0])
    if code != 0:
        return code
    # A batch may consist of pieces that complete no message; then read on.
    while found == 0:
        got = fi_cq_read(cq, entries, min(capacity, POLL_BATCH))
        if got == -FI_EAGAIN:
            return 0
        if got == -FI_EAVAIL:
            return take_srd_error(self, cq, out)
        if got < 0:
            return <int> got
        for i in range(<int> got):
            code = take_srd(self, &entries[i], &out[found])
            if code < 0:
                return code
            found += code
        code = srd_repost(self)
        code = code or srd_flush(self)
        if code != 0:
            return code
    return found


cdef int take_srd_error(Srd* self, fid_cq* cq, Completion* out) noexcept nogil:
    cdef fi_cq_err_entry entry
    memset(&entry, 0, sizeof(entry))
    if fi_cq_readerr(cq, &entry, 0) < 1:
        return 0
    cdef int status = -entry.err if entry.err != 0 else -EAGAIN
    if entry.op_context == NULL or srd_owns_receive(self, entry.op_context):
        return status
    if srd_owns_send(self, entry.op_context):
        return srd_sent(self, <PieceSend*> entry.op_context, status, entry.prov_errno, out)
    out.wr = <WorkRequest*> entry.op_context
    out.status = status
    out.provider_errno = entry.prov_errno
    out.length = 0
    return 1


# An endpoint for one peer, with its own address vector and completion queue.
#
# Each peer has an endpoint of its own, because closing it flushes and ends the operations with this peer and affects no
# other. Confirmed cancellation depends on that. The queue belongs to the endpoint as well, so that no stale entries are
# left in it after the close.
#
# Two endpoints of one process that are connected over shm share their memory, because 1.17 hands out the other's
# mapping instead of making one. A poll that meets anything of a closed endpoint then crashes. Each of the two therefore
# knows its twin, and closing one severs the other: the severed endpoint is neither polled nor posted to, and reports no
# completions until its owner learns of the loss and closes it.

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef enum:
    SRD_RECEIVES = 128   # for immediates and messages together
    SRD_SENDS = 64       # pieces of messages
    SHM_INJECTED = 4096  # writes of up to this many bytes go through shared memory, without a system call for each

# The open endpoints without a wait descriptor, which `find_twin` searches. Every engine of the process holds the lock
# while it polls, posts to or closes a twin.
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
    """Leave the list, and sever all twins of an endpoint that is about to be closed. The caller holds the lock."""
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
    """Post one operation. A severed endpoint returns -EAGAIN until its owner learns of the loss."""
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
    """Post one operation to an endpoint that is not severed.

    A completion means delivery if the provider can do that. By default, tcp reports completion when the socket buffer
    took the data; if the connection then breaks, tcp replaces it without an error, and that data is lost. Messages over
    shm are the exception: shm of 2.5.1 crashes in its own progress when both sides of a pair send with
    FI_DELIVERY_COMPLETE, and it has no connection that could lose them. Reads over shm ask for FI_DELIVERY_COMPLETE.
    Without it, the reader would at once copy from the other process whatever is at that address by now, although the
    owner may have closed its engine.
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
    """Post a write or a read of all SGEs. The upper half of an immediate's data is its number of parts less one."""
    cdef iovec local[MAX_SGE]
    cdef fi_rma_iov remote[MAX_SGE]
    cdef void* desc[MAX_SGE]
    cdef fi_msg_rma rma
    cdef int i
    # Pass one element even for a length of 0: without an element, some providers never complete (udp;ofi_rxd), and
    # others ignore the key.
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
        # Only this flag marks an arrived immediate, because the tcp of 1.17 sets neither FI_RMA nor a length with it.
        # aiote's messages carry no such data, so a receive cannot be mistaken for an immediate.
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
    """Shut down the sockets of an rxm endpoint; return whether it is one.

    In 1.17, closing an rxm endpoint reads the remaining completions as if all were its own operations'. An unread
    immediate has no context, so the process crashes. After the shutdown, no immediate arrives any more, and the
    operations in flight end with errors that are read in the ordinary way, so the close finds no completions.
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
        # If the endpoint has accepted a connection and not read its request, the close leaves it open and watched, by
        # rxm in 1.17 and by tcp in 2.5. In 2.5, a request that came later would use the freed listener.
        aiote_close_accepted(self.name, self.name_length)
    else:
        pthread_mutex_lock(&here_lock)
        sever_twin(self)
        # This endpoint must not be polled any more either, because the poll could meet freed memory.
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
    """Return how many SGEs a write may have: more than one if an immediate has room for the number of its parts.

    The smaller of both limits counts, because rxm has an `rma_iov_limit` of its own, and only its `iov_limit` is that
    of the core provider. efa states 4 for each limit but would emulate it; its immediates have 4 bytes.
    """
    if info.domain_attr.cq_data_size < 8:
        return 1
    return <int> min(info.tx_attr.iov_limit, info.tx_attr.rma_iov_limit, MAX_SGE)


@cython.no_gc_clear
cdef class LibfabricEndpoint(NativeEndpoint):
    """An enabled endpoint. The caller sends its `address` to the peer and gives the peer's to `connect`."""

    def __cinit__(self):
        self.impl = NULL

    def __dealloc__(self):
        self.drop(self.device)

    def __init__(self, LibfabricDevice device, bint waits=True, size_t queue=4096, str mark=""):
        """Open and enable the endpoint; `waits` asks for a wait descriptor, which shm does not have.

        The name of an endpoint without a descriptor begins with `mark` in /dev/shm, which must be unique to this
        process. Raises StatusError.
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
        # If each arrival needs a posted receive, a queue of this size cannot overflow.
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
            raise ValueError(f"the provider's address has {length} bytes, expected at most {NAME_BYTES}")
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
        """Post the receives that immediates and messages consume. Raises StatusError."""
        cdef uint64_t mtu = self.device.quirks.message_limit
        cdef size_t size = srd_bytes(SRD_RECEIVES, SRD_SENDS, mtu)
        cdef uint8_t[::1] memory
        self.pool_memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = self.pool_memory
        self.pool = self.device.register(<uint64_t> &memory[0], size, writable=True, access=0)
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
        """Open the endpoint. An endpoint that has a name in /dev/shm gets a name that is never used again.

        The provider would use a name of its own (process, number) again as soon as its endpoint is closed, so a peer
        that still has the old address would reach another peer's endpoint. Raises StatusError.
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
        """Set the one peer endpoint that this one talks to. Raises StatusError if the address is not accepted."""
        if self.impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        check_process(self.device.epoch)
        if not self.impl.waits:
            find_twin(self.impl, <const char*> address, len(address))
            if self.impl.twin == NULL and address.startswith(self.mark):
                # The address belongs to a closed endpoint of this process: shm of 2.5.1 keeps the name, and would crash
                # on the freed memory.
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
        """Return how many bytes its connections have received or seen acknowledged; -1 if the provider is not tcp.

        Looks through all descriptors of the process, because libfabric does not expose its sockets.
        """
        if not self.tcp or self.peer_address is None:
            return -1
        return aiote_moved(<const char*> self.address, len(self.address),
                           <const char*> self.peer_address, len(self.peer_address))

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl

    cdef NativeDevice device_of(self):
        return self.device
