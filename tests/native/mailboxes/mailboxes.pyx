# cython: language_level=3, boundscheck=False
"""A mailbox on a rail that delivers whatever bytes the test says, as a peer that breaks the rules may send them."""

from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from aiote_native.channels.messages cimport (
    HEADER_BYTES, mailbox_bytes, mailbox_consume, mailbox_free, mailbox_new, mailbox_open, mailbox_peek)
from aiote_native.engine.core cimport Core
from aiote_native.engine.progress cimport progress_once
from aiote_native.engine.structs cimport OP_RECV, Channel, Completion, PeerState, Post, RailOps, Slot, WorkRequest
from aiote_native.engine.worklists cimport list_channel

cdef enum:
    SLOTS = 4
    SLOT_BYTES = 64

cdef struct Rail:
    Channel channel
    PeerState peer
    WorkRequest* posted[64]
    void* places[64]
    int count
    Completion next
    bint waiting


cdef int post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Rail* rail = <Rail*> impl
    if args.opcode == OP_RECV:
        rail.posted[rail.count] = wr
        rail.places[rail.count] = args.local
        rail.count += 1
    return 0


cdef int poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef Rail* rail = <Rail*> impl
    if not rail.waiting:
        return 0
    rail.waiting = False
    out[0] = rail.next
    return 1


cdef int arm(void* impl) noexcept nogil:
    return 0


cdef RailOps operations
operations.post = post
operations.poll = poll
operations.arm = arm


def deliver(list messages):
    """Deliver each as one received message, and take what comes out; returns the payloads, and how the peer failed."""
    cdef Core core = Core(spin_us=0)
    cdef Rail* rail = <Rail*> calloc(1, sizeof(Rail))
    cdef uint8_t* memory = <uint8_t*> calloc(1, mailbox_bytes(SLOTS, SLOTS, SLOT_BYTES))
    cdef Slot* slot
    cdef bytes data
    taken = []
    rail.channel.ops = &operations
    rail.channel.impl = rail
    rail.channel.peer = &rail.peer
    rail.channel.open = True
    rail.channel.wait_fd = 0
    rail.peer.channels[0] = &rail.channel
    rail.peer.channel_count = 1
    rail.peer.mailbox = mailbox_new(&rail.channel, SLOTS, SLOT_BYTES, SLOTS, memory, NULL)
    rail.peer.lists = &core.engine.state.lists
    list_channel(&rail.channel)
    core.engine.state.peers = &rail.peer
    mailbox_open(&core.engine.state, rail.peer.mailbox)
    for data in messages:
        if rail.peer.failed or rail.count == 0:
            break
        rail.count -= 1
        memset(&rail.next, 0, sizeof(Completion))
        rail.next.wr = rail.posted[rail.count]
        rail.next.length = len(data)
        memset(rail.places[rail.count], 0xEE, SLOT_BYTES)
        memcpy(rail.places[rail.count], <const char*> data, len(data))
        rail.waiting = True
        progress_once(&core.engine)
        slot = mailbox_peek(rail.peer.mailbox)
        if slot != NULL:
            taken.append((<const char*> slot.memory)[HEADER_BYTES:HEADER_BYTES + slot.length])
            mailbox_consume(&core.engine.state, rail.peer.mailbox)
    failed = -rail.peer.error if rail.peer.failed else 0
    core.engine.state.peers = NULL
    memset(&core.engine.state.lists, 0, sizeof(core.engine.state.lists))
    core.engine.state.inbox = 0
    mailbox_free(rail.peer.mailbox)
    free(memory)
    free(rail)
    core.close()
    return taken, failed
