"""Posting: transfers are split into stripes, given to channels, gathered into work requests and posted."""

from libc.errno cimport EAGAIN, EBUSY, EHOSTUNREACH
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from array import array

from aiote_native.channels.failover cimport channel_fault, is_abandoned, is_disconnect, redone
from aiote_native.channels.messages cimport mailbox_fail, mailbox_is_due, mailbox_pump
from aiote_native.counters.table cimport done_push
from aiote_native.engine.gates cimport gate_leave, gate_paced, gate_post
from aiote_native.engine.structs cimport (
    BROKEN, ECANCELED, MAX_CHANNELS, MAX_PARTS, MAX_SGE, MAX_STRIPES, OP_READ, OP_WRITE, PIECE, PLAIN, RESENT, SOUND,
    Sge)
from aiote_native.engine.worklists cimport pend, unpend
from aiote_native.system.base cimport clock_ns
from aiote_native.system.wakeups cimport wake_peer

# Transfers: split into stripes, posted, retried and ended without the GIL.
#
# A transfer has `parts` parts of equal length (one for a plain write, one a page for a paged one), each split alike. It
# moves through its peer's queue: after about TURN parts or stripes the next transfer has its turn, so a small write
# never waits behind a million pages. A refused post (-EAGAIN: queue full, still connecting) is tried on the peer's
# other channels, then left for the next round. A transfer that failed or was cancelled posts nothing more and is over
# when the last of its work requests is, and not before, because until then a NIC may use the memory. The caller holds
# the engine's lock. The plain Python reference of the split is `aiote.core.striping`.

cdef enum:
    # Parts or stripes of one transfer before the next one's turn: more would lower EFA's packet rate (TransferEngine).
    TURN = 32
    PACE = 1 << 20  # bytes posted within one call of the peer into its library (gates.pxd), which copies them meanwhile
    EARLY = 1 << 18  # bytes of the least post that wakes its peer before it copies: at 64 KiB the transfer took longer
    STRIPES_A_LANE = 4
    GATHER_BYTES = 1 << 18  # bytes of gathered parts in one message, beside which its fixed cost is a tenth
    GRAIN = 1 << 19  # least bytes of a stripe where a part is split into more than one for each rail


cdef int split_part(uint64_t length, uint32_t lanes, uint64_t largest, uint64_t smallest, bint counted,
                    Split* out) noexcept nogil:
    # Most parts are one stripe, and a division takes as long as everything else here.
    cdef uint64_t needed = 1 if length <= largest else length // largest + (1 if length % largest else 0)
    cdef uint64_t spread = 1 if lanes <= 1 else length // smallest if smallest else length
    if spread < 1:
        spread = 1
    if spread > lanes:
        spread = lanes
    # No more stripes than that can carry the immediate, however many lanes there are.
    if counted and spread > MAX_STRIPES:
        spread = MAX_STRIPES
    if needed < spread:
        needed = spread
    out.head_bytes = 0
    out.head_count = 0
    out.tail_bytes = length
    if not counted:
        out.head_bytes = length
        out.head_count = needed
        out.tail_bytes = 0
        out.tail_count = 0
    elif needed <= MAX_STRIPES:
        out.tail_count = <uint32_t> needed
    else:
        out.tail_count = MAX_STRIPES
        out.tail_bytes = MAX_STRIPES * largest
        out.head_bytes = length - out.tail_bytes
        out.head_count = out.head_bytes // largest + (1 if out.head_bytes % largest else 0)
    return 0


cdef void split_op(Op* op, const PeerState* peer, uint64_t largest, uint64_t smallest) noexcept nogil:
    """Split the parts of a transfer for the channels that its peer has now; a pinned transfer is not spread."""
    cdef uint64_t lanes = usable(peer)
    cdef uint64_t grains = op.part_bytes // GRAIN
    if lanes <= 1 or op.pin >= 0:
        lanes = 1
    elif grains > lanes:
        # Several stripes for each rail, so that each of unequal rails can take its share of a large write.
        lanes = grains if grains < lanes * STRIPES_A_LANE else lanes * STRIPES_A_LANE
    split_part(op.part_bytes, <uint32_t> lanes, largest, smallest, op.counted, &op.split)
    if op.split.head_count + op.split.tail_count == 1:
        op.stripe_bytes = op.part_bytes
    elif op.split.tail_count:
        op.stripe_bytes = op.split.tail_bytes // op.split.tail_count
    else:
        op.stripe_bytes = op.split.head_bytes // op.split.head_count


cdef void piece_of(uint64_t length, uint64_t pieces, uint64_t j, uint64_t* offset, uint64_t* size) noexcept nogil:
    cdef uint64_t quotient = length if pieces == 1 else length // pieces
    cdef uint64_t remainder = length - quotient * pieces
    offset[0] = j * quotient + (j if j < remainder else remainder)
    size[0] = quotient + (1 if j < remainder else 0)


def plan(uint64_t length, uint32_t lanes, uint64_t largest, uint64_t smallest, bint counted) -> tuple[list, list]:
    """Return the (offset, length) of the plain and of the last stripes of one write, split as transfers are."""
    cdef Split split
    cdef uint64_t offset = 0, size = 0, j
    split_part(length, lanes, largest, smallest, counted, &split)
    head, tail = [], []
    for j in range(split.head_count):
        piece_of(split.head_bytes, split.head_count, j, &offset, &size)
        head.append((offset, size))
    for j in range(split.tail_count):
        piece_of(split.tail_bytes, split.tail_count, j, &offset, &size)
        tail.append((split.head_bytes + offset, size))
    return head, tail


cdef int post_on(State* state, Channel* channel, const Post* args, void* owner) noexcept nogil:
    """Post with a work request of the channel's pool; -EAGAIN if the pool is empty or the provider's queue is full."""
    cdef WorkRequest* wr = channel.spare
    cdef int code
    if wr == NULL:
        if channel.fresh == channel.depth:
            return -EAGAIN
        wr = &channel.requests[channel.fresh]
        channel.fresh += 1
    channel.spare = wr.next
    wr.channel = channel
    wr.owner = owner
    wr.opcode = args.opcode
    wr.length = args.payload
    wr.part = args.part
    wr.parts = args.parts
    wr.stripe = args.stripe
    wr.phase = args.phase
    wr.counted = args.with_imm
    wr.imm_data = args.imm
    wr.lost = False
    wr.busy = True
    if (args.payload >= EARLY and args.opcode != OP_READ and channel.peer_page != NULL
            and channel.ops.moved != NULL):
        # While a post copies bytes itself, the peer can take them on another processor.
        state.wakeups += wake_peer(channel, polled=False)
    code = gate_post(channel, args, wr)
    if code != 0:
        give_back(channel, wr)
        state.refused[channel.rail] += 1
        return code
    channel.outstanding += 1
    if channel.in_flight == 0 and channel.peer.channel_count > 1 and channel.peer.timed:
        begin_measure(channel)
    channel.in_flight += args.payload
    channel.paced_bytes += args.payload
    if channel.waiting != NULL:
        channel.waiting[0] = channel.outstanding
    state.outstanding += 1
    state.posted += 1
    return 0


cdef void op_end(State* state, Op* op) noexcept nogil:
    """Tell Python that the transfer is over, once."""
    if op.over:
        return
    unlink(state, op.peer, op)
    op.over = True
    state.events += 1
    if op.kind != PLAIN:
        redone(state, op)
    elif op.parent != NULL:
        child_over(state, op.parent, op)
    else:
        done_push(&state.done, &op.done)


cdef void child_over(State* state, Op* parent, Op* child) noexcept nogil:
    """Record that one target of many is over. The first error becomes the request's, and the other targets go on."""
    parent.outstanding -= 1
    parent.confirmed += child.confirmed
    if child.status != 0 and parent.status == 0:
        parent.status = child.status
        parent.provider_errno = child.provider_errno
        parent.rail = child.rail
    if parent.outstanding == 0:
        op_end(state, parent)


cdef void op_fail(State* state, Op* op, int status, int rail) noexcept nogil:
    """Stop posting. The first error is kept, and reported when the last outstanding work request is over."""
    if op.status == 0:
        op.status = status
        if rail >= 0:
            op.rail = rail
    unlink(state, op.peer, op)
    op.posted_all = True
    if op.outstanding == 0:
        op_end(state, op)


cdef void op_cancel(State* state, Op* op) noexcept nogil:
    cdef uint32_t i
    if op.over:
        return
    op.cancelled = True
    if op.child_count == 0:
        op_fail(state, op, -ECANCELED, -1)
        return
    if op.status == 0:
        op.status = -ECANCELED
    for i in range(op.child_count):
        op_cancel(state, &op.children[i])


cdef void op_completed(State* state, Op* op, int status, int provider_errno, int rail, uint64_t length) noexcept nogil:
    """Record that a work request is over. The op may be freed when this returns, if it is a piece of a recovery."""
    op.outstanding -= 1
    if status != 0:
        if op.status == 0:
            op.provider_errno = provider_errno
        op_fail(state, op, status, rail)
        return
    op.confirmed += length
    if op.outstanding == 0:
        if op.posted_all:
            op_end(state, op)
        elif op.peer.failed:
            # It rested between its head and its tail, so it was not in the queue that the failure emptied.
            op_fail(state, op, op.peer.error, op.peer.error_rail)
        elif op.phase == 0 and not op.queued:
            # The plain stripes have arrived; only now may the immediates follow, because writes are not ordered.
            op.phase = 1
            op.part = op.stripe = 0
            op.owed = op.carried
            link_tail(state, op.peer, op)


cdef void describe_post(Op* op, Channel* channel, Post* args) noexcept nogil:
    """Describe the next work request of a transfer for one channel, with that channel's own keys."""
    cdef uint64_t offset = 0
    cdef uint64_t size = 0
    cdef uint64_t local, remote
    if op.phase == 0:
        piece_of(op.split.head_bytes, op.split.head_count, op.stripe, &offset, &size)
    else:
        piece_of(op.split.tail_bytes, op.split.tail_count, op.stripe, &offset, &size)
        offset += op.split.head_bytes
    local = op.part if op.local_index == NULL else <uint64_t> op.local_index[op.part]
    remote = op.part if op.remote_index == NULL else <uint64_t> op.remote_index[op.part]
    args.opcode = op.opcode
    args.with_imm = op.counted and op.phase == 1
    args.part = op.part
    args.parts = 1
    args.more_sge = 0
    args.stripe = op.stripe
    args.phase = op.phase
    if args.with_imm:
        # Immediates that are sent again already have all their 32 bits.
        args.imm = op.imm if op.kind == RESENT else op.imm | ((op.split.tail_count - 1) << 28)
    else:
        args.imm = 0
    args.length = args.payload = size
    if size == 0:
        args.length = channel.least
    if op.local_address != 0 and size != 0:
        args.local = <void*> (op.local_address + local * op.local_stride + offset)
        args.desc = op.local_desc[channel.rail]
    else:
        args.local = channel.scratch
        args.desc = channel.scratch_desc
    if op.remote_base != NULL and size != 0:
        args.remote = op.remote_base[channel.remote_rail] + op.remote_offset + remote * op.remote_stride + offset
        args.key = op.remote_key[channel.remote_rail]
    else:
        args.remote = channel.imm_address
        args.key = channel.imm_key


cdef bint advance(Op* op, uint64_t parts) noexcept nogil:
    """Step to the next stripe, past `parts` gathered parts. Return False when the phase has no more stripes."""
    cdef uint64_t count = op.split.head_count if op.phase == 0 else op.split.tail_count
    op.stripe += 1
    if op.stripe < count:
        return True
    op.stripe = 0
    op.part += parts
    if op.phase and op.kind == PLAIN:
        op.owed = op.carried
    return op.part < op.parts


cdef uint64_t gathered_most(const PeerState* peer, const Channel* channel, const Op* op) noexcept nogil:
    """Return how many bytes of several parts one work request of a channel may carry now."""
    cdef uint64_t most = GATHER_BYTES
    if peer.round_robin or channel.in_flight >= channel.window:
        return 0
    # Where there are other channels, no more than the rest of the bytes for which one choice of a channel holds.
    if peer.channel_count > 1:
        most = STREAK_BYTES + op.stripe_bytes
        most = most - peer.streak_bytes if peer.streak_bytes < most else 0
    if most > channel.largest:
        most = channel.largest
    return min(most, channel.window - channel.in_flight)


cdef int post_next(State* state, PeerState* peer, Op* op, uint64_t* parts) noexcept nogil:
    """Post the next stripe, or several parts in one, on the channel expected to finish it earliest.

    -EAGAIN: the provider refused, or a channel has just failed; -EBUSY: wait for completions; -EHOSTUNREACH: none of
    the rails that are there reaches the memory of both ends.
    """
    cdef Post args
    cdef Channel* channel
    cdef int code = -EBUSY
    cdef uint32_t refused = 0
    cdef bint alone
    for _attempt in range(peer.channel_count):
        channel = next_channel(peer, op, refused)
        if channel == NULL:
            if refused == 0 and is_cut_off(peer, op):
                code = -EHOSTUNREACH
            break
        describe_post(op, channel, &args)
        # A post for this channel alone only needs room to begin, or smaller posts would keep it waiting for good.
        alone = op.pin >= 0 or op.owed != 0
        if channel.in_flight and channel.in_flight + (0 if alone else args.payload) > room_of(channel, &args):
            # This channel is still expected to finish first: a post on another one would now be over later.
            return -EBUSY if code == -EBUSY else -EAGAIN
        if channel.max_sge > 1:
            gather(op, channel, MAX_PARTS, gathered_most(peer, channel, op), &args)
        if gate_paced(channel, args.payload, PACE):
            code = -EAGAIN
        else:
            code = post_on(state, channel, &args, op)
            if code != 0 and code != -EAGAIN and peer.survivable and is_disconnect(code):
                channel_fault(state, channel, BROKEN, code)
                code = -EAGAIN
        if code != -EAGAIN:
            if op.phase == 0:
                op.carried |= <uint32_t> 1 << peer.choice
            op.owed &= ~(<uint32_t> 1 << peer.choice)
            op.rail = channel.rail
            parts[0] = args.parts
            posted(peer, channel, args.payload)
            if code == 0 and args.parts > 1:
                peer.streak += <uint32_t> args.parts - 1
                peer.streak_bytes += args.payload - op.stripe_bytes
            break
        refused |= <uint32_t> 1 << peer.choice
    return code


cdef int pump_op(State* state, PeerState* peer, Op* op) noexcept nogil:
    """Post up to a turn's worth. 0: everything is posted for now; 1: its turn is over; otherwise as `post_next`."""
    cdef int code = post_turn(state, peer, op)
    cdef int i
    for i in range(peer.channel_count):
        gate_leave(peer.channels[i])
    return code


cdef int post_turn(State* state, PeerState* peer, Op* op) noexcept nogil:
    cdef int64_t budget = TURN
    cdef uint64_t parts = 1
    cdef int code
    if op.kind == PIECE and is_abandoned(op):
        op_fail(state, op, -ECANCELED, -1)
        return 0
    while budget > 0:
        code = post_next(state, peer, op, &parts)
        if code == -EAGAIN or code == -EBUSY:
            return code
        if code != 0:
            op_fail(state, op, code, op.rail)
            return 0
        op.outstanding += 1
        budget -= <int64_t> parts
        if not advance(op, parts):
            unlink(state, peer, op)
            # After the plain stripes the transfer rests until they have arrived, unless no other stripes follow.
            op.posted_all = op.phase == 1 or op.split.tail_count == 0
            return 0
    return 1


cdef void wake_peer_channels(State* state, PeerState* peer) noexcept nogil:
    cdef int i
    for i in range(peer.channel_count):
        if peer.channels[i].peer_page != NULL:
            state.wakeups += wake_peer(peer.channels[i], polled=False)


cdef void pump_probes(State* state, PeerState* peer) noexcept nogil:
    """Post the transfers that prove channels, each as soon as its own channel takes it."""
    cdef Op* op = peer.probes.head
    cdef Op* following
    while op != NULL:
        following = op.next
        state.blocked += pump_op(state, peer, op) < 0
        op = following


cdef void pump_peer(State* state, PeerState* peer) noexcept nogil:
    """Give each queued transfer of a peer a turn, until all is posted or the provider refuses."""
    cdef Op* op
    cdef int code
    cdef uint64_t before = state.posted
    cdef uint64_t started
    cdef uint64_t turns = 64
    if peer.probes.head != NULL:
        pump_probes(state, peer)
    while peer.queue.head != NULL and turns > 0:
        turns -= 1
        op = peer.queue.head
        started = state.posted
        code = pump_op(state, peer, op)
        # Whatever it posted was its turn: a queue with less room than a turn would otherwise serve the first one alone.
        if code != 0 and op.next != NULL and state.posted != started:
            unlink(state, peer, op)
            link_tail(state, peer, op)
        if code < 0 and (op.pin >= 0 or op.owed) and op.next != NULL:
            # It waits for one rail. The others go on, and it is tried again in the next round.
            unlink(state, peer, op)
            link_tail(state, peer, op)
            state.blocked += code == -EAGAIN
            continue
        if code < 0:
            # A full channel has completions to come, and each of them brings us here again. A refusal needs the timer.
            state.blocked += code == -EAGAIN
            break
    if state.posted != before:
        state.events += 1
        wake_peer_channels(state, peer)


cdef void op_start(State* state, PeerState* peer, Op* op) noexcept nogil:
    """Queue a transfer, and post as much of it as can be posted at once."""
    op.peer = peer
    op.phase = 0 if op.split.head_count else 1
    if peer.failed:
        op.status = peer.error
        op.rail = peer.error_rail
        op.posted_all = True
        op_end(state, op)
        return
    if op.parts == 0:
        op.posted_all = True
        op_end(state, op)
        return
    link_tail(state, peer, op)
    # Other transfers need not wait behind one that waits for its own rail.
    if op.proof or peer.queue.head == op or peer.queue.head.pin not in (-1, op.pin):
        pump_peer(state, peer)


cdef void peer_fail(State* state, PeerState* peer, int error, int rail) noexcept nogil:
    """Mark a peer as lost and end its queued transfers; posted work ends when the peer's channels are shut."""
    if peer.failed:
        return
    peer.failed = True
    peer.error = error
    peer.error_rail = rail
    pend(peer)
    state.failures += 1
    state.events += 1
    while peer.probes.head != NULL:
        op_fail(state, peer.probes.head, error, rail)
    while peer.queue.head != NULL:
        op_fail(state, peer.queue.head, error, rail)
    while peer.armed.head != NULL:
        op_fail(state, peer.armed.head, error, rail)


# Choose the channel for the next stripe or page: the one expected to finish it earliest.
#
# A channel's *cost* is how many picoseconds a KiB takes, measured while the channel is busy; n bytes on a channel with
# q bytes in flight are over after (q + n) * cost. Taking the least of these gives each channel what it can carry, so
# unequal rails end together, and a rail that has become slow gets less by itself. A channel of unknown cost counts as
# the fastest known one, so that it is tried. A cost that no measurement confirms fades, to the NIC's stated speed or to
# the least cost of all, so that a rail that has recovered is tried again, a little at first.
#
# Among channels that finish almost equally early, the one that has carried the least is taken, and at first the peer's
# `turn`: several engines that write to one peer reach it over all its NICs if each of them begins with another one
# (`rotate`). Nothing of this is looked at where the peer has one channel.

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


# Gather several parts of a transfer in one work request, on rails whose provider takes a list of SGEs for each.
#
# A page that is a message of its own costs a header, an acknowledgement and a completion over tcp, and a system call
# over shm. Gathered pages share these: a work request takes up to `max_sge` SGEs, and parts that are neighbours in both
# memories share one. An immediate carries, beside its value, the number of parts that it counts for, so gathering never
# changes a count.
#
# Only whole parts of one transfer are gathered, in order, and no part waits for others to come.


cdef inline uint64_t index_of(const int64_t* index, uint64_t part) noexcept nogil:
    return part if index == NULL else <uint64_t> index[part]


cdef inline bint gathers(const Op* op) noexcept nogil:
    """Return whether each part is one stripe of bytes that lie somewhere. Reads are not gathered, because streams ask
    for one range each.
    """
    return (op.opcode == OP_WRITE and op.parts > 1 and op.split.head_count + op.split.tail_count == 1
            and op.part_bytes > 0 and op.local_address != 0 and op.remote_base != NULL)


cdef void gather(const Op* op, const Channel* channel, uint64_t most, uint64_t bytes_most, Post* args) noexcept nogil:
    """Add the parts that follow the described one, up to `most` parts or `bytes_most` bytes in all."""
    cdef uint64_t size = op.part_bytes
    cdef uint64_t local, remote
    cdef uint64_t at = op.part + 1
    cdef int max_sge = channel.max_sge if size >= channel.gathers_from else 1
    cdef Sge last
    if not gathers(op):
        return
    last.local = <uint8_t*> args.local
    last.remote = args.remote
    last.length = args.length
    while at < op.parts and args.parts < most and args.payload + size <= bytes_most:
        local = op.local_address + index_of(op.local_index, at) * op.local_stride
        remote = (op.remote_base[channel.remote_rail] + op.remote_offset
                  + index_of(op.remote_index, at) * op.remote_stride)
        if <uint64_t> last.local + last.length == local and last.remote + last.length == remote:
            last.length += size
        elif args.more_sge + 1 < max_sge:
            args.more_sge += 1
            last.local = <uint8_t*> local
            last.remote = remote
            last.length = size
        else:
            return
        if args.more_sge:
            args.more[args.more_sge - 1] = last
        else:
            args.length = last.length
        args.parts += 1
        args.payload += size
        at += 1


cdef uint64_t room_of(const Channel* channel, const Post* args) noexcept nogil:
    """Return how many bytes may be in flight on a channel where the request is to be posted."""
    cdef uint64_t room = 0
    if args.opcode == OP_WRITE and channel.ops.room != NULL:
        room = channel.ops.room(channel.impl, args.desc, args.key)
    return room if room else channel.window


def plan_gathering(uint64_t page, list local, list remote, int max_sge, uint64_t most,
                   uint64_t bytes_most) -> list[list[tuple]]:
    """Return the SGEs (local, remote, length) of each work request for pages at these offsets, as `gather` makes them.

    Offsets are in bytes. A request takes up to `most` pages, and more than one only up to `bytes_most` bytes in all.
    Raises ValueError for lists of different lengths, and for more SGEs than there may be.
    """
    cdef uint64_t count = len(local)
    local_index = array("q", local)
    remote_index = array("q", remote)
    cdef uint64_t base = 0
    cdef Channel channel
    cdef Post args
    cdef Op op
    cdef int i
    if len(remote) != count or not 1 <= max_sge <= MAX_SGE:
        raise ValueError(
            f"{count} local and {len(remote)} remote offsets, max_sge={max_sge}: expected as many of each and "
            f"max_sge from 1 to {MAX_SGE}")
    memset(&channel, 0, sizeof(channel))
    memset(&op, 0, sizeof(op))
    channel.max_sge = max_sge
    op.parts, op.part_bytes, op.split.tail_count = count, page, 1
    # The local memory begins at address 1, because 0 means that there is none.
    op.local_address = op.local_stride = op.remote_stride = 1
    op.local_index = <const int64_t*> <uint64_t> local_index.buffer_info()[0]
    op.remote_index = <const int64_t*> <uint64_t> remote_index.buffer_info()[0]
    op.remote_base = &base
    out = []
    while op.part < count:
        args.local, args.remote = <void*> <uint64_t> (1 + local[op.part]), remote[op.part]
        args.length = args.payload = page
        args.parts, args.more_sge = 1, 0
        gather(&op, &channel, most, bytes_most, &args)
        request = [(<uint64_t> args.local - 1, args.remote, args.length)]
        for i in range(args.more_sge):
            request.append((<uint64_t> args.more[i].local - 1, args.more[i].remote, args.more[i].length))
        out.append(request)
        op.part += args.parts
    return out


# Peers with something to do: the only ones that a round gives a turn, so a thousand idle peers cost it nothing.
#
# A peer has work while transfers or messages wait in its queues, or receives or credits are to be given back. Whatever
# may give it such work lists it (`pend`, worklists.pxd). It stays listed for as long as the work waits, whatever it
# waits for. A peer that failed is listed once, so that its messages end. The caller holds the engine's lock.


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
