"""Queue pairs of libibverbs, and their endpoint."""

cimport cython
from libc.errno cimport EACCES, EAGAIN, ECONNABORTED, EFAULT, EIO, EMSGSIZE, ENOBUFS, ENOMEM, ENOTCONN, ETIMEDOUT
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import os
import struct

from aiote_native.cuda.driver cimport flush_writes
from aiote_native.engine.provider cimport NativeDevice
from aiote_native.engine.structs cimport ECANCELED, OP_READ, OP_RECV, OP_SEND, POLL_BATCH
from aiote_native.system.base cimport check_process
from aiote_native.verbs.ibverbs cimport (
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_LINK_LAYER_ETHERNET, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RTR,
    IBV_QPS_RTS, IBV_QPT_RC, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_SEND_INLINE, IBV_SEND_SIGNALED,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ABORT_ERR, IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, htonl,
    ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_req_notify_cq, ibv_sge,
    ntohl)
from aiote_native.verbs.nic cimport FLUSHED_DEVICES, NOT_INLINE, Flushes, Nic, failed, refill, symbols, verbs

# Post work requests to the queue pairs of one peer, and poll their completions.
#
# Work requests are chained until the end of a turn, and only some requests of a chain ask for a completion: in a
# reliable connected pair, all requests before a completed one are complete, too. When a request fails, the requests
# before it without a completion of their own may have arrived or not. They are reported as failed, and the count of
# immediates tells which of them arrived (docs/failover.md).

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


# Two reliable connected queue pairs for one peer, with a completion queue and a completion channel to sleep on.
#
# One pair carries writes and reads, the other one messages, because an arriving immediate uses up a receive of its pair
# and must not use up a receive that was posted for a message. All peers of a NIC share the receives for immediates
# (nic.pyx). The completion queue has room for all of these to be used up by this one peer, so it cannot overflow.

cdef object ADDRESS = struct.Struct("<BBBBH16sIIII")
cdef int VERSION = 1

cdef enum:
    MTU_CODES = 5        # code 1 is 256 bytes, code 5 is 4096
    MAX_READS = 16      # reads that the peer may have outstanding here; each takes memory of the NIC
    INLINE_BYTES = 128   # payloads up to this length travel in the work request, if the device supports that
    RNR_TIMER = 12       # a sender that found no receive tries again after 0.64 ms
    FOR_EVER = 7         # the code for unlimited retries, because a peer without posted receives has not failed
    HOPS = 64            # hop limit of routed packets


cdef class PeerAddress:
    """The contents of a peer's address, checked."""

    def __init__(self, bytes address):
        """Unpack the address. Raises ValueError unless an endpoint of this version can have made it."""
        if len(address) != ADDRESS.size:
            raise ValueError(f"the verbs address has {len(address)} bytes, expected {ADDRESS.size}")
        (version, self.mtu, self.reads, link, self.lid, self.gid, data, text, data_psn,
         text_psn) = ADDRESS.unpack(address)
        self.ethernet = link == 1
        self.numbers = (data, text)
        self.psns = (data_psn, text_psn)
        if (version != VERSION or not 1 <= self.mtu <= MTU_CODES or link > 1
                or max(data, text, data_psn, text_psn) >= 1 << 24):
            raise ValueError("the address is not a verbs address of this version: run one aiote at both engines")


@cython.no_gc_clear
cdef class VerbsEndpoint(NativeEndpoint):
    """The queue pairs for one peer. The caller sends their `address` to the peer and gives the peer's to `connect`."""

    def __cinit__(self):
        self.impl = NULL

    def __dealloc__(self):
        self.drop(self.device)

    def __init__(self, VerbsDevice device):
        """Make the two pairs. Raises StatusError."""
        if self.impl != NULL:
            raise RuntimeError("the endpoint is open already")
        device.opened()
        self.impl = <VerbsQueues*> calloc(1, sizeof(VerbsQueues))
        if self.impl == NULL:
            raise MemoryError
        self.impl.nic = &device.nic
        self.device = device
        device.children += 1
        self.ops = &operations
        self.largest = device.nic.port.max_msg_sz
        try:
            self.open()
        except BaseException:
            self.close()
            raise

    cdef int open(self) except -1:
        cdef Nic* nic = self.impl.nic
        cdef uint32_t depth = DATA_DEPTH
        cdef uint32_t messages = min(nic.settings.messages, nic.attr.max_qp_wr)
        while depth > <uint32_t> nic.attr.max_qp_wr:
            depth //= 2
        self.depth = depth
        self.impl.channel = symbols().create_comp_channel(nic.context)
        if self.impl.channel == NULL:
            failed("ibv_create_comp_channel")
        os.set_blocking(self.impl.channel.fd, False)
        # This peer may use up every shared receive between two polls, so the queue has room for all of them.
        entries = nic.receives + depth + TEXT_DEPTH + messages
        self.impl.cq = symbols().create_cq(nic.context, entries, NULL, self.impl.channel, 0)
        if self.impl.cq == NULL:
            failed("ibv_create_cq")
        self.make(&self.impl.data, depth, receives=0, shared=True)
        self.make(&self.impl.text, min(depth, <uint32_t> TEXT_DEPTH), receives=messages, shared=False)
        self.wait_fd = self.impl.channel.fd
        self.numbers = (self.impl.data.qp.qp_num, self.impl.text.qp.qp_num)
        # The first packet number of a pair is random, so that the pair does not accept packets that were sent to an
        # earlier pair with the same number.
        self.psns = (int.from_bytes(os.urandom(3), "little"), int.from_bytes(os.urandom(3), "little"))
        self.address = ADDRESS.pack(
            VERSION, self.path_mtu(), min(nic.attr.max_qp_rd_atom, MAX_READS, 255),
            nic.port.link_layer == IBV_LINK_LAYER_ETHERNET, nic.port.lid, bytes(nic.gid.raw[:16]),
            *self.numbers, *self.psns)
        return 0

    cdef int path_mtu(self) except -1:
        """Return the MTU code: the smaller one of the port's and the settings'."""
        cdef Nic* nic = &self.device.nic
        wanted = nic.settings.mtu.bit_length() - 8 if nic.settings.mtu else MTU_CODES
        return max(1, min(wanted, nic.port.active_mtu))

    cdef int make(self, Sends* sends, uint32_t depth, uint32_t receives, bint shared) except -1:
        """Make one pair and bring it to INIT. Raises StatusError.

        `shared`: the pair carries writes and reads, and its receives are the NIC's shared ones.
        """
        cdef Nic* nic = self.impl.nic
        cdef ibv_qp_init_attr init
        cdef ibv_qp_attr attr
        for wanted in (INLINE_BYTES, 0):
            memset(&init, 0, sizeof(init))
            init.send_cq = init.recv_cq = self.impl.cq
            init.srq = nic.srq if shared else NULL
            init.qp_type = IBV_QPT_RC
            init.cap.max_send_wr = depth
            init.cap.max_recv_wr = receives
            init.cap.max_send_sge = init.cap.max_recv_sge = 1
            init.cap.max_inline_data = wanted
            sends.qp = symbols().create_qp(nic.parent, &init)
            if sends.qp != NULL:
                break
        if sends.qp == NULL:
            failed("ibv_create_qp")
        sends.depth = depth
        sends.largest_inline = init.cap.max_inline_data
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_INIT
        attr.pkey_index = nic.settings.pkey_index
        attr.port_num = nic.number
        attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ if shared else 0
        code = symbols().modify_qp(sends.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT
                                   | IBV_QP_ACCESS_FLAGS)
        if code != 0:
            failed("ibv_modify_qp(INIT)", code)
        return 0

    def connect(self, bytes address) -> None:
        """Connect the pairs to the peer's pairs.

        Raises StatusError, and ValueError for a malformed address or if only one of the two ports is an Ethernet port.
        """
        if self.impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        check_process(self.device.epoch)
        peer = PeerAddress(address)
        if peer.ethernet != (self.impl.nic.port.link_layer == IBV_LINK_LAYER_ETHERNET):
            raise ValueError("one port is InfiniBand and the other Ethernet: name rails of one kind at both engines")
        self.bring_up(&self.impl.data, peer, peer.numbers[0], peer.psns[0], self.psns[0])
        self.bring_up(&self.impl.text, peer, peer.numbers[1], peer.psns[1], self.psns[1])

    cdef int bring_up(self, Sends* sends, PeerAddress peer, uint32_t remote, uint32_t remote_psn,
                      uint32_t own_psn) except -1:
        """Bring one pair to RTR (ready to receive), then to RTS (ready to send). Raises StatusError."""
        cdef Nic* nic = self.impl.nic
        cdef ibv_qp_attr attr
        cdef bytes gid = peer.gid
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_RTR
        attr.path_mtu = min(self.path_mtu(), peer.mtu)
        attr.dest_qp_num = remote
        attr.rq_psn = remote_psn
        attr.max_dest_rd_atomic = min(nic.attr.max_qp_rd_atom, MAX_READS)
        attr.min_rnr_timer = RNR_TIMER
        attr.ah_attr.dlid = peer.lid
        attr.ah_attr.sl = nic.settings.service_level
        attr.ah_attr.port_num = nic.number
        # Within one InfiniBand subnet the LID suffices; the first half of a GID is the number of the subnet.
        attr.ah_attr.is_global = peer.ethernet or gid[:8] != bytes(nic.gid.raw[:8])
        memcpy(attr.ah_attr.grh.dgid.raw, <const char*> gid, 16)
        attr.ah_attr.grh.sgid_index = nic.settings.gid_index
        attr.ah_attr.grh.hop_limit = HOPS
        attr.ah_attr.grh.traffic_class = nic.settings.traffic_class
        code = symbols().modify_qp(sends.qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
                                   | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
        if code != 0:
            failed("ibv_modify_qp(RTR)", code)
        attr.qp_state = IBV_QPS_RTS
        attr.timeout = nic.settings.timeout
        attr.retry_cnt = nic.settings.retries
        attr.rnr_retry = FOR_EVER
        attr.sq_psn = own_psn
        attr.max_rd_atomic = min(nic.attr.max_qp_init_rd_atom, peer.reads, 255)
        code = symbols().modify_qp(sends.qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY
                                   | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)
        if code != 0:
            failed("ibv_modify_qp(RTS)", code)
        return 0

    def owns(self, int queue) -> bool:
        """Return whether the queue pair with that number is one of the two."""
        return queue in self.numbers

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl

    cdef NativeDevice device_of(self):
        return self.device
