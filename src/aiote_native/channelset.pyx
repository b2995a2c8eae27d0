"""The channels of one peer: what they have carried, and what becomes of one that fails.

The protocol of channels that fail is `aiote.core.failover`; what a lost one did is done again by recovery.pyx.
"""

from cpython.array cimport array
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from aiote_native.channels cimport shut_channel
from aiote_native.kinds cimport NativeEndpoint
from aiote_native.ledger cimport tally_add, tally_free, tally_items
from aiote_native.moving cimport mailbox_came, mailbox_unsure
from aiote_native.posting cimport pump_peer
from aiote_native.progress cimport alive, kick, lock, unlock, usable
from aiote_native.recovery cimport Account, impossible, lost_keys, redo_all, works_for
from aiote_native.schedule cimport fade
from aiote_native.structs cimport Channel, Mailbox, OP_SEND, Op, PeerState, SOUND, WorkRequest
from aiote_native.workrequests cimport Operation


cdef class ChannelSet:
    """The part of a peer's link that knows its channels. A base class: it has no life of its own."""

    def __cinit__(self):
        memset(&self.state, 0, sizeof(self.state))
        self.closed = True
        self.mail_lost_with = -1
        self.channels = 1
        self.endpoints = []

    cdef uint64_t largest(self) noexcept nogil:
        """The largest message that every channel takes."""
        cdef uint64_t least = 0xFFFFFFFFFFFFFFFFULL
        cdef int i
        for i in range(self.state.channel_count):
            if self.state.channels[i].largest < least:
                least = self.state.channels[i].largest
        return least

    cdef int widest(self) noexcept nogil:
        """The highest number of a remote rail in use."""
        cdef int most = -1
        cdef int i
        for i in range(self.state.channel_count):
            if self.state.channels[i].remote_rail > most:
                most = self.state.channels[i].remote_rail
        return most

    def under_way(self) -> dict[int, int]:
        """Return how many work requests have ended on each channel that is to move: it has some outstanding, or all are
        idle though something is queued, for they refuse it; or it is the one that a queued probe is for.
        """
        cdef Mailbox* mailbox = self.state.mailbox
        cdef Op* op = self.state.probes.head
        cdef bint refused
        cdef uint32_t moving = 0
        cdef int i
        while op != NULL:
            moving |= <uint32_t> 1 << (op.proof - 1)
            op = op.next
        refused = self.state.queue.head != NULL or (
            mailbox != NULL and mailbox.head != NULL and mailbox.sent - mailbox.granted < mailbox.peer_slots)
        for i in range(self.state.channel_count):
            if self.state.channels[i].outstanding:
                moving |= <uint32_t> 1 << i
                refused = False
        return {
            i: self.state.channels[i].ended
            for i in range(self.state.channel_count)
            if self.state.channels[i].open and (refused or moving >> i & 1)
        }

    def ended(self) -> list[int]:
        """Return how many work requests have ended on each channel since it was opened."""
        return [self.state.channels[i].ended for i in range(self.state.channel_count)]

    def moved(self, int channel) -> int:
        """Return how many bytes a channel's connection has moved either way; -1 where nobody can tell."""
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
        """Return our rail under a channel."""
        return self.state.channels[channel].rail if 0 <= channel < self.state.channel_count else -1

    def expect(self, int channels, bint in_turn, bint survivable) -> None:
        """Say, before the first is added, how many channels there will be, whether they take turns instead of each
        getting what it is able to carry, and whether the peer survives the loss of one.
        """
        self.channels = channels
        self.state.survivable = survivable
        self.state.in_turn = in_turn

    @property
    def nbytes(self) -> int:
        """The native memory of the link, beside its message pools and what the provider has."""
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

    def notices(self) -> list[tuple[int, int]]:
        """Return (channel, error number) of those that have something to be looked at since the last call; 0: it is
        only to be settled.
        """
        cdef Channel* channel
        cdef int i
        found = []
        for i in range(self.state.channel_count if alive(self.engine) else 0):
            channel = self.state.channels[i]
            if channel.noticed:
                self.drop_notice(channel)
                found.append((i, -channel.error if channel.fault != SOUND else 0))
        return found

    def admit(self, int number) -> None:
        """Let a channel carry what is queued."""
        cdef Channel* channel = self.channel_of(number)
        lock(self.engine)
        with nogil:
            channel.paused = False
            pump_peer(&self.engine.state, &self.state)
            kick(self.engine)
        unlock(self.engine)

    def carries(self, int number) -> bool:
        """Whether a channel carries what is queued."""
        cdef Channel* channel = self.channel_of(number)
        return channel.open and not channel.paused

    def shut(self, int number) -> None:
        """Shut a channel's endpoint: no byte moves through it any more when this returns. Idempotent."""
        cdef Channel* channel = self.channel_of(number)
        usable(self.engine)
        lock(self.engine)
        with nogil:
            if self.state.mailbox != NULL and self.state.mailbox.channel == channel:
                self.mail_lost_with = number
            shut_channel(self.engine, channel)
            self.drop_notice(channel)
            kick(self.engine)
        unlock(self.engine)
        endpoint, self.endpoints[number] = self.endpoints[number], None
        if endpoint is not None:
            (<NativeEndpoint> endpoint).taken_back()

    def arrivals(self, int number) -> tuple[list[tuple[int, int]], int, list[int]]:
        """Return what came over a channel that was shut, as (word, times), less what was settled; and, of the messages
        of the peer, the highest number that came and those below it that did not.
        """
        cdef Channel* channel = self.channel_of(number)
        lock(self.engine)
        try:
            top, holes = mailbox_came(self.state.mailbox)
            return tally_items(&channel.arrived), top, holes
        finally:
            unlock(self.engine)

    def lost_keys(self, int number) -> list[int]:
        """Return the keys of the peer's memory that a shut channel has lost work for, each once."""
        cdef Channel* channel = self.channel_of(number)
        lock(self.engine)
        keys = lost_keys(channel)
        unlock(self.engine)
        return keys

    def reconcile(self, int number, list arrivals, uint64_t top, list holes, list unknown) -> bool:
        """Do again what a shut channel has lost, given what the peer, which has shut it too, says that came.

        What is for keys `unknown` to the peer fails. False where what it says cannot be.
        """
        cdef Channel* channel = self.channel_of(number)
        cdef array words = array("I", [word for word, _ in arrivals])
        cdef array counts = array("Q", [times for _, times in arrivals])
        cdef array lost = array("Q", holes)
        cdef array keys = array("Q", unknown)
        cdef bint honest
        cdef uint64_t missing = len(holes)
        cdef Account account
        account.words = words.data.as_uints
        account.counts = <uint64_t*> counts.data.as_ulonglongs
        account.count = len(arrivals)
        account.unknown = <uint64_t*> keys.data.as_ulonglongs
        account.unknown_count = len(unknown)
        lock(self.engine)
        with nogil:
            honest = impossible(channel, &account) < 0
            # What the peer said of its messages for another channel may be older than what came over this one.
            if honest and self.mail_lost_with == number:
                self.mail_lost_with = -1
                honest = mailbox_unsure(&self.engine.state, self.state.mailbox, top,
                                        <uint64_t*> lost.data.as_ulonglongs, missing)
            if honest:
                redo_all(&self.engine.state, channel, &account)
                # The next generation begins with empty tallies, also one that comes to nothing before it has a channel.
                tally_free(&channel.confirmed)
                tally_free(&channel.arrived)
            kick(self.engine)
        unlock(self.engine)
        return honest

    def settlement(self, int number) -> list[tuple[int, int]]:
        """Take what was confirmed on a channel out of its tally, for the peer to do the same."""
        cdef Channel* channel = self.channel_of(number)
        lock(self.engine)
        items = tally_items(&channel.confirmed)
        tally_free(&channel.confirmed)
        unlock(self.engine)
        return items

    def settle(self, int number, list items) -> bool:
        """Take what the peer has settled out of the tally of what came; False where there is no room."""
        cdef Channel* channel = self.channel_of(number)
        cdef bint fits = True
        lock(self.engine)
        for word, count in items:
            fits = tally_add(&channel.arrived, word, -count) == 0 and fits
        unlock(self.engine)
        return fits

    def fade(self) -> None:
        """Let go of what is known of the speed of idle channels, by and by."""
        if not self.closed:
            fade(&self.state)

    @property
    def mail_waits(self) -> bool:
        """Whether messages are to go over another channel: theirs has failed, and what it has lost is known."""
        return self.state.mailbox != NULL and self.state.mailbox.channel == NULL and self.mail_lost_with < 0

    def holding(self, Operation operation) -> list[int]:
        """Return the open channels that have work of a transfer, or of its targets or pieces, or its message."""
        cdef Mailbox* mailbox = self.state.mailbox
        cdef Channel* channel
        cdef uint32_t j
        cdef int i
        found = []
        for i in range(self.state.channel_count):
            channel = self.state.channels[i]
            if not channel.open:
                continue
            for j in range(channel.depth):
                if channel.requests[j].busy and works_for(<Op*> channel.requests[j].owner, &operation.op):
                    found.append(i)
                    break
            else:
                if operation.op.opcode == OP_SEND and mailbox != NULL and mailbox.channel == channel:
                    found.append(i)
        return found
