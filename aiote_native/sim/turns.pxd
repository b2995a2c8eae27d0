from libc.stdint cimport uint64_t

from aiote_native.sim.net cimport Net, Nic, Work

cdef uint64_t later(uint64_t a, uint64_t b) noexcept nogil
cdef uint64_t send_through(Nic* nic, uint64_t ready, uint64_t length) noexcept nogil
cdef uint64_t take_through(Nic* nic, uint64_t arrives, uint64_t length) noexcept nogil
cdef void take_turns(Net* net, Work* work) noexcept nogil
cdef uint64_t next_turn(Net* net, Work* work) noexcept nogil
cdef void leave_turns(Net* net, Work* work) noexcept nogil
