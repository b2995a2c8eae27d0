from libc.stdint cimport uint64_t

from aiote_native.sim.net cimport Net, Nic, SimPort, Work

cdef void plan_work(Net* net, Work* work) noexcept nogil
cdef void run_due(Net* net, uint64_t until) noexcept nogil
cdef void serve_queue(Net* net, SimPort* endpoint) noexcept nogil
cdef void close_works(Net* net, SimPort* endpoint) noexcept nogil
cdef void change_nic(Net* net, Nic* nic, int state) noexcept nogil
cdef void free_work(Net* net, Work* work) noexcept nogil
