"""Two reliable connected queue pairs for one peer, with a completion queue and a completion channel to sleep on.

One pair carries writes and reads, the other one messages, because an arriving immediate uses up a receive of its pair
and must not use up a receive that was posted for a message. All peers of a NIC share the receives for immediates
(nic.pyx). The completion queue has room for all of these to be used up by this one peer, so it cannot overflow.
"""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy, memset

import os
import struct

from aiote_native.forks cimport check_process
from aiote_native.provider cimport NativeDevice
from aiote_native.verbs.ibverbs cimport (
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_LINK_LAYER_ETHERNET, IBV_QP_ACCESS_FLAGS, IBV_QP_AV,
    IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, ibv_qp_attr, ibv_qp_init_attr)
from aiote_native.verbs.nic cimport Nic
from aiote_native.verbs.queues cimport DATA_DEPTH, TEXT_DEPTH, operations
from aiote_native.verbs.symbols cimport failed, symbols

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
        self.make(&self.impl.data, True, depth, 0)
        self.make(&self.impl.text, False, min(depth, <uint32_t> TEXT_DEPTH), messages)
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

    cdef int make(self, Sends* sends, bint shared, uint32_t depth, uint32_t receives) except -1:
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
