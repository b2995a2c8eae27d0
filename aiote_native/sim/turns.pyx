"""How long NICs are busy, and with what: one operation after the other, or a packet of each in turn.

Where the model has no `packet`, a NIC sends a write as a whole, and both NICs' times are known when it is posted. With
`packet` a NIC serves the writes that it was given in turns, a packet of each, as RDMA NICs serve their queue pairs; the
other NIC takes packets in the order in which they leave. Messages and immediates take turns as well. A read is always
sent as a whole.

The caller holds the network's lock.
"""

from libc.math cimport pow, sqrt
from libc.stdint cimport uint64_t

from aiote_native.sim.net cimport Model, Net, Nic, Work, net_now, put


cdef uint64_t service(const Model* model, uint64_t length) noexcept nogil:
    """Nanoseconds that a NIC is busy with one operation."""
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
    """Occupy a NIC's receiving side, which takes while the other sends; return when the last byte is in memory."""
    cdef uint64_t wire = <uint64_t> (<double> length * nic.model.per_byte)
    cdef uint64_t there = later(arrives, nic.takes_free + wire)
    if wire:
        nic.takes_free = there
    return there + nic.slow


cdef uint64_t packet_of(const Work* work) noexcept nogil:
    """Return the bytes of a write's next packet."""
    return work.left if work.left < work.nic.model.packet else work.nic.model.packet


cdef void set_out(Net* net, Work* work) noexcept nogil:
    """Put the time at which the next packet will have left; the first one takes what the operation itself takes."""
    cdef const Model* model = &work.nic.model
    cdef uint64_t takes = <uint64_t> (<double> packet_of(work) * model.per_byte)
    if work.left == work.length:
        takes += service(model, work.length) - <uint64_t> (<double> work.length * model.per_byte)
    put(net, &work.item, net_now(net) + takes)


cdef void take_turns(Net* net, Work* work) noexcept nogil:
    """Add a write behind those that a NIC sends."""
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
    """Take a packet that has left a NIC as received; return when it is there. It is the next write's turn then."""
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
    """Take a write out of its NIC's turns; where it was its own, the next one has it."""
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
