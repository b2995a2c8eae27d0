"""Peers and their channels: how they begin, how they are watched, and how they end."""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.errno cimport EIO
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from aiote_native.channels.failover cimport lose_request
from aiote_native.channels.messages cimport (
    CREDIT_SLOTS, HEADER_BYTES, mailbox_attach, mailbox_bytes, mailbox_consume, mailbox_detach, mailbox_fail,
    mailbox_free, mailbox_new, mailbox_open, mailbox_peek, mailbox_release, mailbox_sent)
from aiote_native.counters.table cimport ranges_orphan, table_orphan, tally_free
from aiote_native.engine.gates cimport batch_drop, gate_leave, gate_shut, gate_wait, is_reached
from aiote_native.engine.posting cimport cost_of, give_back, op_completed, peer_fail, post_on
from aiote_native.engine.progress cimport (
    alive, announce, drain, kick, lock, request_over, time_channel, unlock, unwatch_descriptor, usable,
    watch_descriptor)
from aiote_native.engine.provider cimport NativeEndpoint
from aiote_native.engine.structs cimport (
    ECANCELED, MAX_CHANNELS, MAX_RAILS, OP_WRITE, Channel, Completion, Mailbox, Op, Post, Slot, WorkRequest)
from aiote_native.engine.worklists cimport list_channel, pend, unlist_channel, unpend
from aiote_native.requests.operations cimport LocalMemory
from aiote_native.system.wakeups cimport WAKEUP_SLOTS, PeerWakeup

# The life of a channel: how it is made, shut after a failure, and closed.
#
# `shut_channel` ends the endpoint and keeps the requests that it has lost, which the recovery does again or ends
# (failover.pyx). `close_channel` ends everything. When either returns, no byte moves through the endpoint any more.

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


# A peer in the native engine: its channels, its mailbox, and their end.


cdef PeerLink open_peer(object core, Progress* engine, object tag):
    cdef PeerLink link = PeerLink.__new__(PeerLink)
    usable(engine)
    link.core = core
    link.engine = engine
    link.tag = tag
    link.closed = False
    link.state.owner = <PyObject*> link
    link.state.batch = &engine.state.batch
    link.state.lists = &engine.state.lists
    link.state.timed = engine.clock == NULL
    with nogil:
        lock(engine)
        link.state.next_peer = engine.state.peers
        if engine.state.peers != NULL:
            engine.state.peers.prev_peer = &link.state
        engine.state.peers = &link.state
        unlock(engine)
    return link


cdef class PeerLink(ChannelSet):
    """The channels to one peer. `tag` and `peer` are the caller's own objects.

    While the link is `ready`, and fewer than `limit` requests are `unfinished`, requests start without the caller's
    consent (`requests/request.pyx`). While it is not `ready`, the core calls `on_room` when a request has ended.
    """

    def __cinit__(self):
        self.peer_wakeups = []
        self.slots = []
        self.leftover = []

    @property
    def failed(self) -> int:
        """The positive error number that the peer failed with, or 0."""
        return -self.state.error if self.state.failed else 0

    @property
    def failed_rail(self) -> int:
        return self.state.error_rail if self.state.failed else -1

    def add_channel(self, NativeEndpoint endpoint, int rail, int remote_rail, *, uint64_t imm_key,
                    uint64_t imm_address, LocalMemory scratch, uint64_t largest=0, uint64_t least=0,
                    PeerWakeup wakeup=None, int slot=-1, int peer_slot=-1, uint32_t peer_generation=0, int number=-1,
                    uint64_t speed_mbps=0) -> None:
        """Take over an endpoint that is connected to the peer's.

        `scratch` is local memory for operations that have none. `imm_key` and `imm_address` are the peer's target of an
        immediate alone, which carries `least` bytes. `largest` bounds a message below the provider's own limit.
        `wakeup` is the means to wake the peer; `slot` is a slot of our own page, and `peer_slot`, with its generation
        `peer_generation`, one of the peer's page. `number` names a channel that was shut, which this one replaces; it
        carries nothing before `admit`. `speed_mbps` is the speed that the NIC states (0: none), which counts until
        there is a measurement. Raises ValueError for numbers that do not exist, RuntimeError for a closed peer, for too
        many channels, and where channel `number` is not shut.
        """
        cdef Channel* channel
        cdef bint watched = False
        usable(self.engine)
        if number >= 0 and (number >= self.state.channel_count or self.state.channels[number].open):
            raise RuntimeError(f"channel {number} cannot be opened again: it is not shut, or there is none")
        if self.closed or (number < 0 and self.state.channel_count >= MAX_CHANNELS):
            raise RuntimeError(f"the peer is closed or has {MAX_CHANNELS} channels already")
        if not 0 <= rail < MAX_RAILS or not 0 <= remote_rail < MAX_CHANNELS:
            raise ValueError(
                f"rail {rail} to the peer's {remote_rail}: expected at most {MAX_RAILS - 1} and {MAX_CHANNELS - 1}")
        if peer_slot >= WAKEUP_SLOTS or slot >= WAKEUP_SLOTS:
            raise ValueError(f"wake-up slots {slot} and, of the peer, {peer_slot}: expected 0 to {WAKEUP_SLOTS - 1}")
        channel = new_channel(endpoint.depth, self.channels)
        channel.peer = &self.state
        channel.rail = rail
        channel.remote_rail = remote_rail
        channel.wait_fd = endpoint.wait_fd
        channel.cost = channel.nominal = cost_of(speed_mbps)
        channel.largest = min(largest, endpoint.largest) if largest else endpoint.largest
        channel.least = least
        channel.max_sge = endpoint.max_sge
        channel.window = endpoint.window
        channel.gathers_from = endpoint.gathers_from
        channel.forgets = endpoint.forgets
        channel.imm_key = imm_key
        channel.imm_address = imm_address
        channel.scratch = <void*> scratch.address
        channel.scratch_desc = scratch.descs[rail]
        channel.ops = endpoint.ops
        try:
            if wakeup is not None:
                self.attach_wakeup(channel, wakeup, slot, peer_slot, peer_generation)
            if endpoint.wait_fd >= 0:
                watch_descriptor(self.engine.epoll_fd, endpoint.wait_fd)
                watched = True
            channel.impl = endpoint.release_to_channel()
        except BaseException:
            if watched:
                unwatch_descriptor(self.engine.epoll_fd, endpoint.wait_fd)
            free_channel(channel)
            raise
        channel.open = True
        if self.engine.timed_every:
            time_channel(self.engine, channel)
        channel.paused = number >= 0
        if number >= 0:
            self.endpoints[number] = endpoint
        else:
            self.endpoints.append(endpoint)
        with nogil:
            lock(self.engine)
            self.place_channel(channel, number)
            kick(self.engine)
            unlock(self.engine)

    cdef void place_channel(self, Channel* channel, int number) noexcept nogil:
        """Let a channel take part, in place of a shut one if `number` names one."""
        self.engine.state.channels += 1
        if number >= 0:
            self.drop_notice(self.state.channels[number])
            self.engine.state.ended[self.state.channels[number].rail] += self.state.channels[number].ended
            free_channel(self.state.channels[number])
            self.state.channels[number] = channel
        else:
            self.state.channels[self.state.channel_count] = channel
            self.state.channel_count += 1
        list_channel(channel)
        announce(self.engine.epoll_fd, channel)
        if channel.wait_fd < 0:
            self.state.greeting = True
            greet(self.engine, channel)

    cdef void attach_wakeup(self, Channel* channel, PeerWakeup wakeup, int slot, int peer_slot,
                            uint32_t peer_generation):
        channel.peer_page = <const uint32_t*> wakeup.page
        channel.peer_wakeup_fd = wakeup.socket_fd
        channel.peer_wakeup_secret = wakeup.secret
        channel.peer_slot = peer_slot if peer_slot >= 0 else 0
        self.peer_wakeups.append((wakeup, peer_slot if slot >= 0 else -1))
        if slot >= 0:
            channel.waiting = &self.engine.wakeup_page.waiting[slot]
            self.slots.append(slot)
        if slot >= 0 and peer_slot >= 0:
            channel.own_gate = &self.engine.wakeup_page.gate[slot]
            channel.own_busy = &self.engine.wakeup_page.busy[slot]
            channel.peer_gate = &wakeup.page.gate[peer_slot]
            channel.peer_busy = &wakeup.page.busy[peer_slot]
            channel.peer_generation = peer_generation

    def record_greeting(self) -> None:
        """Record that the peer has made progress since we joined its endpoint, and so has looked at ours."""
        # Only the code that closes the link reads this, and it runs on the event loop, too.
        self.state.greeting = False

    def open_mailbox(self, LocalMemory memory, uint32_t slots, uint32_t message_bytes, uint32_t peer_slots,
                     uint32_t peer_message_bytes) -> None:
        """Post the receive pool: `slots` messages of `message_bytes`. The peer's numbers bound the messages sent to it.

        `memory` holds `pool_bytes(...)` and is closed with the link. Raises RuntimeError for a second mailbox or
        without a channel, ValueError for memory that is too short.
        """
        cdef uint32_t slot_bytes = max(message_bytes, peer_message_bytes) + HEADER_BYTES
        cdef Mailbox* mailbox
        usable(self.engine)
        if self.state.channel_count == 0 or self.state.mailbox != NULL:
            raise RuntimeError("the peer has no channel for a mailbox, or a mailbox already")
        if memory.length < mailbox_bytes(slots, peer_slots, slot_bytes):
            raise ValueError(
                f"the message pool has {memory.length} bytes, too few for {slots} and the peer's {peer_slots} messages")
        mailbox = mailbox_new(self.state.channels[0], slots, slot_bytes, peer_slots, <uint8_t*> memory.address,
                              memory.descs[self.state.channels[0].rail])
        self.mailbox_memory = memory
        self.message_limit = peer_message_bytes
        with nogil:
            lock(self.engine)
            self.state.mailbox = mailbox
            pend(&self.state)
            mailbox_open(&self.engine.state, mailbox)
            kick(self.engine)
            unlock(self.engine)

    def take_message(self, buffer=None) -> bytes | int | None:
        """Take the oldest message that arrived from this peer and give its slot back; None when there is none.

        With a `buffer`, copy the message there and return its length. Raises ValueError, and leaves the message where
        it is, if the buffer is shorter than the message.
        """
        cdef Slot* slot
        if self.leftover:
            payload = deliver(self.leftover[0], buffer)
            del self.leftover[0]
            return payload
        if self.closed or self.state.mailbox == NULL or not alive(self.engine):
            return None
        with nogil:
            lock(self.engine)
            slot = mailbox_peek(self.state.mailbox) if self.state.mailbox != NULL else NULL
            unlock(self.engine)
        if slot == NULL:
            return None
        # It stays the first one until it is consumed here, because later ones are put behind it.
        if buffer is None:
            payload = (<const char*> slot.memory)[HEADER_BYTES:HEADER_BYTES + slot.length]
        else:
            payload = store(slot.memory + HEADER_BYTES, slot.length, buffer)
        if self.state.mailbox == NULL or not alive(self.engine):
            return None
        with nogil:
            lock(self.engine)
            mailbox_consume(&self.engine.state, self.state.mailbox)
            pend(&self.state)
            kick(self.engine)
            unlock(self.engine)
        return payload

    @property
    def messages(self) -> int:
        """The number of messages that arrived and were not taken."""
        cdef uint64_t ready
        if self.leftover or self.closed or self.state.mailbox == NULL or not alive(self.engine):
            return len(self.leftover)
        with nogil:
            lock(self.engine)
            ready = self.state.mailbox.ready if self.state.mailbox != NULL else 0
            unlock(self.engine)
        return ready

    def fail(self, int errnum) -> None:
        """Give the peer up: queued work ends with this error; posted work ends when the link is closed."""
        if self.closed or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            peer_fail(&self.engine.state, &self.state, -errnum, -1)
            if self.state.mailbox != NULL:
                mailbox_fail(&self.engine.state, self.state.mailbox, -errnum, -1)
            kick(self.engine)
            unlock(self.engine)

    def close(self, int errnum=EIO) -> None:
        """End every channel; when this returns no byte moves to or from the peer, unless it is `unsettled`.

        Queued and posted work ends with an error at the next `Core.reap`. Messages that had arrived can still be taken.
        Idempotent.
        """
        cdef Mailbox* mailbox
        cdef int i
        if self.closed or not alive(self.engine):
            return
        self.fail(errnum)
        # Set at once, because another thread may call, too, while the GIL is released.
        self.closed = True
        with nogil:
            lock(self.engine)
            for i in range(self.state.channel_count):
                self.drop_notice(self.state.channels[i])
                close_channel(self.engine, self.state.channels[i])
            self.state.channel_count = 0
            mailbox = self.state.mailbox
            self.state.mailbox = NULL
            if mailbox != NULL:
                self.engine.state.inbox -= mailbox.ready
            self.leave()
            unlock(self.engine)
        if mailbox != NULL:
            self.keep_messages(mailbox)
        for endpoint in self.endpoints:
            if endpoint is not None:
                (<NativeEndpoint> endpoint).channel_closed()
        for wakeup, _slot in self.peer_wakeups:
            wakeup.close_socket()
        for slot in self.slots:
            self.core.wakeup_event.free_slot(slot)
        if self.mailbox_memory is not None:
            self.mailbox_memory.close()
        self.core.peers.pop(self, None)

    @property
    def mailbox_channel(self) -> int:
        """The channel that carries messages, or -1."""
        cdef int i
        for i in range(self.state.channel_count):
            if self.state.mailbox != NULL and self.state.mailbox.channel == self.state.channels[i]:
                return i
        return -1

    def move_mailbox(self, int number) -> None:
        """Receive messages over another channel; we send none there before `release_mailbox`."""
        cdef Channel* channel = self.channel_of(number)
        cdef void* desc = self.mailbox_memory.descs[channel.rail] if self.mailbox_memory is not None else NULL
        with nogil:
            lock(self.engine)
            if self.state.mailbox != NULL and channel.open:
                mailbox_attach(&self.engine.state, self.state.mailbox, channel, desc)
            kick(self.engine)
            unlock(self.engine)

    def release_mailbox(self) -> None:
        """Send messages there, too, because the peer receives there now."""
        if self.closed or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            if self.state.mailbox != NULL and self.state.mailbox.channel != NULL:
                mailbox_release(&self.engine.state, self.state.mailbox)
            kick(self.engine)
            unlock(self.engine)

    @property
    def quiet(self) -> bool:
        """Whether the peer is known to carry out nothing more of ours: the link is closed, every channel has a gate,
        the peer is not within any of them, and its GPUs copied nothing when they were shut. Without gates a peer is
        never known to be quiet.
        """
        return (self.closed and not self.state.reached and len(self.peer_wakeups) == len(self.endpoints)
                and not any(slot < 0 or (<PeerWakeup> wakeup).busy(slot) for wakeup, slot in self.peer_wakeups))

    @property
    def unsettled(self) -> bool:
        """Whether the peer may still carry out some of the work that was in flight at the close: it was in a call that
        did not end, or no gate keeps it out.
        """
        return self.state.unsettled

    cdef int keep_messages(self, Mailbox* mailbox) except -1:
        """Copy the messages that arrived and were not taken, because the pool's memory is about to be closed. Free the
        mailbox, which has no channel.
        """
        cdef Slot* slot = mailbox.ready_head
        try:
            while slot != NULL:
                self.leftover.append((<const char*> slot.memory)[HEADER_BYTES:HEADER_BYTES + slot.length])
                slot = slot.next
        finally:
            mailbox_free(mailbox)
        return 0

    cdef void leave(self) noexcept nogil:
        table_orphan(&self.engine.state.counters, &self.state)
        ranges_orphan(&self.engine.state.counters, &self.state)
        unpend(&self.state)
        if self.state.failed and not self.state.reported:
            self.state.reported = True
            self.engine.state.failures -= 1
        if self.state.prev_peer == NULL:
            self.engine.state.peers = self.state.next_peer
        else:
            self.state.prev_peer.next_peer = self.state.next_peer
        if self.state.next_peer != NULL:
            self.state.next_peer.prev_peer = self.state.prev_peer


cdef object store(const void* data, size_t length, buffer):
    """Copy a message into a buffer and return its length. Raises ValueError where the buffer is too short."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        if <size_t> view.len < length:
            raise ValueError(f"the message has {length} bytes, but the buffer only {view.len}")
        memcpy(view.buf, data, length)
    finally:
        PyBuffer_Release(&view)
    return length


cpdef object deliver(bytes data, buffer):
    """Return a message that was copied out of its pool before, as `take_message` does."""
    return data if buffer is None else store(<const char*> data, len(data), buffer)


def pool_bytes(uint32_t slots, uint32_t message_bytes, uint32_t peer_slots, uint32_t peer_message_bytes) -> int:
    """Return how many bytes of memory `open_mailbox` needs for these numbers."""
    return mailbox_bytes(slots, peer_slots, max(message_bytes, peer_message_bytes) + HEADER_BYTES)
