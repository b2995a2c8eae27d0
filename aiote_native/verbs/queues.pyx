"""Post work requests to the queue pairs of one peer, and poll their completions.

Work requests are chained until the end of a turn, and only some requests of a chain ask for a completion: in a reliable
connected pair, all requests before a completed one are complete, too. When a request fails, the requests before it
without a completion of their own may have arrived or not. They are reported as failed, and the count of immediates
tells which of them arrived (docs/failover.md).
"""

from libc.errno cimport (
    EACCES, EAGAIN, ECONNABORTED, EFAULT, EIO, EMSGSIZE, ENOBUFS, ENOMEM, ENOTCONN, ETIMEDOUT)
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from aiote_native.cuda.flushing cimport flush_writes
from aiote_native.structs cimport ECANCELED, OP_READ, OP_RECV, OP_SEND, POLL_BATCH
from aiote_native.verbs.ibverbs cimport (
    IBV_QP_STATE, IBV_QPS_ERR, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ABORT_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, htonl, ibv_poll_cq, ibv_post_recv,
    ibv_post_send, ibv_qp_attr, ibv_recv_wr, ibv_req_notify_cq, ibv_sge, ntohl)
from aiote_native.verbs.nic cimport FLUSHED_DEVICES, Flushes, NOT_INLINE, refill
from aiote_native.verbs.symbols cimport verbs

cdef extern from "<errno.h>" nogil:
    const int EREMOTEIO

cdef enum:
    LKEY_MASK = 0xFFFFFFFF


cdef int error_of(int status) noexcept nogil:
    """Return the error number that stands for the status of a completion."""
    if status == IBV_WC_WR_FLUSH_ERR:
        return ECANCELED
    if status == IBV_WC_RETRY_EXC_ERR:
        return ETIMEDOUT
    if status == IBV_WC_REM_ACCESS_ERR:
        return EACCES
    if status == IBV_WC_RNR_RETRY_EXC_ERR:
        return ENOBUFS
    if status == IBV_WC_LOC_LEN_ERR:
        return EMSGSIZE
    if status == IBV_WC_LOC_PROT_ERR:
        return EFAULT
    if status == IBV_WC_REM_INV_REQ_ERR or status == IBV_WC_REM_OP_ERR:
        return EREMOTEIO
    if status == IBV_WC_REM_ABORT_ERR:
        return ECONNABORTED
    return EIO


cdef int flush(void* impl) noexcept nogil:
    """Post the chain; return 0 or a negative error number."""
    cdef VerbsQueues* self = <VerbsQueues*> impl
    cdef ibv_send_wr* bad = NULL
    cdef uint32_t links = self.links
    cdef int code
    if links == 0:
        return 0
    self.links = 0
    self.wrs[links - 1].next = NULL
    self.wrs[links - 1].send_flags |= IBV_SEND_SIGNALED
    code = ibv_post_send(self.chained.qp, self.wrs, &bad)
    if code != 0:
        # The requests that were not posted will never have a completion, so the endpoint is broken and everything
        # outstanding on it is lost.
        self.broken = -code
    return -code


cdef int post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef VerbsQueues* self = <VerbsQueues*> impl
    cdef Sends* sends
    cdef int code
    if args.opcode == OP_RECV:
        return post_receive(self, args, wr)
    sends = &self.text if args.opcode == OP_SEND else &self.data
    if self.broken != 0:
        return -ENOTCONN
    if sends.head - sends.tail >= sends.depth:
        return -EAGAIN
    if self.links and (self.chained != sends or self.links == CHAIN):
        code = flush(self)
        if code != 0:
            return -ENOTCONN
    describe(self, sends, args, wr)
    self.chained = sends
    self.links += 1
    sends.ring[sends.head & (sends.depth - 1)] = wr
    sends.head += 1
    return 0


cdef void describe(VerbsQueues* self, Sends* sends, const Post* args, WorkRequest* wr) noexcept nogil:
    """Fill in the next work request of the chain."""
    cdef ibv_send_wr* out = &self.wrs[self.links]
    cdef uintptr_t desc = <uintptr_t> args.desc
    out.wr_id = <uintptr_t> wr
    out.next = &self.wrs[self.links + 1] if self.links + 1 < CHAIN else NULL
    out.sg_list = &self.sges[self.links]
    out.num_sge = 1 if args.length else 0
    out.send_flags = IBV_SEND_SIGNALED if self.links % SIGNALLED == SIGNALLED - 1 else 0
    self.sges[self.links].addr = <uintptr_t> args.local
    self.sges[self.links].length = <uint32_t> args.length
    self.sges[self.links].lkey = <uint32_t> (desc & LKEY_MASK)
    if args.opcode == OP_SEND:
        out.opcode = IBV_WR_SEND
    elif args.opcode == OP_READ:
        out.opcode = IBV_WR_RDMA_READ
    elif args.with_imm:
        out.opcode = IBV_WR_RDMA_WRITE_WITH_IMM
        out.imm_data = htonl(args.imm)
    else:
        out.opcode = IBV_WR_RDMA_WRITE
    if args.opcode != OP_SEND:
        out.wr.rdma.remote_addr = args.remote
        out.wr.rdma.rkey = <uint32_t> args.key
    if 0 < args.length <= sends.largest_inline and args.opcode != OP_READ and not desc >> 32 & NOT_INLINE:
        out.send_flags |= IBV_SEND_INLINE


cdef int post_receive(VerbsQueues* self, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef ibv_recv_wr one
    cdef ibv_recv_wr* bad = NULL
    cdef ibv_sge sge
    cdef int code
    sge.addr = <uintptr_t> args.local
    sge.length = <uint32_t> args.length
    sge.lkey = <uint32_t> (<uintptr_t> args.desc & LKEY_MASK)
    one.wr_id = <uintptr_t> wr
    one.next = NULL
    one.sg_list = &sge
    one.num_sge = 1
    code = ibv_post_recv(self.text.qp, &one, &bad)
    return 0 if code == 0 else -EAGAIN if code == ENOBUFS or code == ENOMEM else -code


cdef int poll(void* impl, Completion* out, int capacity) noexcept nogil:
    """Take completions. A failed work completion defines only `wr_id` and `status`."""
    cdef VerbsQueues* self = <VerbsQueues*> impl
    cdef int made = 0
    cdef int got
    if capacity > POLL_BATCH:
        capacity = POLL_BATCH
    while made < capacity:
        if self.taken_at == self.taken_count:
            got = ibv_poll_cq(self.cq, TAKEN, self.taken)
            if got <= 0:
                self.taken_at = self.taken_count = 0
                if got < 0:
                    self.broken = -EIO
                break
            self.taken_at = 0
            self.taken_count = got
            self.stirred = True
        while self.taken_at < self.taken_count and made < capacity:
            if translate(self, &self.taken[self.taken_at], out, &made, capacity):
                self.taken_at += 1
        if self.taken_count < TAKEN and self.taken_at == self.taken_count:
            break
    if made and self.nic.flushes.all_uses and not flush_arrived(&self.nic.flushes, out, &made):
        self.broken = -EIO
    if self.nic.missing >= self.nic.refill:
        got = refill(self.nic)
        if got != 0:
            self.broken = got
    return made if made or self.broken == 0 else self.broken


cdef bint flush_arrived(const Flushes* flushes, Completion* out, int* made) noexcept nogil:
    """Flush arrived writes and read data to the GPUs before their completions are reported.

    Return False where a driver refuses: the immediates are then removed from `out`, and the reads in it are failed.
    """
    cdef bint arrived = False
    cdef int code = 0
    cdef int kept = 0
    cdef int i
    for i in range(made[0]):
        arrived = arrived or (out[i].status == 0 and (out[i].wr == NULL or out[i].wr.opcode == OP_READ))
    if not arrived:
        return True
    for i in range(FLUSHED_DEVICES):
        if flushes.uses[i] and code == 0:
            code = flush_writes(flushes.contexts[i])
    if code == 0:
        return True
    for i in range(made[0]):
        if out[i].wr != NULL:
            out[kept] = out[i]
            if out[kept].wr.opcode == OP_READ:
                out[kept].status = -EIO
            kept += 1
    made[0] = kept
    return False


cdef bint translate(VerbsQueues* self, const ibv_wc* wc, Completion* out, int* made, int capacity) noexcept nogil:
    """Translate one work completion into `out`; return False where `out` has no room yet for all that it reports."""
    cdef WorkRequest* wr = <WorkRequest*> <uintptr_t> wc.wr_id
    cdef Completion* one = &out[made[0]]
    if wr == NULL:
        self.nic.missing += 1
        if wc.status == IBV_WC_SUCCESS and wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM:
            one.wr = NULL
            one.status = one.provider_errno = 0
            one.imm = ntohl(wc.imm_data)
            one.times = 1
            one.length = wc.byte_len
            made[0] += 1
        return True
    if wr.opcode != OP_RECV:
        return retire(&self.text if wr.opcode == OP_SEND else &self.data, wr, wc.status, out, made, capacity)
    if wc.status != IBV_WC_SUCCESS and self.dying:
        return True
    ended(one, wr, wc.status)
    one.length = wc.byte_len if wc.status == IBV_WC_SUCCESS else 0
    made[0] += 1
    return True


cdef bint retire(Sends* sends, WorkRequest* last, int status, Completion* out, int* made, int capacity) noexcept nogil:
    """Report all sends up to `last` with its status; return False where `out` has no room for all of them."""
    cdef WorkRequest* wr
    cdef uint32_t i = sends.tail
    if status != IBV_WC_SUCCESS:
        # A send that was already reported is no longer in the ring; its failure fails no other send.
        while i != sends.head and sends.ring[i & (sends.depth - 1)] != last:
            i += 1
        if i == sends.head:
            return True
    while sends.tail != sends.head:
        if made[0] == capacity:
            return False
        wr = sends.ring[sends.tail & (sends.depth - 1)]
        sends.tail += 1
        ended(&out[made[0]], wr, status)
        made[0] += 1
        if wr == last:
            break
    return True


cdef void ended(Completion* out, WorkRequest* wr, int status) noexcept nogil:
    out.wr = wr
    out.status = -error_of(status) if status != IBV_WC_SUCCESS else 0
    out.provider_errno = status
    out.length = 0


cdef int arm(void* impl) noexcept nogil:
    """Ask for an event on the descriptor; return 0 when it is safe to sleep, and 1 when the caller has to drain again.

    Completions may have come just before the request for the event, so the call that makes it returns 1.
    """
    cdef VerbsQueues* self = <VerbsQueues*> impl
    cdef ibv_cq* cq = NULL
    cdef void* context = NULL
    if self.taken_at < self.taken_count:
        return 1
    if self.armed and not self.stirred:
        return 0
    if self.armed:
        if verbs.get_cq_event(self.channel, &cq, &context) != 0:
            return 0
        verbs.ack_cq_events(cq, 1)
        self.armed = self.stirred = False
    if ibv_req_notify_cq(self.cq, 0) != 0:
        self.broken = -EIO
    self.armed = True
    return 1


cdef bint disconnect(void* impl) noexcept nogil:
    """Put both pairs into the error state: nothing more is sent or received, and all posted requests complete."""
    cdef VerbsQueues* self = <VerbsQueues*> impl
    cdef ibv_qp_attr attr
    flush(self)
    self.dying = True
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_ERR
    verbs.modify_qp(self.data.qp, &attr, IBV_QP_STATE)
    verbs.modify_qp(self.text.qp, &attr, IBV_QP_STATE)
    return True


cdef void shut(void* impl) noexcept nogil:
    cdef VerbsQueues* self = <VerbsQueues*> impl
    if self.data.qp != NULL:
        verbs.destroy_qp(self.data.qp)
    if self.text.qp != NULL:
        verbs.destroy_qp(self.text.qp)
    self.data.qp = self.text.qp = NULL


cdef void release(void* impl) noexcept nogil:
    cdef VerbsQueues* self = <VerbsQueues*> impl
    shut(impl)
    give_receives_back(self)
    if self.cq != NULL:
        verbs.destroy_cq(self.cq)
    if self.channel != NULL:
        verbs.destroy_comp_channel(self.channel)
    free(self)


cdef void give_receives_back(VerbsQueues* self) noexcept nogil:
    """Count the shared receives that unreported arrivals have used up, and post them again."""
    cdef ibv_wc wc
    if self.cq == NULL:
        return
    while self.taken_at < self.taken_count:
        self.nic.missing += self.taken[self.taken_at].wr_id == 0
        self.taken_at += 1
    while ibv_poll_cq(self.cq, 1, &wc) == 1:
        self.nic.missing += wc.wr_id == 0
    if refill(self.nic) != 0:
        self.broken = -EIO


cdef RailOps operations
operations.post = post
operations.flush = flush
operations.poll = poll
operations.arm = arm
operations.disconnect = disconnect
operations.shut = shut
operations.release = release
