# The channels and peers that the rounds of an engine look at: a round costs as much as there is to do, for any number
# of peers.
#
# An open channel is polled and armed, or it rests (progress.pyx). A peer is pending while it has something to post, to
# grant or to end: whatever gives it such work calls `pend`, and a round that finds it has none left takes it out
# (posting.pyx). The lists are intrusive, and belong to the engine's lock.
from aiote_native.engine.structs cimport Channel, PeerState, Worklists


cdef inline void channel_link(Channel** head, Channel* channel) noexcept nogil:
    channel.prev_listed = NULL
    channel.next_listed = head[0]
    if head[0] != NULL:
        head[0].prev_listed = channel
    head[0] = channel


cdef inline void channel_unlink(Channel** head, Channel* channel) noexcept nogil:
    if channel.prev_listed == NULL:
        head[0] = channel.next_listed
    else:
        channel.prev_listed.next_listed = channel.next_listed
    if channel.next_listed != NULL:
        channel.next_listed.prev_listed = channel.prev_listed
    channel.next_listed = channel.prev_listed = NULL


cdef inline void list_channel(Channel* channel) noexcept nogil:
    """Begin to poll a channel that was opened."""
    channel_link(&channel.peer.lists.polled, channel)


cdef inline void rest(Channel* channel) noexcept nogil:
    """Poll a channel no more until something stirs it."""
    cdef Worklists* lists = channel.peer.lists
    channel_unlink(&lists.polled, channel)
    channel.resting = True
    if channel.ops.announced:
        lists.announced += 1
    else:
        channel_link(&lists.looked_at, channel)


cdef inline void stir(Channel* channel) noexcept nogil:
    """End the rest of a channel, if it rests."""
    cdef Worklists* lists = channel.peer.lists
    if not channel.resting:
        return
    channel.resting = False
    channel.quiet = 0
    if channel.ops.announced:
        lists.announced -= 1
    else:
        if lists.next_look == channel:
            lists.next_look = channel.next_listed
        channel_unlink(&lists.looked_at, channel)
    channel_link(&lists.polled, channel)


cdef inline void unlist_channel(Channel* channel) noexcept nogil:
    """Forget a channel whose endpoint is shut."""
    stir(channel)
    channel_unlink(&channel.peer.lists.polled, channel)


cdef inline void pend(PeerState* peer) noexcept nogil:
    """Give a peer a turn in each round, because it has, or may have, something to do."""
    if peer.pending:
        return
    peer.pending = True
    peer.prev_pending = NULL
    peer.next_pending = peer.lists.pending
    if peer.next_pending != NULL:
        peer.next_pending.prev_pending = peer
    peer.lists.pending = peer


cdef inline void unpend(PeerState* peer) noexcept nogil:
    if not peer.pending:
        return
    peer.pending = False
    if peer.prev_pending == NULL:
        peer.lists.pending = peer.next_pending
    else:
        peer.prev_pending.next_pending = peer.next_pending
    if peer.next_pending != NULL:
        peer.next_pending.prev_pending = peer.prev_pending
