"""The channels of one peer: the work and the counts of each, and the shutdown of a channel that fails.

`aiote.core.failover` owns the protocol of failed channels; recovery.pyx does again the work that a channel has lost.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from array import array

from aiote_native.channels cimport shut_channel
from aiote_native.mailbox_failover cimport mailbox_arrivals, mailbox_holes, mailbox_resolve
from aiote_native.posting cimport pump_peer
from aiote_native.progress cimport alive, kick, lock, unlock
from aiote_native.provider cimport NativeEndpoint
from aiote_native.recovery cimport Account, contradiction, is_part_of, lost_keys, redo_all
from aiote_native.schedule cimport decay_costs, rotate
from aiote_native.structs cimport Channel, MAX_CHANNELS, Mailbox, OP_SEND, Op, PeerState, SOUND, WorkRequest
from aiote_native.tallies cimport Tally, tally_add, tally_copy, tally_free, tally_items, tally_take
from aiote_native.worklists cimport pend
from aiote_native.workrequests cimport Operation


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
