"""Receives and messages of EFA's NICs: a pool that both immediates and messages consume, and messages in pieces.

With FI_RX_CQ_DATA each immediate consumes a posted receive; without a posted receive, it waits in the network. A
completion queue with room for all receives and all sends therefore cannot overflow. EFA's messages are at most one MTU
long. Each endpoint owns receives of the MTU's size; a consumed receive is posted again in the same batch. A mailbox's
message is sent in pieces with their offsets, and put together in the receive that the peer's mailbox has posted. Pieces
come in any order. The values in a piece's header are checked against the length of that receive.

The caller holds the engine's lock.
"""

from libc.errno cimport EAGAIN, EMSGSIZE, ENOTCONN, EPROTO
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from aiote_native.libfabric.fabric cimport (
    FI_ADDR_UNSPEC, FI_COMPLETION, FI_EAGAIN, FI_EAVAIL, FI_REMOTE_CQ_DATA, fi_cq_data_entry, fi_cq_err_entry,
    fi_cq_read, fi_cq_readerr, fi_msg, fi_recv, fi_sendmsg, iovec)
from aiote_native.structs cimport POLL_BATCH


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
