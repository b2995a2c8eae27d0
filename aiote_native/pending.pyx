"""Peers with something to do: the only ones that a round gives a turn, so a thousand idle peers cost it nothing.

A peer has work while transfers or messages wait in its queues, or receives or credits are to be given back. Whatever
may give it such work lists it (`pend`, worklists.pxd). It stays listed for as long as the work waits, whatever it waits
for. A peer that failed is listed once, so that its messages end. The caller holds the engine's lock.
"""

from aiote_native.messages cimport mailbox_fail, mailbox_is_due, mailbox_pump
from aiote_native.posting cimport pump_peer
from aiote_native.worklists cimport unpend


cdef bint has_work(const PeerState* peer) noexcept nogil:
    """Return whether the rounds have to look at a peer that has not failed."""
    return (peer.queue.head != NULL or peer.probes.head != NULL
            or (peer.mailbox != NULL and mailbox_is_due(peer.mailbox)))


cdef void pump_pending(State* state) noexcept nogil:
    """Give each pending peer its turn, and take those out that have nothing left to do."""
    cdef PeerState* peer = state.lists.pending
    cdef PeerState* following
    while peer != NULL:
        following = peer.next_pending
        if not peer.failed:
            if peer.mailbox != NULL:
                mailbox_pump(state, peer.mailbox)
            if peer.queue.head != NULL or peer.probes.head != NULL:
                pump_peer(state, peer)
        if peer.failed:
            if peer.mailbox != NULL:
                mailbox_fail(state, peer.mailbox, peer.error, peer.error_rail)
            unpend(peer)
        elif not has_work(peer):
            unpend(peer)
        peer = following
