"""The life of a channel: how it is made, shut after a failure, and closed.

`shut_channel` ends the endpoint and keeps the requests that it has lost, which the recovery does again or ends
(recovery.pyx). `close_channel` ends everything. When either returns, no byte moves through the endpoint any more.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from aiote_native.descriptors cimport unwatch_descriptor
from aiote_native.gates cimport batch_drop, gate_leave, gate_shut, gate_wait, is_reached
from aiote_native.mailbox_failover cimport mailbox_detach
from aiote_native.messages cimport CREDIT_SLOTS, mailbox_sent
from aiote_native.posting cimport give_back, op_completed, post_on
from aiote_native.progress cimport drain, request_over
from aiote_native.recovery cimport lose_request
from aiote_native.structs cimport Completion, ECANCELED, Mailbox, OP_WRITE, Op, Post, Slot, WorkRequest
from aiote_native.tallies cimport tally_free
from aiote_native.worklists cimport pend, unlist_channel

cdef enum:
    # The most work requests that the channels of one peer hold together, and the least that one of many channels holds:
    # enough to fill its wires, few enough to drain soon, and 40 KB for a peer however many rails there are.
    DEPTH = 256
    LEAST_DEPTH = 16
    DISCONNECT_ROUNDS = 20_000     # polls after a disconnect, while requests in flight end: some tens of milliseconds
    LAST_TURNS = 64                # times that a queue is drained before its endpoint is shut
    DISCONNECT_QUIET = 64          # empty polls in a row after which the queue counts as drained


cdef Channel* new_channel(uint64_t depth, int channels) except NULL:
    """Allocate one of a peer's `channels` channels, with its work requests: at most `depth`, which the provider's queue
    takes. Raises MemoryError.
    """
    cdef Channel* channel = <Channel*> calloc(1, sizeof(Channel))
    cdef void* pages
    if channel == NULL:
        raise MemoryError
    channel.depth = <uint32_t> min(depth, max(DEPTH // channels, LEAST_DEPTH))
    # Mapped, because pages that are never used then take no memory: of a thousand peers most are never written to.
    # calloc hands out recycled memory, and writes zeros to it.
    pages = mmap(NULL, channel.depth * sizeof(WorkRequest), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if pages == MAP_FAILED:
        free(channel)
        raise MemoryError
    channel.requests = <WorkRequest*> pages
    return channel


cdef void greet(Progress* engine, Channel* channel) noexcept nogil:
    """Post one write before the endpoint is first polled.

    shm of libfabric 2.5.1 maps a peer of the same process only while it answers that peer's connection request, and it
    sends no request of its own to a peer that it has answered. Commands in the other direction then carry an offset
    instead of an address and crash the process. If both sides ask before they answer, both are mapped.
    """
    cdef Post args
    args.opcode = OP_WRITE
    args.with_imm = False
    args.imm = 0
    args.local = channel.scratch
    args.desc = channel.scratch_desc
    args.length = channel.least
    args.payload = 0
    args.remote = channel.imm_address
    args.key = channel.imm_key
    args.part = args.stripe = 0
    args.parts = 1
    args.more_sge = 0
    args.phase = 0
    post_on(&engine.state, channel, &args, NULL)
    gate_leave(channel)


cdef bint holds_transfers(Channel* channel) noexcept nogil:
    cdef uint32_t i
    for i in range(channel.depth):
        if channel.requests[i].busy:
            return True
    return False


cdef void shut_endpoint(Progress* self, Channel* channel) noexcept nogil:
    """Drain the queue of the endpoint and shut the endpoint. The lock is held.

    The endpoint is not polled after it is shut, because tcp of libfabric 2.5.1 would then crash on the rest of a write
    that had failed.

    The gate is shut only where writes or reads are in flight, because a shut gate also keeps the peer from taking
    messages that were sent to it, and a completed send promises those. It is shut as well while the peer may not have
    taken our greeting yet: shm of 1.17 then looks for our memory, and crashes where that is gone. A peer that is still
    within its library after that may be copying from our memory, and a peer without a gate may still read bytes that
    its kernel was sent: such a peer is `unsettled`.
    """
    cdef int quiet = 0
    cdef bint held
    for _turn in range(LAST_TURNS):
        if drain(&self.state, channel) <= 0:
            break
    held = holds_transfers(channel)
    if channel.peer.greeting or held:
        gate_shut(channel)
        if not gate_wait(channel) and held:
            channel.peer.unsettled = True
            channel.peer.reached = channel.peer.reached or is_reached(channel)
    if channel.ops.disconnect(channel.impl):
        for _turn in range(DISCONNECT_ROUNDS):
            quiet = 0 if drain(&self.state, channel) else quiet + 1
            if quiet >= DISCONNECT_QUIET and channel.outstanding == 0:
                break
    channel.open = False
    unlist_channel(channel)
    self.state.channels -= 1
    if channel.wait_fd >= 0:
        unwatch_descriptor(self.epoll_fd, channel.wait_fd)
    channel.ops.shut(channel.impl)


cdef void shut_channel(Progress* self, Channel* channel) noexcept nogil:
    """Shut a failed channel, and keep the requests that it has lost. The lock is held."""
    cdef WorkRequest* wr
    cdef uint32_t i
    if not channel.open:
        return
    shut_endpoint(self, channel)
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if wr.busy and not wr.lost:
            lose_request(&self.state, wr, -ECANCELED, 0)
            forget_outstanding(self, channel)
    channel.in_flight = 0
    if channel.peer.mailbox != NULL and channel.peer.mailbox.channel == channel:
        for i in range(channel.peer.mailbox.transmit_slots):
            wr = &channel.peer.mailbox.transmit[i].wr
            if wr.busy and not wr.lost:
                forget_outstanding(self, channel)
        mailbox_detach(channel.peer.mailbox)
        pend(channel.peer)
    channel.ops.release(channel.impl)
    channel.impl = NULL
    if channel.waiting != NULL:
        channel.waiting[0] = 0


cdef void forget_outstanding(Progress* self, Channel* channel) noexcept nogil:
    channel.outstanding -= 1
    self.state.outstanding -= 1


cdef void close_channel(Progress* self, Channel* channel) noexcept nogil:
    """Shut the endpoint if it is open, end every request that has not ended, and free the channel. The lock is held."""
    cdef bint was_open = channel.open
    if was_open:
        shut_endpoint(self, channel)
    end_requests(self, channel)
    if was_open:
        channel.ops.release(channel.impl)
        if channel.waiting != NULL:
            channel.waiting[0] = 0
    self.state.ended[channel.rail] += channel.ended
    free_channel(channel)


cdef void free_channel(Channel* channel) noexcept nogil:
    batch_drop(channel.peer.batch, channel)
    tally_free(&channel.confirmed)
    tally_free(&channel.arrived)
    munmap(channel.requests, channel.depth * sizeof(WorkRequest))
    free(channel)


cdef void end_requests(Progress* self, Channel* channel) noexcept nogil:
    """End the requests that the provider had not reported when its endpoint was closed: no NIC holds them any more."""
    cdef Completion cancelled
    cdef WorkRequest* wr
    cdef Mailbox* mailbox = channel.peer.mailbox
    cdef uint32_t i
    cancelled.status = -ECANCELED
    cancelled.provider_errno = 0
    cancelled.length = 0
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if wr.busy and wr.lost:
            end_lost(self, channel, wr)
        elif wr.busy:
            request_over(&self.state, channel, wr, &cancelled)
    if mailbox != NULL and mailbox.channel == channel:
        for i in range(mailbox.slots + CREDIT_SLOTS):
            if mailbox.receive[i].wr.busy:
                request_over(&self.state, channel, &mailbox.receive[i].wr, &cancelled)
        for i in range(mailbox.transmit_slots):
            wr = &mailbox.transmit[i].wr
            if wr.busy and wr.lost:
                mailbox_sent(&self.state, mailbox, <Slot*> wr.owner, &cancelled)
            elif wr.busy:
                request_over(&self.state, channel, wr, &cancelled)


cdef void end_lost(Progress* self, Channel* channel, WorkRequest* wr) noexcept nogil:
    cdef Op* op = <Op*> wr.owner
    cdef int status = wr.status
    cdef int provider_errno = wr.provider_errno
    cdef uint64_t length = wr.length
    give_back(channel, wr)
    if op != NULL:
        op_completed(&self.state, op, status, provider_errno, channel.rail, length)
