from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aiote_native.channels.failover cimport ChannelSet
from aiote_native.engine.progress cimport Progress
from aiote_native.engine.structs cimport Channel, Mailbox
from aiote_native.requests.operations cimport LocalMemory
from aiote_native.system.wakeups cimport PeerWakeup

cdef Channel* new_channel(uint64_t depth, int channels) except NULL
cdef void greet(Progress* engine, Channel* channel) noexcept nogil
cdef void shut_channel(Progress* self, Channel* channel) noexcept nogil
cdef void close_channel(Progress* self, Channel* channel) noexcept nogil
cdef void free_channel(Channel* channel) noexcept nogil

cdef class PeerLink(ChannelSet):
    cdef readonly object tag
    cdef public object peer
    cdef public bint ready
    cdef public uint64_t unfinished
    cdef public uint64_t limit
    cdef public object on_room
    cdef public bint is_room_due
    cdef readonly uint32_t message_limit
    cdef list peer_wakeups
    cdef list slots
    cdef LocalMemory mailbox_memory
    cdef readonly list leftover
    cdef void attach_wakeup(self, Channel* channel, PeerWakeup wakeup, int slot, int peer_slot,
                            uint32_t peer_generation)
    cdef void place_channel(self, Channel* channel, int number) noexcept nogil
    cdef int keep_messages(self, Mailbox* mailbox) except -1
    cdef void leave(self) noexcept nogil

cdef PeerLink open_peer(object core, Progress* engine, object tag)
