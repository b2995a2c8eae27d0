"""Choose the channel for the next stripe or page: the one expected to finish it earliest.

A channel's *cost* is how many picoseconds a KiB takes, measured while the channel is busy; n bytes on a channel with q
bytes in flight are over after (q + n) * cost. Taking the least of these gives each channel what it can carry, so
unequal rails end together, and a rail that has become slow gets less by itself. A channel of unknown cost counts as the
fastest known one, so that it is tried. A cost that no measurement confirms fades, to the NIC's stated speed or to the
least cost of all, so that a rail that has recovered is tried again, a little at first.

Among channels that finish almost equally early, the one that has carried the least is taken, and at first the peer's
`turn`: several engines that write to one peer reach it over all its NICs if each of them begins with another one
(`rotate`). Nothing of this is looked at where the peer has one channel.
"""

from libc.stdint cimport uint32_t, uint64_t

from aiote_native.clocks cimport clock_ns
from aiote_native.structs cimport BROKEN, MAX_CHANNELS, SOUND

cdef enum:
    MEASURE_BYTES = 1 << 18        # bytes that have to end, and time that has to pass, before a measurement counts
    MEASURE_NS = 2_000_000
    MAX_COST = 1 << 34            # a KiB in 17 ms: a slower rail counts as one of 58 KiB/s
    MAX_BYTES = 1 << 25           # keeps (queued + bytes) * cost, also times 8 ranks, within 64 bits
    # One choice holds for about this many pages of one request, because comparing eight rails costs as much as a page.
    STREAK = 16
    LITTLE = 16                    # a finish that is later by less than one part in this many is as good
    MAX_LEAD = 1 << 20             # bytes that one may be ahead of another, so that a returning one is not flooded
    MESSAGE_BYTES = 256            # a message's cost beside its bytes, so that messages without bytes are spread, too


cdef bint takes(const Channel* channel) noexcept nogil:
    return channel.open and not channel.paused


cdef int usable(const PeerState* peer) noexcept nogil:
    """Return how many channels may be posted to."""
    cdef int i, count = 0
    for i in range(peer.channel_count):
        count += takes(peer.channels[i])
    return count


cdef bint reaches(const Op* op, const Channel* channel) noexcept nogil:
    """Return whether the rails of both ends reach the memory of a transfer."""
    return ((op.local_desc == NULL or op.local_desc[channel.rail] != NO_REACH)
            and (op.remote_key == NULL or op.remote_key[channel.remote_rail] != NO_KEY))


cdef bint is_cut_off(const PeerState* peer, const Op* op) noexcept nogil:
    """Return whether there are rails, and none of them reaches the memory of a transfer."""
    cdef bint some = False
    cdef int i
    for i in range(peer.channel_count):
        if peer.channels[i].open and peer.channels[i].fault != BROKEN:
            if op.proof or reaches(op, peer.channels[i]):
                return False
            some = True
    return some


cdef bint pinned_away(PeerState* peer, const Op* op, const Channel* channel) noexcept nogil:
    """Return whether the transfer is pinned to another rail, which is there."""
    cdef int i
    if op.pin < 0 or channel.rail == op.pin:
        return False
    for i in range(peer.channel_count):
        if peer.channels[i].rail == op.pin and takes(peer.channels[i]) and reaches(op, peer.channels[i]):
            return True
    return False


cdef uint64_t least_cost(PeerState* peer) noexcept nogil:
    cdef uint64_t least = 0
    cdef int i
    for i in range(peer.channel_count):
        if peer.channels[i].cost and (least == 0 or peer.channels[i].cost < least):
            least = peer.channels[i].cost
    return least if least else 1


cdef Channel* choose(PeerState* peer, const Op* op, uint32_t refused) noexcept nogil:
    """Return the best channel that is not among the refused ones (bits), or NULL; set `peer.choice` to its number."""
    cdef Channel* channel
    cdef uint64_t unknown, queued, least = 0
    cdef uint64_t ends[MAX_CHANNELS]
    cdef uint64_t bytes = MESSAGE_BYTES + (op.stripe_bytes if op.stripe_bytes < MAX_BYTES else MAX_BYTES)
    cdef int i, at
    if op.proof:
        peer.choice = op.proof - 1
        channel = peer.channels[peer.choice]
        return channel if not refused and channel.open and channel.fault == SOUND else NULL
    if peer.channel_count == 1:
        peer.choice = 0
        channel = peer.channels[0]
        return channel if not refused and takes(channel) and reaches(op, channel) else NULL
    # A new transfer may lie at the address of one that is over, so its first post must not continue that one's streak.
    if (peer.streak_of == op and (op.part or op.stripe) and op.pin < 0 and not refused and peer.streak < STREAK
            and peer.streak_bytes + op.stripe_bytes <= STREAK_BYTES and takes(peer.channels[peer.choice])
            and reaches(op, peer.channels[peer.choice])):
        peer.streak += 1
        peer.streak_bytes += op.stripe_bytes
        return peer.channels[peer.choice]
    unknown = least_cost(peer)
    for i in range(peer.channel_count):
        at = (peer.turn + i) % peer.channel_count
        channel = peer.channels[at]
        ends[at] = 0
        if refused >> at & 1 or not takes(channel) or not reaches(op, channel) or pinned_away(peer, op, channel):
            continue
        if peer.round_robin:
            peer.choice = at
            return channel
        queued = channel.in_flight if channel.in_flight < MAX_BYTES else MAX_BYTES
        ends[at] = (queued + bytes) * (channel.cost if channel.cost else unknown)
        if op.ranks != NULL:
            # A far rail counts as that much slower, and is still used when the near ones have a queue.
            ends[at] *= 1 + op.ranks[channel.rail]
        if least == 0 or ends[at] < least:
            least = ends[at]
    peer.streak_of = op
    peer.streak = 1
    peer.streak_bytes = op.stripe_bytes
    return least_carried(peer, op, ends, least + least // LITTLE)


cdef Channel* least_carried(PeerState* peer, const Op* op, const uint64_t* ends, uint64_t latest) noexcept nogil:
    """Return the channel that has carried the least, of the nearest that finish by `latest`; an end of 0: unusable."""
    cdef Channel* best = NULL
    cdef uint64_t most = 0
    cdef int i, at, far, nearest = 0
    for i in range(peer.channel_count):
        most = max(most, peer.channels[i].carried)
    for i in range(peer.channel_count):
        at = (peer.turn + i) % peer.channel_count
        if peer.channels[at].carried + MAX_LEAD < most:
            peer.channels[at].carried = most - MAX_LEAD
        if not 0 < ends[at] <= latest:
            continue
        far = 0 if op.ranks == NULL else op.ranks[peer.channels[at].rail]
        if best == NULL or far < nearest or (far == nearest and peer.channels[at].carried < best.carried):
            best = peer.channels[at]
            nearest = far
            peer.choice = at
    return best


cdef void posted(PeerState* peer, Channel* channel, uint64_t bytes) noexcept nogil:
    """Record what was posted on a channel."""
    channel.carried += bytes + MESSAGE_BYTES
    if peer.round_robin:
        peer.turn += 1


cdef void rotate(PeerState* peer, uint32_t turn) noexcept nogil:
    """Begin with that channel, as if no channel had carried anything."""
    cdef int i
    for i in range(peer.channel_count):
        peer.channels[i].carried = 0
    peer.turn = turn


cdef Channel* next_channel(PeerState* peer, Op* op, uint32_t refused) noexcept nogil:
    """Return the channel for the next stripe, or NULL.

    A completion says that a NIC has the bytes, not that they are in memory. Bytes that the same NIC delivers later come
    behind them, but another NIC may overtake them. So the first stripes of a tail, which count, go over each NIC that a
    head went over. (Tails have 16 stripes, and peers 16 channels at most.)
    """
    cdef int i
    for i in range(peer.channel_count if op.owed else 0):
        if op.owed >> i & 1:
            if takes(peer.channels[i]):
                peer.choice = i
                return NULL if refused >> i & 1 else peer.channels[i]
            # It has failed since, or is suspected: docs/immediates.md says what risk is left then.
            op.owed &= ~(<uint32_t> 1 << i)
    return choose(peer, op, refused)


cdef uint64_t cost_of(uint64_t mbps) noexcept nogil:
    """Return the cost of a link of `mbps` Mbit/s: picoseconds for 8192 bits; 0 where the speed is unknown."""
    cdef uint64_t cost = <uint64_t> 8192 * 1_000_000 // mbps if mbps else 0
    return cost if cost < MAX_COST else MAX_COST


cdef void begin_measure(Channel* channel) noexcept nogil:
    """Record that an idle channel gets work."""
    channel.rate_since = clock_ns()
    channel.rate_bytes = 0


cdef void measure(Channel* channel) noexcept nogil:
    """Record that `rate_bytes` have ended since `rate_since`, a time in which the channel was always busy."""
    cdef uint64_t now, sample
    if channel.rate_bytes < MEASURE_BYTES:
        return
    now = clock_ns()
    if now - channel.rate_since < MEASURE_NS:
        return
    sample = (now - channel.rate_since) * 1000 // (channel.rate_bytes >> 10)
    if sample < 1:
        sample = 1
    if sample > MAX_COST:
        sample = MAX_COST
    channel.cost = sample if channel.cost == 0 else (channel.cost * 3 + sample) // 4
    channel.rate_since = now
    channel.rate_bytes = 0


cdef void decay_costs(PeerState* peer) noexcept nogil:
    """Lower the costs that no measurement confirms now, step by step."""
    cdef uint64_t least = least_cost(peer)
    cdef uint64_t least_here
    cdef Channel* channel
    cdef int i
    for i in range(peer.channel_count):
        channel = peer.channels[i]
        least_here = channel.nominal if channel.nominal else least
        if channel.in_flight == 0 and channel.cost > least_here:
            channel.cost = channel.cost // 4 if channel.cost // 4 > least_here else least_here
