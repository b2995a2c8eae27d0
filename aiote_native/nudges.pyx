"""Make sleeping peers look while no work is in flight, because the rails' own messages wake no peer."""

from aiote_native.core cimport Core
from aiote_native.peer_wakeups cimport wake_peer
from aiote_native.progress cimport alive, lock, one_round, signal_wake, unlock
from aiote_native.structs cimport PeerState


def nudge(Core core not None) -> None:
    """Do a round, so that rails send their own messages; wake sleeping peers; and look again soon. Does nothing once
    the engine is closed.
    """
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
