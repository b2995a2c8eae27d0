"""Channels that fail: their shutdown, and the work that is done again on the others."""

from libc.errno cimport (
    ECONNABORTED, ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ENODEV, ENOMEM,
    ENOTCONN, EPIPE, ETIMEDOUT)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from array import array

from aiote_native.channels.messages cimport mailbox_arrivals, mailbox_holes, mailbox_resolve
from aiote_native.channels.peers cimport shut_channel
from aiote_native.counters.table cimport Tally, tally_add, tally_copy, tally_free, tally_get, tally_items, tally_take
from aiote_native.engine.posting cimport (
    decay_costs, describe_post, give_back, op_completed, op_start, peer_fail, pump_peer, rotate)
from aiote_native.engine.progress cimport alive, kick, lock, unlock
from aiote_native.engine.provider cimport NativeEndpoint
from aiote_native.engine.structs cimport (
    BROKEN, ECANCELED, MAX_CHANNELS, MAX_PARTS, OP_SEND, OP_WRITE, PIECE, RESENT, SOUND, Channel, Mailbox, Op,
    PeerState, Post, WorkRequest)
from aiote_native.engine.worklists cimport pend
from aiote_native.requests.operations cimport Operation

# Do again on the other channels what a failed channel has lost, so that every count stays right.
#
# docs/failover.md and `aiote.core.failover` have the protocol and its argument; this is its native half. A work request
# that ended badly, or not at all before its endpoint was shut, is *lost*. It keeps its place in the channel's pool, and
# its transfer counts it as outstanding, until both sides have shut their endpoints and the peer has told what came.
# Then, for each immediate, either all came and all is well; or the bytes of all of them are written again, uncounted,
# as *pieces*, and when the last piece is over the missing immediates are sent: the *resent* ones. Requests that were
# not counted are just done again. Where the provider forgets, fewer of an immediate may have come than ended well:
# their bytes are there, so as many immediates are sent again, without pieces. Pieces and resent ones are transfers of
# their own in the peer's queue, so a channel that fails under them is no special case: its losses among them are done
# again in the same way.
#
# The caller holds the engine's lock.

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
    # Over each NIC that has carried bytes again, if there are as many immediates (engine/posting.pyx, next_channel).
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


# The channels of one peer: the work and the counts of each, and the shutdown of a channel that fails.
#
# `aiote.core.failover` owns the protocol of failed channels; the functions above do again the work that a
# channel has lost.

# More than one channel can count: at a hundred million a second it takes three centuries.
cdef object MAX_ACKED = 1 << 60


cdef uint64_t largest_of(const PeerState* peer) noexcept nogil:
    cdef uint64_t least = 0xFFFFFFFFFFFFFFFFULL
    cdef int i
    for i in range(peer.channel_count):
        if peer.channels[i].largest < least:
            least = peer.channels[i].largest
    return least


cdef int widest_of(const PeerState* peer) noexcept nogil:
    cdef int most = -1
    cdef int i
    for i in range(peer.channel_count):
        if peer.channels[i].remote_rail > most:
            most = peer.channels[i].remote_rail
    return most


cdef void* items_of(object numbers) except NULL:
    """Return the address of an array's items, valid until it is freed or resized; not NULL even if there are none."""
    address, _ = numbers.buffer_info()
    return <void*> <uint64_t> (address or 8)


cdef class ChannelSet:
    """The part of a peer's link that knows its channels: a base class, never used by itself."""

    def __cinit__(self):
        memset(&self.state, 0, sizeof(self.state))
        self.closed = True
        self.mail_lost_with = -1
        self.channels = 1
        self.endpoints = []

    cdef uint64_t largest(self) noexcept nogil:
        """Return the largest message that every channel takes."""
        return largest_of(&self.state)

    cdef int widest(self) noexcept nogil:
        """Return the highest number of a remote rail in use."""
        return widest_of(&self.state)

    def under_way(self) -> dict[int, int]:
        """Return how many work requests have ended on each channel that ought to move.

        A channel ought to move if it has requests outstanding; if all are idle though something is queued, because they
        refuse it; or if a queued probe is for it.
        """
        cdef uint64_t ended[MAX_CHANNELS]
        cdef uint32_t in_flight_channels
        cdef int i
        if self.closed or not alive(self.engine):
            return {}
        with nogil:
            lock(self.engine)
            in_flight_channels = self.in_flight_channels(ended)
            unlock(self.engine)
        return {i: ended[i] for i in range(MAX_CHANNELS) if in_flight_channels >> i & 1}

    cdef uint32_t in_flight_channels(self, uint64_t* ended) noexcept nogil:
        """Return a bit for each channel that ought to move, and copy how many requests have ended on each."""
        cdef Mailbox* mailbox = self.state.mailbox
        cdef Op* op = self.state.probes.head
        cdef uint32_t in_flight_channels = 0, opened = 0
        cdef bint refused = self.state.queue.head != NULL or (
            mailbox != NULL and mailbox.head != NULL and mailbox.sent - mailbox.granted < mailbox.peer_slots)
        cdef int i
        while op != NULL:
            in_flight_channels |= <uint32_t> 1 << (op.proof - 1)
            op = op.next
        for i in range(self.state.channel_count):
            ended[i] = self.state.channels[i].ended
            opened |= <uint32_t> self.state.channels[i].open << i
            if self.state.channels[i].outstanding:
                in_flight_channels |= <uint32_t> 1 << i
                refused = False
        return opened if refused else in_flight_channels & opened

    def ended(self) -> list[int]:
        """Return how many work requests have ended on each channel since it was opened."""
        return [self.state.channels[i].ended for i in range(self.state.channel_count)]

    def moved(self, int channel) -> int:
        """Return how many bytes a channel's connection has moved either way; -1 where its kind cannot tell."""
        return (<NativeEndpoint> self.endpoints[channel]).moved() if self.endpoints[channel] is not None else -1

    def channels_on(self, int rail) -> list[int]:
        """Return the channels on one of our rails."""
        return [i for i in range(self.state.channel_count) if self.state.channels[i].rail == rail]

    def channel_with(self, int queue, int rail) -> int:
        """Return the channel on our rail that has a queue of that number, or -1."""
        cdef int i
        for i in range(self.state.channel_count):
            if self.state.channels[i].rail == rail and self.endpoints[i] is not None and self.endpoints[i].owns(queue):
                return i
        return -1

    def rail_of(self, int channel) -> int:
        """Return our rail under a channel, or -1."""
        return self.state.channels[channel].rail if 0 <= channel < self.state.channel_count else -1

    def expect(self, int channels, bint round_robin, bint survivable) -> None:
        """Set, before the first channel is added, how many there will be, whether they take turns instead of each
        getting what it can carry, and whether the peer survives the loss of one.
        """
        self.channels = channels
        self.state.survivable = survivable
        self.state.round_robin = round_robin

    def rotate(self, uint32_t turn) -> None:
        """Make the next transfer begin with channel `turn`, modulo their number, where several are equally good."""
        if self.closed or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            rotate(&self.state, turn)
            unlock(self.engine)

    @property
    def nbytes(self) -> int:
        """The bytes of the link's native memory, without its message pools and the provider's memory."""
        cdef int i
        total = sizeof(PeerState) + (sizeof(Mailbox) if self.state.mailbox != NULL else 0)
        for i in range(self.state.channel_count):
            total += sizeof(Channel) + self.state.channels[i].depth * sizeof(WorkRequest)
        return total

    cdef Channel* channel_of(self, int number) except NULL:
        if self.closed or not alive(self.engine) or not 0 <= number < self.state.channel_count:
            raise RuntimeError(f"there is no channel {number}")
        return self.state.channels[number]

    cdef void drop_notice(self, Channel* channel) noexcept nogil:
        if channel.noticed:
            channel.noticed = False
            self.engine.state.failures -= 1

    cdef bint is_noticed(self) noexcept:
        """Return whether there are `notices`."""
        cdef bint noticed = False
        cdef int i
        if self.closed or not alive(self.engine):
            return False
        with nogil:
            lock(self.engine)
            for i in range(self.state.channel_count):
                noticed = noticed or self.state.channels[i].noticed
            unlock(self.engine)
        return noticed

    cdef bint take_failure(self) noexcept:
        """Return whether the peer has failed; True is returned once."""
        cdef bint failed
        if self.closed or not alive(self.engine):
            return False
        with nogil:
            lock(self.engine)
            failed = self.state.failed and not self.state.reported
            if failed:
                self.state.reported = True
                self.engine.state.failures -= 1
            unlock(self.engine)
        return failed

    def notices(self) -> list[tuple[int, int]]:
        """Return (channel, error number) of the channels to look at since the last call; 0: acknowledge its counts."""
        cdef int numbers[MAX_CHANNELS]
        cdef int errors[MAX_CHANNELS]
        cdef Channel* channel
        cdef int i, count = 0
        if self.closed or not alive(self.engine):
            return []
        with nogil:
            lock(self.engine)
            for i in range(self.state.channel_count):
                channel = self.state.channels[i]
                if channel.noticed:
                    self.drop_notice(channel)
                    numbers[count] = i
                    errors[count] = -channel.error if channel.fault != SOUND else 0
                    count += 1
            unlock(self.engine)
        return [(numbers[i], errors[i]) for i in range(count)]

    def admit(self, int number) -> None:
        """Let a channel carry queued work, and post what it takes now."""
        cdef Channel* channel = self.channel_of(number)
        with nogil:
            lock(self.engine)
            channel.paused = False
            pump_peer(&self.engine.state, &self.state)
            kick(self.engine)
            unlock(self.engine)

    def carries(self, int number) -> bool:
        """Return whether a channel carries queued work."""
        cdef Channel* channel = self.channel_of(number)
        return channel.open and not channel.paused

    def shut(self, int number) -> None:
        """Shut a channel's endpoint: no byte moves through it any more when this returns. Idempotent."""
        cdef Channel* channel = self.channel_of(number)
        with nogil:
            lock(self.engine)
            if self.state.mailbox != NULL and self.state.mailbox.channel == channel:
                self.mail_lost_with = number
            shut_channel(self.engine, channel)
            self.drop_notice(channel)
            kick(self.engine)
            unlock(self.engine)
        endpoint, self.endpoints[number] = self.endpoints[number], None
        if endpoint is not None:
            (<NativeEndpoint> endpoint).channel_closed()

    def arrivals(self, int number) -> tuple[list[tuple[int, int]], int, list[int]]:
        """Return what came over a shut channel, as (immediate, times) without what was acknowledged; the highest number
        of the peer's messages that came; and the numbers below it that did not come.
        """
        cdef Channel* channel = self.channel_of(number)
        cdef uint64_t top, slots = self.state.mailbox.slots if self.state.mailbox != NULL else 1
        cdef uint64_t* seen = <uint64_t*> calloc(slots, sizeof(uint64_t))
        cdef Tally arrived
        cdef int code = -1
        if seen == NULL:
            raise MemoryError
        with nogil:
            lock(self.engine)
            top = mailbox_arrivals(self.state.mailbox, seen)
            code = tally_copy(&channel.arrived, &arrived)
            unlock(self.engine)
        try:
            if code != 0:
                raise MemoryError
            return tally_items(&arrived), top, mailbox_holes(top, seen, slots)
        finally:
            tally_free(&arrived)
            free(seen)

    def forgets(self, int number) -> bool:
        """Return whether closing a channel's endpoint drops what its completion queue still holds."""
        return self.channel_of(number).forgets

    def lost_keys(self, int number) -> list[int]:
        """Return the keys of the peer's memory for which a shut channel has lost work, each once."""
        cdef Channel* channel = self.channel_of(number)
        cdef uint64_t* keys = <uint64_t*> calloc(channel.depth, sizeof(uint64_t))
        cdef uint32_t i, count
        if keys == NULL:
            raise MemoryError
        with nogil:
            lock(self.engine)
            count = lost_keys(channel, keys)
            unlock(self.engine)
        try:
            return [*dict.fromkeys([keys[i] for i in range(count)])]
        finally:
            free(keys)

    def reconcile(self, int number, list arrivals, uint64_t top, list holes, list unknown) -> bool:
        """Do again the work that a shut channel has lost, by the account of the peer, which has shut it too.

        Work for keys `unknown` to the peer fails. Return False where the account cannot be true.
        """
        cdef Channel* channel = self.channel_of(number)
        immediates = array("I", [imm_data for imm_data, _ in arrivals])
        counts = array("q", [times for _, times in arrivals])
        lost = array("Q", holes)
        keys = array("Q", unknown)
        cdef uint64_t* lost_numbers = <uint64_t*> items_of(lost)
        cdef bint honest
        cdef uint64_t missing = len(holes)
        cdef Account account
        account.imm_data = <uint32_t*> items_of(immediates)
        account.counts = <int64_t*> items_of(counts)
        account.count = len(arrivals)
        account.unknown = <uint64_t*> items_of(keys)
        account.unknown_count = len(unknown)
        with nogil:
            lock(self.engine)
            honest = contradiction(channel, &account) < 0
            # Only the account of the channel that lost the messages resolves them: another channel's may be older.
            if honest and self.mail_lost_with == number:
                self.mail_lost_with = -1
                honest = mailbox_resolve(&self.engine.state, self.state.mailbox, top, lost_numbers, missing)
                pend(&self.state)
            if honest:
                redo_all(&self.engine.state, channel, &account)
                # The next generation begins with empty tallies, even one that fails before it has a channel.
                tally_free(&channel.confirmed)
                tally_free(&channel.arrived)
            kick(self.engine)
            unlock(self.engine)
        return honest

    def counts_to_ack(self, int number) -> list[tuple[int, int]]:
        """Take the confirmed counts of a channel out of its tally and return them, so that the peer can do the same."""
        cdef Channel* channel = self.channel_of(number)
        cdef Tally taken
        with nogil:
            lock(self.engine)
            taken = tally_take(&channel.confirmed)
            unlock(self.engine)
        try:
            return tally_items(&taken)
        finally:
            tally_free(&taken)

    def ack_counts(self, int number, list items) -> bool:
        """Take the counts that the peer acknowledges out of the tally of arrivals. Return False where there is no room;
        and, with no count taken, for counts that a channel cannot have reached.
        """
        cdef Channel* channel = self.channel_of(number)
        cdef uint32_t* values
        cdef uint64_t* times
        cdef Py_ssize_t i, n = len(items)
        cdef bint fits = True
        if any(not 0 <= count <= MAX_ACKED for _, count in items):
            return False
        immediates = array("I", [imm_data for imm_data, _ in items])
        counts = array("Q", [count for _, count in items])
        values, times = <uint32_t*> items_of(immediates), <uint64_t*> items_of(counts)
        with nogil:
            lock(self.engine)
            for i in range(n):
                fits = tally_add(&channel.arrived, values[i], -<int64_t> times[i]) == 0 and fits
            unlock(self.engine)
        return fits

    def decay_costs(self) -> None:
        """Lower the measured costs of idle channels step by step, so that they are tried again."""
        if self.closed or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            decay_costs(&self.state)
            unlock(self.engine)

    @property
    def mailbox_waits(self) -> bool:
        """Whether messages have to move to another channel: theirs has failed, and its losses are resolved."""
        return self.state.mailbox != NULL and self.state.mailbox.channel == NULL and self.mail_lost_with < 0

    def holding(self, Operation operation) -> list[int]:
        """Return the open channels that hold work of a transfer, of its targets or pieces, or of its message."""
        cdef uint32_t holding = 0
        cdef int i
        if self.closed or not alive(self.engine):
            return []
        with nogil:
            lock(self.engine)
            for i in range(self.state.channel_count):
                if self.holds(self.state.channels[i], &operation.op):
                    holding |= <uint32_t> 1 << i
            unlock(self.engine)
        return [i for i in range(MAX_CHANNELS) if holding >> i & 1]

    cdef bint holds(self, const Channel* channel, const Op* op) noexcept nogil:
        cdef uint32_t i
        if not channel.open:
            return False
        for i in range(channel.depth):
            if channel.requests[i].busy and is_part_of(<const Op*> channel.requests[i].owner, op):
                return True
        return op.opcode == OP_SEND and self.state.mailbox != NULL and self.state.mailbox.channel == channel
