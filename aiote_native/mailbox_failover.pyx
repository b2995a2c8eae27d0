"""Move a mailbox to another channel after its own has failed, so that the peer still takes each message once.

A message that was sent and is not known to have come is *unsure*. Once the peer has told which came, an unsure message
is over, or is sent again with the number that it had. `aiote.core.failover` owns the protocol. The caller holds the
engine's lock.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from aiote_native.messages cimport CREDIT_SLOTS, mailbox_pump, post_receives
from aiote_native.posting cimport op_end
from aiote_native.structs cimport Op, Slot


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
