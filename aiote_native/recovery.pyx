"""Do again on the other channels what a failed channel has lost, so that every count stays right.

docs/failover.md and `aiote.core.failover` have the protocol and its argument; this is its native half. A work request
that ended badly, or not at all before its endpoint was shut, is *lost*. It keeps its place in the channel's pool, and
its transfer counts it as outstanding, until both sides have shut their endpoints and the peer has told what came. Then,
for each immediate, either all came and all is well; or the bytes of all of them are written again, uncounted, as
*pieces*, and when the last piece is over the missing immediates are sent: the *resent* ones. Requests that were not
counted are just done again. Where the provider forgets, fewer of an immediate may have come than ended well: their
bytes are there, so as many immediates are sent again, without pieces. Pieces and resent ones are transfers of their own
in the peer's queue, so a channel that fails under them is no special case: its losses among them are done again in the
same way.

The caller holds the engine's lock.
"""

from libc.errno cimport (
    ECONNABORTED, ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ENODEV, ENOMEM,
    ENOTCONN, EPIPE, ETIMEDOUT)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.posting cimport describe_post, give_back, op_completed, op_start, peer_fail
from aiote_native.structs cimport (
    BROKEN, Channel, ECANCELED, MAX_PARTS, OP_WRITE, Op, PIECE, Post, RESENT, WorkRequest)
from aiote_native.tallies cimport tally_add, tally_get

cdef extern from "<errno.h>" nogil:
    const int ESHUTDOWN
    const int EREMOTEIO

cdef enum:
    ACK_AFTER = 1024  # immediates in the sender's tally before it sends an AckCounts
    FI_ENORX = 266    # libfabric's own: the receiver had posted no receive

# The recovery of one immediate on one channel. `op` sends the missing immediates. `came`: how many of the lost ones
# came; below zero where others were forgotten.
cdef struct Recovery:
    Op op
    int64_t came
    uint64_t pending
    Piece* pieces

# A part of a transfer that is done again; `recovery` is NULL where it was not counted.
cdef struct Piece:
    Op op
    Op* origin
    uint64_t length
    Recovery* recovery
    Piece* next


cdef bint is_disconnect(int code) noexcept nogil:
    """Return whether a refused post says that the channel is broken, not that the request was wrong."""
    return (code == -ENOTCONN or code == -ECONNRESET or code == -ECONNABORTED or code == -ECONNREFUSED or code == -EPIPE
            or code == -EIO or code == -ETIMEDOUT or code == -ECANCELED or code == -ESHUTDOWN or code == -ENETDOWN
            or code == -ENETUNREACH or code == -EHOSTUNREACH or code == -EHOSTDOWN or code == -ENODEV
            or code == -EREMOTEIO or code == -FI_ENORX)


cdef void channel_fault(State* state, Channel* channel, Fault fault, int error) noexcept nogil:
    """Post nothing more on a channel, and make Python look at it."""
    if not channel.open or channel.fault >= fault:
        return
    channel.paused = True
    channel.fault = fault
    channel.error = error
    notice(state, channel)


cdef void notice(State* state, Channel* channel) noexcept nogil:
    if not channel.noticed:
        channel.noticed = True
        state.failures += 1
        state.events += 1


cdef void queue_failed(State* state, Channel* channel, int status) noexcept nogil:
    """Handle an error that is no request's own: the channel is lost, and so is a peer that has no other channel."""
    if channel.peer.survivable:
        channel_fault(state, channel, BROKEN, status)
    else:
        peer_fail(state, channel.peer, status, channel.rail)


cdef void lose_request(State* state, WorkRequest* wr, int status, int provider_errno) noexcept nogil:
    """Keep a request that may or may not have arrived. The caller no longer counts it as outstanding."""
    wr.lost = True
    wr.status = status
    wr.provider_errno = provider_errno


cdef void confirm(State* state, Channel* channel, WorkRequest* wr) noexcept nogil:
    """Tally a counted request that has ended well."""
    if tally_add(&channel.confirmed, wr.imm_data, <int64_t> wr.parts) != 0:
        peer_fail(state, channel.peer, -ENOMEM, channel.rail)
    if channel.confirmed.used >= ACK_AFTER:
        notice(state, channel)


cdef void count_arrival(State* state, Channel* channel, uint32_t imm_data, uint32_t times) noexcept nogil:
    """Tally an immediate that came `times` times."""
    if tally_add(&channel.arrived, imm_data, times) != 0:
        peer_fail(state, channel.peer, -ENOMEM, channel.rail)


cdef bint is_abandoned(const Op* op) noexcept nogil:
    """Return whether the transfer of a piece has to stop, because it was cancelled, or failed elsewhere."""
    cdef const Op* origin = (<const Piece*> op).origin
    return origin.cancelled or origin.status != 0


cdef bint is_part_of(const Op* op, const Op* whole) noexcept nogil:
    """Return whether a transfer is `whole`, or does a part of it: a target, a piece, or immediates sent again."""
    cdef const Piece* piece
    while op != NULL and op != whole:
        if op.kind == PIECE:
            op = (<const Piece*> op).origin
        elif op.kind == RESENT:
            piece = (<const Recovery*> op).pieces
            while piece != NULL:
                if is_part_of(piece.origin, whole):
                    return True
                piece = piece.next
            return False
        else:
            op = op.parent
    return op != NULL


cdef bint is_listed(uint32_t imm_data, const Account* account, int64_t* times) noexcept nogil:
    cdef uint64_t i
    for i in range(account.count):
        if account.imm_data[i] == imm_data:
            times[0] = account.counts[i]
            return True
    times[0] = 0
    return False


cdef int64_t came_of(Channel* channel, uint32_t imm_data, const Account* account) noexcept nogil:
    """Return how many more writes with an immediate came than ended well. The subtraction is unsigned, because a peer
    may say anything, and a difference of signed numbers must not overflow.
    """
    cdef int64_t times
    is_listed(imm_data, account, &times)
    return <int64_t> (<uint64_t> times - <uint64_t> tally_get(&channel.confirmed, imm_data))


cdef uint64_t key_of(const Channel* channel, const WorkRequest* wr) noexcept nogil:
    """Return the key of the peer's memory that a request was for; 0 for a request without memory."""
    cdef const Op* op = <const Op*> wr.owner
    return op.remote_key[channel.remote_rail] if op != NULL and op.remote_key != NULL and wr.length else 0


cdef bint memory_is_gone(const Channel* channel, const WorkRequest* wr, const Account* account) noexcept nogil:
    """Return whether the peer no longer has the memory; if so, the request has failed by its own fault."""
    cdef uint64_t key = key_of(channel, wr)
    cdef uint64_t i
    for i in range(account.unknown_count if wr.length and wr.owner != NULL else 0):
        if account.unknown[i] == key:
            return True
    return False


cdef uint32_t lost_keys(const Channel* channel, uint64_t* keys) noexcept nogil:
    """Copy the keys of a shut channel's lost work to `keys`, of `depth` words; return how many there are."""
    cdef const WorkRequest* wr
    cdef uint32_t i, count = 0
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if wr.busy and wr.lost and wr.length:
            keys[count] = key_of(channel, wr)
            count += 1
    return count


cdef bint lost_counted(const WorkRequest* wr, uint32_t imm_data) noexcept nogil:
    return wr.busy and wr.lost and wr.counted and wr.imm_data == imm_data


cdef uint64_t lost_of(Channel* channel, uint32_t imm_data) noexcept nogil:
    """Return how many writes with an immediate were lost, as the receiver counts them."""
    cdef uint64_t total = 0
    cdef uint32_t i
    for i in range(channel.depth):
        if lost_counted(&channel.requests[i], imm_data):
            total += channel.requests[i].parts
    return total


cdef bint first_of(Channel* channel, uint32_t at) noexcept nogil:
    """Return whether this is the first lost request of its immediate."""
    cdef uint32_t i
    if not lost_counted(&channel.requests[at], channel.requests[at].imm_data):
        return False
    for i in range(at):
        if lost_counted(&channel.requests[i], channel.requests[at].imm_data):
            return False
    return True


cdef bint believable(int64_t came, uint64_t lost, uint64_t* forgettable) noexcept nogil:
    """Return whether `came` more writes with an immediate may have come than ended well, if `lost` of them were lost.
    Forgotten ones are taken from `forgettable`.
    """
    if came >= 0:
        return <uint64_t> came <= lost
    if -<uint64_t> came > forgettable[0]:
        return False
    forgettable[0] -= -<uint64_t> came
    return True


cdef int64_t contradiction(Channel* channel, const Account* account) noexcept nogil:
    """Return an immediate that, by the peer's account, came less often than it ended well, or too often; -1: none.

    Where the provider forgets, fewer may have come: over all immediates at most as many as ever ended.
    """
    cdef uint64_t forgettable = channel.ended * MAX_PARTS if channel.forgets else 0
    cdef uint32_t imm_data
    cdef uint64_t at
    cdef uint32_t i
    cdef int64_t times
    for i in range(channel.depth):
        imm_data = channel.requests[i].imm_data
        if first_of(channel, i) and not believable(
                came_of(channel, imm_data, account), lost_of(channel, imm_data), &forgettable):
            return imm_data
    # Of an immediate without losses, exactly as many came as ended well.
    for at in range(account.count):
        imm_data = account.imm_data[at]
        if lost_of(channel, imm_data) == 0 and not believable(
                <int64_t> (<uint64_t> account.counts[at] - <uint64_t> tally_get(&channel.confirmed, imm_data)),
                0, &forgettable):
            return imm_data
    for i in range(channel.confirmed.size):
        imm_data = channel.confirmed.imm_data[i]
        if (channel.confirmed.taken[i] and not is_listed(imm_data, account, &times) and lost_of(channel, imm_data) == 0
                and not believable(-channel.confirmed.counts[i], 0, &forgettable)):
            return imm_data
    return -1


cdef int redo_all(State* state, Channel* channel, const Account* account) noexcept nogil:
    """End or do again everything that a shut channel has lost or forgotten. The peer fails if memory runs out."""
    cdef WorkRequest* wr
    cdef int64_t came
    cdef uint32_t i
    cdef int code = count_again(state, channel, account) if channel.forgets else 0
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if not wr.busy or not wr.lost or code != 0:
            continue
        if not wr.counted:
            code = redo(state, channel, wr, NULL, account)
        elif first_of(channel, i):
            came = came_of(channel, wr.imm_data, account)
            if came == <int64_t> lost_of(channel, wr.imm_data):
                end_immediate(state, channel, wr.imm_data)
            else:
                code = redo_immediate(state, channel, wr.imm_data, came, account)
    if code != 0:
        peer_fail(state, channel.peer, code, channel.rail)
    return code


cdef int count_again(State* state, Channel* channel, const Account* account) noexcept nogil:
    """Send forgotten immediates again, where no request of theirs was lost; otherwise their recovery does that."""
    cdef uint64_t at
    cdef uint32_t i
    cdef int64_t times
    cdef int code = 0
    for at in range(account.count):
        if code == 0 and lost_of(channel, account.imm_data[at]) == 0:
            times = account.counts[at] - tally_get(&channel.confirmed, account.imm_data[at])
            code = resend_alone(state, channel, account.imm_data[at], times)
    for i in range(channel.confirmed.size):
        if (code == 0 and channel.confirmed.taken[i]
                and not is_listed(channel.confirmed.imm_data[i], account, &times)
                and lost_of(channel, channel.confirmed.imm_data[i]) == 0):
            code = resend_alone(state, channel, channel.confirmed.imm_data[i], -channel.confirmed.counts[i])
    return code


cdef int resend_alone(State* state, Channel* channel, uint32_t imm_data, int64_t came) noexcept nogil:
    cdef Recovery* recovery
    if came >= 0:
        return 0
    recovery = new_recovery(channel, imm_data, came)
    if recovery == NULL:
        return -ENOMEM
    piece_done(state, recovery)
    return 0


cdef Recovery* new_recovery(Channel* channel, uint32_t imm_data, int64_t came) noexcept nogil:
    cdef Recovery* recovery = <Recovery*> calloc(1, sizeof(Recovery))
    if recovery != NULL:
        recovery.op.kind = RESENT
        recovery.op.imm = imm_data
        recovery.op.peer = channel.peer
        recovery.came = came
        # Counted once more until all of its pieces are started, because pieces without bytes are over at once.
        recovery.pending = 1
    return recovery


cdef void end_immediate(State* state, Channel* channel, uint32_t imm_data) noexcept nogil:
    """End all lost requests of an immediate well, because all of them came."""
    cdef WorkRequest* wr
    cdef uint32_t i
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if lost_counted(wr, imm_data):
            end_request(state, channel, wr, 0)


cdef void end_request(State* state, Channel* channel, WorkRequest* wr, int status) noexcept nogil:
    cdef Op* op = <Op*> wr.owner
    cdef uint64_t length = wr.length
    give_back(channel, wr)
    if op != NULL:
        op_completed(state, op, status, 0, channel.rail, length)


cdef int redo_immediate(State* state, Channel* channel, uint32_t imm_data, int64_t came,
                        const Account* account) noexcept nogil:
    """Do all lost requests of an immediate again; requests of transfers that were given up just end."""
    cdef Recovery* recovery = new_recovery(channel, imm_data, came)
    cdef WorkRequest* wr
    cdef uint32_t i
    cdef int code
    if recovery == NULL:
        return -ENOMEM
    for i in range(channel.depth):
        wr = &channel.requests[i]
        if lost_counted(wr, imm_data) and recovery.op.status == 0:
            recovery.op.status = redo(state, channel, wr, recovery, account)
    code = recovery.op.status
    piece_done(state, recovery)
    return code


cdef int redo(State* state, Channel* channel, WorkRequest* wr, Recovery* recovery,
              const Account* account) noexcept nogil:
    """Start a piece in place of one lost request."""
    cdef Op* origin = <Op*> wr.owner
    cdef Piece* piece
    if origin == NULL or origin.cancelled or origin.status != 0 or memory_is_gone(channel, wr, account):
        end_request(state, channel, wr, wr.status)
        return 0
    piece = <Piece*> calloc(1, sizeof(Piece))
    if piece == NULL:
        return -ENOMEM
    describe_piece(piece, origin, wr, channel)
    piece.recovery = recovery
    give_back(channel, wr)
    if recovery != NULL:
        piece.next = recovery.pieces
        recovery.pieces = piece
        recovery.pending += 1
        if piece.length == 0:
            # An immediate alone has no bytes to write again.
            piece.op.over = True
            piece_done(state, recovery)
            return 0
    op_start(state, channel.peer, &piece.op)
    return 0


cdef void describe_piece(Piece* piece, Op* origin, WorkRequest* wr, Channel* channel) noexcept nogil:
    """Make an uncounted transfer of a lost stripe, or of the parts that were gathered, at the same places."""
    cdef Op* op = &piece.op
    op.kind = PIECE
    op.opcode = origin.opcode
    op.rail = -1
    op.pin = -1
    op.total = wr.length
    op.parts = wr.parts
    op.part_bytes = op.stripe_bytes = op.split.head_bytes = wr.length // wr.parts
    op.ranks = origin.ranks
    op.split.head_count = 1
    if wr.length:
        op.local_desc = origin.local_desc
        op.remote_base = origin.remote_base
        op.remote_key = origin.remote_key
        if wr.parts > 1:
            place_parts(op, origin, wr.part)
        else:
            place_stripe(op, origin, wr, channel)
    piece.origin = origin
    piece.length = wr.length


cdef void place_stripe(Op* op, const Op* origin, const WorkRequest* wr, Channel* channel) noexcept nogil:
    """Place the one part of a transfer where a lost stripe of another transfer lies."""
    cdef Op at = origin[0]
    cdef Post args
    at.part = wr.part
    at.stripe = wr.stripe
    at.phase = wr.phase
    describe_post(&at, channel, &args)
    op.local_address = <uint64_t> args.local
    op.remote_offset = args.remote - origin.remote_base[channel.remote_rail]


cdef void place_parts(Op* op, const Op* origin, uint64_t first) noexcept nogil:
    """Place the parts of a transfer where the parts of another lie, from its part `first` on."""
    op.local_address = origin.local_address
    op.local_stride = origin.local_stride
    op.remote_offset = origin.remote_offset
    op.remote_stride = origin.remote_stride
    if origin.local_index == NULL:
        op.local_address += first * origin.local_stride
    else:
        op.local_index = origin.local_index + first
    if origin.remote_index == NULL:
        op.remote_offset += first * origin.remote_stride
    else:
        op.remote_index = origin.remote_index + first


cdef void redone(State* state, Op* op) noexcept nogil:
    """Continue after a piece, or the resent counts of an immediate, is over. `op` may be freed when this returns."""
    cdef Piece* piece
    if op.kind == RESENT:
        end_recovery(state, <Recovery*> op)
        return
    piece = <Piece*> op
    if piece.recovery != NULL:
        piece_done(state, piece.recovery)
        return
    end_piece(state, piece)


cdef void piece_done(State* state, Recovery* recovery) noexcept nogil:
    recovery.pending -= 1
    if recovery.pending == 0:
        resend(state, recovery)


cdef void resend(State* state, Recovery* recovery) noexcept nogil:
    """Send as many immediates as are missing, because all bytes of the immediate are there."""
    cdef Op* op = &recovery.op
    cdef Piece* piece = recovery.pieces
    cdef int64_t live = 0
    while piece != NULL:
        if piece.op.status == 0 and not is_abandoned(&piece.op):
            live += <int64_t> piece.op.parts
            op.carried |= piece.op.carried
        piece = piece.next
    if live <= recovery.came or op.status != 0:
        end_recovery(state, recovery)
        return
    op.opcode = OP_WRITE
    op.counted = True
    op.rail = op.pin = -1
    op.parts = <uint64_t> (live - recovery.came)
    op.split.tail_count = 1
    # Over each NIC that has carried bytes again, if there are as many immediates (schedule.pyx, next_channel).
    op.owed = op.carried
    op_start(state, op.peer, op)


cdef void end_recovery(State* state, Recovery* recovery) noexcept nogil:
    cdef Piece* piece = recovery.pieces
    cdef Piece* following
    cdef int status = recovery.op.status
    while piece != NULL:
        following = piece.next
        if piece.op.status == 0 and status != 0:
            piece.op.status = status
            piece.op.rail = recovery.op.rail
        end_piece(state, piece)
        piece = following
    free(recovery)


cdef void end_piece(State* state, Piece* piece) noexcept nogil:
    """Tell the transfer that its lost request has been done again."""
    cdef Op* origin = piece.origin
    cdef uint64_t length = piece.length
    cdef int status = piece.op.status
    cdef int provider_errno = piece.op.provider_errno
    cdef int rail = piece.op.rail
    if piece.recovery == NULL:
        # It may have been part of a head, so the tail has to go over this NIC, too.
        origin.carried |= piece.op.carried
    free(piece)
    op_completed(state, origin, status, provider_errno, rail, length)
