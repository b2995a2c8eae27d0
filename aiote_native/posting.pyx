"""Transfers: split into stripes, posted, retried and ended without the GIL.

A transfer has `parts` parts of equal length (one for a plain write, one a page for a paged one), each split alike. It
moves through its peer's queue: after about TURN parts or stripes the next transfer has its turn, so a small write never
waits behind a million pages. A refused post (-EAGAIN: queue full, still connecting) is tried on the peer's other
channels, then left for the next round. A transfer that failed or was cancelled posts nothing more and is over when the
last of its work requests is, and not before, because until then a NIC may use the memory. The caller holds the engine's
lock. The plain Python reference of the split is `aiote.core.striping`.
"""

from libc.errno cimport EAGAIN, EBUSY, EHOSTUNREACH
from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.counters cimport done_push
from aiote_native.gates cimport gate_leave, gate_paced, gate_post
from aiote_native.gathering cimport gather, room_of
from aiote_native.peer_wakeups cimport wake_peer
from aiote_native.recovery cimport channel_fault, is_abandoned, is_disconnect, redone
from aiote_native.schedule cimport STREAK_BYTES, begin_measure, is_cut_off, next_channel, posted, usable
from aiote_native.structs cimport BROKEN, ECANCELED, MAX_STRIPES, MAX_PARTS, OP_READ, PIECE, PLAIN, Queue, RESENT
from aiote_native.worklists cimport pend

cdef enum:
    # Parts or stripes of one transfer before the next one's turn: more would lower EFA's packet rate (TransferEngine).
    TURN = 32
    PACE = 1 << 20  # bytes posted within one call of the peer into its library (gates.pyx), which copies them meanwhile
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


cdef void give_back(Channel* channel, WorkRequest* wr) noexcept nogil:
    wr.busy = False
    wr.owner = NULL
    wr.next = channel.spare
    channel.spare = wr


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
        state.wakeups += wake_peer(channel, False)
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


cdef Queue* queue_of(PeerState* peer, const Op* op) noexcept nogil:
    return &peer.armed if op.armed else &peer.probes if op.proof else &peer.queue


cdef void link_tail(State* state, PeerState* peer, Op* op) noexcept nogil:
    cdef Queue* queue = queue_of(peer, op)
    op.queued = True
    op.next = NULL
    op.prev = queue.tail
    if queue.tail == NULL:
        queue.head = op
    else:
        queue.tail.next = op
    queue.tail = op
    state.queued += 1
    pend(peer)


cdef void unlink(State* state, PeerState* peer, Op* op) noexcept nogil:
    cdef Queue* queue = queue_of(peer, op)
    if not op.queued:
        return
    op.queued = False
    if op.prev == NULL:
        queue.head = op.next
    else:
        op.prev.next = op.next
    if op.next == NULL:
        queue.tail = op.prev
    else:
        op.next.prev = op.prev
    op.next = op.prev = NULL
    state.queued -= 1


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
            state.wakeups += wake_peer(peer.channels[i], False)


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
