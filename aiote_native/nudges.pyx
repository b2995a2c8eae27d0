"""Having peers look who sleep while nothing is under way: what rails say to each other by themselves wakes nobody."""

from aiote_native.core cimport Core
from aiote_native.peer_wakeups cimport wake_peer
from aiote_native.progress cimport alive, lock, one_round, signal_wake, unlock
from aiote_native.structs cimport PeerState


def nudge(Core core not None) -> None:
    """Say what rails have to say, wake the peers that sleep, and look again soon. Nothing once the engine is closed."""
    cdef PeerState* peer
    cdef int i
    if not alive(&core.engine):
        return
    with nogil:
        lock(&core.engine)
        one_round(&core.engine, True)
        peer = core.engine.state.peers
        while peer != NULL:
            for i in range(peer.channel_count):
                if peer.channels[i].peer_page != NULL and peer.channels[i].open:
                    wake_peer(peer.channels[i], False)
            peer = peer.next_peer
        unlock(&core.engine)
    signal_wake(&core.engine)
