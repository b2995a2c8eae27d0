"""The times during which NICs are busy: with one operation after the other, or with a packet of each in turn.

If the model has no `packet`, a NIC sends a write as a whole, and the times of both NICs are known when it is posted.
With `packet`, a NIC sends one packet of each of its writes in turn, as RDMA NICs serve their queue pairs, and the other
NIC receives packets in the order in which they leave. Messages and immediates take turns as well. A read is always sent
as a whole.

The caller holds the network's lock.
"""

from libc.math cimport pow, sqrt
from libc.stdint cimport uint64_t

from aiote_native.sim.net cimport Model, Net, Nic, Work, net_now, put


cdef uint64_t service(const Model* model, uint64_t length) noexcept nogil:
    """Return for how many nanoseconds a NIC is busy with one operation."""
    cdef double own = <double> model.operation
    cdef double bytes_ = <double> length * model.per_byte
    if model.overlap <= 0:
        return <uint64_t> (own if own > bytes_ else bytes_)
    if model.overlap == 2:
        return <uint64_t> sqrt(own * own + bytes_ * bytes_)
    return <uint64_t> pow(pow(own, model.overlap) + pow(bytes_, model.overlap), 1 / model.overlap)


cdef uint64_t later(uint64_t a, uint64_t b) noexcept nogil:
    return a if a > b else b


cdef uint64_t send_through(Nic* nic, uint64_t ready, uint64_t length) noexcept nogil:
    """Occupy a NIC's sending side; return when the last byte has left it."""
    cdef uint64_t left = later(ready, nic.sends_free) + service(&nic.model, length)
    nic.sends_free = left
    return left


cdef uint64_t take_through(Nic* nic, uint64_t arrives, uint64_t length) noexcept nogil:
    """Occupy a NIC's receiving side, which receives while the other sends; return when the last byte is in memory."""
    cdef uint64_t wire = <uint64_t> (<double> length * nic.model.per_byte)
    cdef uint64_t there = later(arrives, nic.takes_free + wire)
    if wire:
        nic.takes_free = there
    return there + nic.slow


cdef uint64_t packet_of(const Work* work) noexcept nogil:
    """Return the length of a write's next packet in bytes."""
    return work.left if work.left < work.nic.model.packet else work.nic.model.packet


cdef void set_out(Net* net, Work* work) noexcept nogil:
    """Schedule the end of sending the next packet. The first packet also takes the operation's own time."""
    cdef const Model* model = &work.nic.model
    cdef uint64_t takes = <uint64_t> (<double> packet_of(work) * model.per_byte)
    if work.left == work.length:
        takes += service(model, work.length) - <uint64_t> (<double> work.length * model.per_byte)
    put(net, &work.item, net_now(net) + takes)


cdef void take_turns(Net* net, Work* work) noexcept nogil:
    """Append a write to the writes that a NIC sends in turn."""
    cdef Nic* nic = work.nic
    work.left = work.length
    append(nic, work)
    if nic.turns == work:
        set_out(net, work)


cdef void append(Nic* nic, Work* work) noexcept nogil:
    work.in_turn = True
    work.turn = NULL
    if nic.turns == NULL:
        nic.turns = work
    else:
        nic.last_turn.turn = work
    nic.last_turn = work


cdef uint64_t next_turn(Net* net, Work* work) noexcept nogil:
    """Pass on a packet that has left its NIC, and start the next write's turn; return when the packet arrives."""
    cdef Nic* nic = work.nic
    cdef Nic* far = work.far if work.far != NULL else nic
    cdef uint64_t bytes_ = packet_of(work)
    cdef uint64_t now = net_now(net)
    cdef uint64_t there = take_through(far, now + nic.model.latency, bytes_)
    nic.turns = work.turn
    work.turn = NULL
    work.in_turn = False
    work.left -= bytes_
    if work.left:
        append(nic, work)
    else:
        work.sent = now
    if nic.turns != NULL:
        set_out(net, nic.turns)
    return there


cdef void leave_turns(Net* net, Work* work) noexcept nogil:
    """Remove a write from its NIC's turns. If it was its turn, the next write has it."""
    cdef Nic* nic = work.nic
    cdef Work* before = NULL
    cdef Work* other = nic.turns
    if not work.in_turn:
        return
    while other != work:
        before = other
        other = other.turn
    work.in_turn = False
    if nic.last_turn == work:
        nic.last_turn = before
    if before != NULL:
        before.turn = work.turn
        return
    nic.turns = work.turn
    if nic.turns != NULL:
        set_out(net, nic.turns)
