"""Messages of a peer: credits, order and acknowledgement, also after a channel has failed."""

from libc.errno cimport EAGAIN, EIO, EPROTO
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from aiote_native.channels.failover cimport channel_fault
from aiote_native.engine.gates cimport gate_leave, gate_post
from aiote_native.engine.posting cimport op_end, op_fail, peer_fail
from aiote_native.engine.structs cimport BROKEN, ECANCELED, OP_RECV, OP_SEND, Op, Post, Slot
from aiote_native.engine.worklists cimport pend
from aiote_native.system.wakeups cimport wake_peer

# Two-sided messages between two engines, with credits.
#
# The receiver posts `slots` receive buffers for each peer, and reposts one when its message was taken. The sender has
# as many credits, so a sender that outruns the receiver waits in its own process, and no provider buffers or drops
# messages. Every message has a number. It also carries how many of the other direction's messages have been consumed,
# and up to which number all of them have come. These are running totals, so they may be late or repeated but never
# wrong; a sender sends at most one pool of messages beyond either of them. When half a pool was consumed, or has come,
# and no message flows back, the receiver sends a message of credits alone. At most four of those can be in flight,
# because each stands for half a pool of one total or the other, and neither total gets further than a pool before the
# first of them has arrived. Four more slots take them.
#
# The caller holds the engine's lock.

cdef enum Kind:
    DATA = 1
    CREDITS = 2

CREDIT_MESSAGES = CREDIT_SLOTS
"""Receives for messages of credits alone, beside those of the pool."""

cdef struct Header:
    uint32_t kind
    uint32_t length
    uint64_t consumed
    uint64_t number
    uint64_t floor


cdef uint32_t transmit_slots_of(uint32_t slots, uint32_t peer_slots) noexcept nogil:
    """Return how many messages to hold slots for: as many as the peer takes, because with several channels a message
    keeps its slot until the peer says that it came.
    """
    return (peer_slots if peer_slots > slots else slots) + CREDIT_SLOTS


cdef size_t mailbox_bytes(uint32_t slots, uint32_t peer_slots, uint32_t slot_bytes) noexcept nogil:
    return <size_t> (slots + CREDIT_SLOTS + transmit_slots_of(slots, peer_slots)) * slot_bytes


cdef Mailbox* mailbox_new(Channel* channel, uint32_t slots, uint32_t slot_bytes, uint32_t peer_slots, uint8_t* memory,
                          void* desc) except NULL:
    """Lay out both pools in `memory` (of mailbox_bytes): receive slots, then transmit slots. Raises MemoryError."""
    cdef Mailbox* self = <Mailbox*> calloc(1, sizeof(Mailbox))
    cdef uint32_t i
    cdef uint32_t count = slots + CREDIT_SLOTS
    if self == NULL:
        raise MemoryError
    self.transmit_slots = transmit_slots_of(slots, peer_slots)
    self.receive = <Slot*> calloc(count, sizeof(Slot))
    self.transmit = <Slot*> calloc(self.transmit_slots, sizeof(Slot))
    self.seen = <uint64_t*> calloc(slots, sizeof(uint64_t))
    if self.receive == NULL or self.transmit == NULL or self.seen == NULL:
        mailbox_free(self)
        raise MemoryError
    self.channel = channel
    self.slots = slots
    self.peer_slots = peer_slots
    self.slot_bytes = slot_bytes
    self.memory = memory
    self.desc = desc
    for i in range(count):
        prepare(self, &self.receive[i], memory + <size_t> i * slot_bytes, OP_RECV)
        self.receive[i].next = self.repost
        self.repost = &self.receive[i]
    for i in range(self.transmit_slots):
        prepare(self, &self.transmit[i], memory + <size_t> (count + i) * slot_bytes, OP_SEND)
        self.transmit[i].next = self.spare_transmit
        self.spare_transmit = &self.transmit[i]
    return self


cdef void prepare(Mailbox* self, Slot* slot, uint8_t* memory, int opcode) noexcept nogil:
    slot.memory = memory
    slot.wr.channel = self.channel
    slot.wr.owner = slot
    slot.wr.opcode = opcode


cdef void mailbox_free(Mailbox* self) noexcept nogil:
    if self != NULL:
        free(self.receive)
        free(self.transmit)
        free(self.seen)
        free(self)


cdef bint able(const Mailbox* self) noexcept nogil:
    """Return whether there is a channel to post to."""
    return self.channel != NULL and self.channel.open and not self.channel.paused


cdef void channel_broken(State* state, Mailbox* self, int code) noexcept nogil:
    """Treat a refused or failed message as the end of its channel, because it is unknown whether the message, and so
    its credit, arrived.
    """
    if self.channel.peer.survivable:
        channel_fault(state, self.channel, BROKEN, code)
    else:
        peer_fail(state, self.channel.peer, code, self.channel.rail)


cdef void post_receives(State* state, Mailbox* self) noexcept nogil:
    cdef Slot* slot
    cdef Post args
    cdef int code
    while self.repost != NULL and able(self):
        slot = self.repost
        args.opcode = OP_RECV
        args.local = slot.memory
        args.desc = self.desc
        args.length = self.slot_bytes
        slot.wr.busy = True
        code = gate_post(self.channel, &args, &slot.wr)
        gate_leave(self.channel)
        if code != 0:
            slot.wr.busy = False
            if code == -EAGAIN:
                state.blocked += 1
            else:
                channel_broken(state, self, code)
            return
        self.repost = slot.next
        slot.next = NULL


cdef int post_message(State* state, Mailbox* self, Kind kind, const void* payload, uint32_t length,
                      Op* op) noexcept nogil:
    cdef Slot* slot = self.spare_transmit
    cdef Header* header
    cdef int code
    if slot == NULL:
        return -EAGAIN
    header = <Header*> slot.memory
    header.kind = kind
    header.length = length
    header.number = self.numbered + 1 if kind == DATA else 0
    if length:
        memcpy(slot.memory + HEADER_BYTES, payload, length)
    slot.op = op
    slot.number = header.number
    slot.length = length
    code = post_slot(state, self, slot)
    if code == 0:
        self.spare_transmit = slot.next
        self.numbered += kind == DATA
    return code


cdef int post_slot(State* state, Mailbox* self, Slot* slot) noexcept nogil:
    """Post a message that already lies in its slot."""
    cdef Post args
    cdef int code
    (<Header*> slot.memory).consumed = self.consumed
    (<Header*> slot.memory).floor = self.floor
    args.opcode = OP_SEND
    args.local = slot.memory
    args.desc = self.desc
    args.length = HEADER_BYTES + slot.length
    slot.wr.busy = True
    slot.wr.lost = False
    slot.wr.length = slot.length
    code = gate_post(self.channel, &args, &slot.wr)
    gate_leave(self.channel)
    if code != 0:
        slot.wr.busy = False
        state.refused[self.channel.rail] += 1
        return code
    self.advertised = self.consumed
    self.advertised_floor = self.floor
    self.channel.outstanding += 1
    if self.channel.waiting != NULL:
        self.channel.waiting[0] = self.channel.outstanding
    state.outstanding += 1
    state.posted += 1
    state.events += 1
    if self.channel.peer_page != NULL:
        state.wakeups += wake_peer(self.channel, polled=False)
    return 0


cdef void send_queued(State* state, Mailbox* self) noexcept nogil:
    cdef Op* op
    cdef int code
    while (self.head != NULL and self.sent - self.granted < self.peer_slots
           and self.numbered - self.peer_floor < self.peer_slots):
        op = self.head
        code = post_message(state, self, DATA, <void*> op.local_address, <uint32_t> op.part_bytes, op)
        if code == -EAGAIN:
            state.blocked += 1
            return
        if code != 0 and self.channel.peer.survivable:
            channel_fault(state, self.channel, BROKEN, code)
            return
        self.head = op.next
        if self.head == NULL:
            self.tail = NULL
        else:
            self.head.prev = NULL
        op.next = NULL
        state.queued -= 1
        op.posted_all = True
        if code != 0:
            op_fail(state, op, code, self.channel.rail)
            continue
        op.rail = self.channel.rail
        op.outstanding = 1
        self.sent += 1


cdef bint owes_credits(const Mailbox* self) noexcept nogil:
    cdef uint64_t owed = max(self.consumed - self.advertised, self.floor - self.advertised_floor)
    return owed != 0 and owed * 2 >= self.slots


cdef bint mailbox_is_due(const Mailbox* self) noexcept nogil:
    """Return whether there is something to post, perhaps only once a channel, a slot or a credit is there."""
    return self.head != NULL or self.repost != NULL or self.resend != NULL or owes_credits(self)


cdef void send_credits(State* state, Mailbox* self) noexcept nogil:
    cdef int code
    if self.credits_in_flight >= CREDIT_SLOTS:
        return
    code = post_message(state, self, CREDITS, NULL, 0, NULL)
    if code == 0:
        self.credits_in_flight += 1
    elif code == -EAGAIN:
        state.blocked += 1
    else:
        channel_broken(state, self, code)


cdef void mailbox_open(State* state, Mailbox* self) noexcept nogil:
    post_receives(state, self)


cdef void mailbox_pump(State* state, Mailbox* self) noexcept nogil:
    """Repost receives, send messages that have credits, and give credits back where no message carries them."""
    if not able(self):
        return
    if self.repost != NULL:
        post_receives(state, self)
    if self.awaits_peer:
        return
    if self.resend != NULL:
        send_again(state, self)
    if self.head != NULL:
        send_queued(state, self)
    if owes_credits(self):
        send_credits(state, self)


cdef void mailbox_start(State* state, PeerState* peer, Op* op) noexcept nogil:
    """Queue one message. Its payload is copied when a credit and a slot are there."""
    cdef Mailbox* self = peer.mailbox
    op.peer = peer
    if peer.failed or self == NULL:
        op.posted_all = True
        op_fail(state, op, peer.error if peer.failed else -EIO, peer.error_rail)
        return
    op.next = NULL
    op.prev = self.tail
    if self.tail == NULL:
        self.head = op
    else:
        self.tail.next = op
    self.tail = op
    state.queued += 1
    pend(peer)
    if self.head == op:
        mailbox_pump(state, self)


cdef bint withdraw(State* state, Mailbox* self, Op* op) noexcept nogil:
    """Take a message out of the queue, and return True, unless it was posted."""
    if op.posted_all:
        return False
    if op.prev == NULL:
        self.head = op.next
    else:
        op.prev.next = op.next
    if op.next == NULL:
        self.tail = op.prev
    else:
        op.next.prev = op.prev
    op.next = op.prev = NULL
    state.queued -= 1
    op.posted_all = True
    return True


cdef void mailbox_cancel(State* state, Mailbox* self, Op* op) noexcept nogil:
    if withdraw(state, self, op):
        op.cancelled = True
        op_fail(state, op, -ECANCELED, -1)


cdef void free_arrived(Mailbox* self, uint64_t floor) noexcept nogil:
    """Free the slots of messages that have come and are over."""
    cdef Slot** link = &self.unsure
    cdef Slot* slot
    while link[0] != NULL:
        slot = link[0]
        if slot.number <= floor and slot.op == NULL:
            link[0] = slot.next
            slot.next = self.spare_transmit
            self.spare_transmit = slot
        else:
            link = &slot.next


cdef bint expected(const Mailbox* self, const Header* header) noexcept nogil:
    """Return whether a message is new and within the pool's credits."""
    if header.kind == CREDITS:
        return header.number == 0
    return (0 < header.number <= self.floor + self.slots
            and self.seen[header.number % self.slots] < header.number)


cdef void mailbox_received(State* state, Mailbox* self, Slot* slot, const Completion* completion) noexcept nogil:
    cdef Header* header = <Header*> slot.memory
    slot.wr.busy = False
    pend(self.channel.peer)
    if completion.status != 0:
        slot.next = self.repost
        self.repost = slot
        if self.channel.open:
            channel_broken(state, self, completion.status)
        return
    if (completion.length < HEADER_BYTES or header.length > completion.length - HEADER_BYTES
            or (header.kind != DATA and header.kind != CREDITS) or header.consumed > self.sent
            or header.floor > self.numbered
            or not expected(self, header)):
        slot.next = self.repost
        self.repost = slot
        peer_fail(state, self.channel.peer, -EPROTO, self.channel.rail)
        return
    if header.consumed > self.granted:
        self.granted = header.consumed
    if header.floor > self.peer_floor:
        self.peer_floor = header.floor
        free_arrived(self, header.floor)
    slot.next = NULL
    if header.kind == CREDITS:
        slot.next = self.repost
        self.repost = slot
        return
    self.seen[header.number % self.slots] = header.number
    if header.number > self.top:
        self.top = header.number
    while self.floor < self.top and self.seen[(self.floor + 1) % self.slots] == self.floor + 1:
        self.floor += 1
    slot.length = header.length
    if self.ready_tail == NULL:
        self.ready_head = slot
    else:
        self.ready_tail.next = slot
    self.ready_tail = slot
    self.ready += 1
    state.inbox += 1


cdef void mailbox_sent(State* state, Mailbox* self, Slot* slot, const Completion* completion) noexcept nogil:
    cdef Op* op = slot.op
    slot.wr.busy = False
    slot.op = NULL
    if self.channel.peer.survivable and slot.number > self.peer_floor:
        # With some providers a completion does not mean that the message came, so the channel may still lose it.
        slot.next = self.unsure
        self.unsure = slot
    else:
        slot.next = self.spare_transmit
        self.spare_transmit = slot
    if slot.number == 0:
        self.credits_in_flight -= 1
    elif op != NULL:
        op.outstanding = 0
        if completion.status == 0:
            op.confirmed = op.part_bytes
            op_end(state, op)
        else:
            op.provider_errno = completion.provider_errno
            op_fail(state, op, completion.status, self.channel.rail)
    # It is unknown whether a failed message arrived, and so is its credit: the pair of engines cannot go on.
    if completion.status != 0 and self.channel.open:
        peer_fail(state, self.channel.peer, completion.status, self.channel.rail)


cdef void send_again(State* state, Mailbox* self) noexcept nogil:
    cdef Slot* slot
    cdef int code
    while self.resend != NULL and able(self):
        slot = self.resend
        code = post_slot(state, self, slot)
        if code == -EAGAIN:
            state.blocked += 1
            return
        if code != 0:
            channel_broken(state, self, code)
            return
        self.resend = slot.next


cdef void end_slots(State* state, Slot* slot, int status, int rail) noexcept nogil:
    """End messages that were sent once and will never be sent again."""
    cdef Op* op
    while slot != NULL:
        op = slot.op
        slot.op = NULL
        slot = slot.next
        if op != NULL:
            op.outstanding = 0
            op_fail(state, op, status, rail)


cdef Slot* mailbox_peek(Mailbox* self) noexcept nogil:
    return self.ready_head


cdef void mailbox_consume(State* state, Mailbox* self) noexcept nogil:
    """Give the oldest message's slot back to the pool."""
    cdef Slot* slot = self.ready_head
    self.ready_head = slot.next
    if self.ready_head == NULL:
        self.ready_tail = NULL
    self.ready -= 1
    state.inbox -= 1
    self.consumed += 1
    slot.next = self.repost
    self.repost = slot
    mailbox_pump(state, self)


cdef void mailbox_fail(State* state, Mailbox* self, int status, int rail) noexcept nogil:
    """End every queued message of a lost peer."""
    cdef Op* op
    while self.head != NULL:
        op = self.head
        withdraw(state, self, op)
        op_fail(state, op, status, rail)
    end_slots(state, self.unsure, status, rail)
    end_slots(state, self.resend, status, rail)
    self.unsure = self.resend = NULL


# Move a mailbox to another channel after its own has failed, so that the peer still takes each message once.
#
# A message that was sent and is not known to have come is *unsure*. Once the peer has told which came, an unsure
# message is over, or is sent again with the number that it had. `aiote.core.failover` owns the protocol. The caller
# holds the engine's lock.


cdef void mailbox_detach(Mailbox* self) noexcept nogil:
    """Take every slot back from a channel that was shut. Messages that were sent and did not end well become unsure."""
    cdef Slot* slot
    cdef uint32_t i
    for i in range(self.slots + CREDIT_SLOTS):
        slot = &self.receive[i]
        if slot.wr.busy:
            slot.wr.busy = False
            slot.next = self.repost
            self.repost = slot
    for i in range(self.transmit_slots):
        slot = &self.transmit[i]
        if slot.wr.busy:
            slot.wr.busy = slot.wr.lost = False
            if slot.number == 0:
                slot.next = self.spare_transmit
                self.spare_transmit = slot
            else:
                slot.next = self.unsure
                self.unsure = slot
    self.credits_in_flight = 0
    # The peer may not have heard how much we consumed. That is a running total, so telling it again does no harm.
    self.advertised = self.advertised_floor = 0
    self.channel = NULL


cdef bint mailbox_resolve(State* state, Mailbox* self, uint64_t top, const uint64_t* holes,
                          uint64_t count) noexcept nogil:
    """Apply the peer's account of the messages that came; the others are sent again. Return False where it names
    messages that were never sent.
    """
    cdef Slot* slot
    cdef bint arrived
    cdef uint64_t i
    if top > self.numbered:
        return False
    while self.unsure != NULL:
        slot = self.unsure
        self.unsure = slot.next
        arrived = slot.number <= top
        for i in range(count):
            arrived = arrived and holes[i] != slot.number
        if arrived:
            message_arrived(state, self, slot)
        else:
            slot.next = self.resend
            self.resend = slot
    return True


cdef void message_arrived(State* state, Mailbox* self, Slot* slot) noexcept nogil:
    cdef Op* op = slot.op
    slot.op = NULL
    slot.next = self.spare_transmit
    self.spare_transmit = slot
    if op != NULL:
        op.outstanding = 0
        op.confirmed = op.part_bytes
        op_end(state, op)


cdef void mailbox_attach(State* state, Mailbox* self, Channel* channel, void* desc) noexcept nogil:
    """Go on over another channel. `mailbox_release` starts sending, because the peer may not listen there before."""
    cdef uint32_t i
    self.channel = channel
    self.desc = desc
    self.awaits_peer = True
    for i in range(self.slots + CREDIT_SLOTS):
        self.receive[i].wr.channel = channel
    for i in range(self.transmit_slots):
        self.transmit[i].wr.channel = channel
    post_receives(state, self)


cdef void mailbox_release(State* state, Mailbox* self) noexcept nogil:
    """Send over the new channel, because the peer listens there now."""
    self.awaits_peer = False
    mailbox_pump(state, self)


cdef uint64_t mailbox_arrivals(const Mailbox* self, uint64_t* seen) noexcept nogil:
    """Return the highest number of a message that came, and copy the table of arrivals to `seen`, of `slots` words."""
    if self == NULL:
        return 0
    memcpy(seen, self.seen, self.slots * sizeof(uint64_t))
    return self.top


cdef list mailbox_holes(uint64_t top, const uint64_t* seen, uint64_t slots):
    """Return the numbers of the messages up to `top` that did not come."""
    cdef uint64_t n
    return [n for n in range(top - slots + 1 if top >= slots else 1, top + 1) if seen[n % slots] != n]
