"""The progress loop: drain completion queues, post what waits, and sleep when there is nothing to do.

A round drains every channel and gives every peer's queue its turn. While something is outstanding or awaited, the loop
keeps going for `spin_ns` after the last progress. Then it clears its own wake-ups, announces that it sleeps, drains
once more, and arms every rail. Only then may its caller sleep on the one epoll descriptor, because whatever comes after
the last drain makes that descriptor readable. A timer covers the things that no descriptor announces: posts that a
provider refused, rails without a wait descriptor, watched values, and copies by a GPU.

The same function serves an event loop, and a native thread that never takes the GIL.
"""

from libc.errno cimport ENOSPC
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.unistd cimport read, write

from aiote_native.clocks cimport clock_ns, start_timer
from aiote_native.counters cimport arrive, done_push, table_forget, table_greediest
from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.gates cimport gate_poll
from aiote_native.messages cimport mailbox_received, mailbox_sent
from aiote_native.peer_wakeups cimport drain_wakeups, wake_peer
from aiote_native.pending cimport pump_pending
from aiote_native.posting cimport give_back, op_completed, peer_fail
from aiote_native.recovery cimport channel_fault, confirm, count_arrival, lose_request, queue_failed
from aiote_native.resting cimport arm, goes_on, look_at_rings, look_for_stirred
from aiote_native.schedule cimport measure
from aiote_native.stream_orders cimport look_at_holds
from aiote_native.structs cimport (
    ARM_LATER, BROKEN, Completion, OP_RECV, OP_SEND, Op, POLL_BATCH, PeerState, SUSPECT, Slot, WorkRequest)
from aiote_native.tallies cimport tally_again

cdef extern from *:
    """
    #define aiote_store_word(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    #define aiote_swap_word(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
    #define aiote_add(p, v) __atomic_add_fetch((p), (v), __ATOMIC_SEQ_CST)
    #define aiote_full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
    static inline uint64_t aiote_load_word(const void* address, int width) {
        switch (width) {
        case 1: return __atomic_load_n((const uint8_t*)address, __ATOMIC_ACQUIRE);
        case 2: return __atomic_load_n((const uint16_t*)address, __ATOMIC_ACQUIRE);
        case 4: return __atomic_load_n((const uint32_t*)address, __ATOMIC_ACQUIRE);
        default: return __atomic_load_n((const uint64_t*)address, __ATOMIC_ACQUIRE);
        }
    }
    """
    void aiote_store_word(uint32_t*, uint32_t) noexcept nogil
    uint32_t aiote_swap_word(uint32_t*, uint32_t) noexcept nogil
    void aiote_full_fence() noexcept nogil
    int aiote_add(int*, int) noexcept nogil
    uint64_t aiote_load_word(const void*, int) noexcept nogil

cdef enum:
    DRAIN_ROUNDS = 8               # batches taken from one queue before the next one's turn
    TICK_FIRST_NS = 1_000_000      # the timer's first interval; without progress it doubles up to the last one
    TICK_LAST_NS = 32_000_000
    # An event loop that came back within ALONE_NS is otherwise idle, so it may be kept for SLICE_NS: a turn of the loop
    # costs 3 to 6 us, during which arrivals are not seen.
    ALONE_NS = 30_000
    SLICE_NS = 50_000
    CLOCK_MASK = 7
    FEW_CHANNELS = 8               # up to this number, all channels are polled in every round
    QUIET_ROUNDS = 64              # rounds without an event after which one of many channels is polled rarely
    RARELY = 16                    # rounds from one rare poll to the next
    TELL_ROUNDS = 4                # rounds from one call that asks for readable channels at rest to the next
    HOLD_ROUNDS = 4                # rounds from one query of streams to the next: each takes a lock of the driver's
    WATCH_FIRST_NS = 50_000, WATCH_LAST_NS = 1_000_000


cdef void lock(Progress* self) noexcept nogil:
    """Take the engine's lock; a native thread that holds it is asked to step aside.

    It begins a `with nogil:` block that ends with `unlock` (tests/lint/test_locks.py). So no code can make a Python
    object, raise or wait for the GIL while it holds the lock: the garbage collector would take the lock once more, an
    exception would leave it taken for good, and the native thread would stand still while Python computes.
    """
    if pthread_mutex_trylock(&self.lock) == 0:
        return
    aiote_add(&self.wanted, 1)
    pthread_mutex_lock(&self.lock)
    aiote_add(&self.wanted, -1)


cdef void unlock(Progress* self) noexcept nogil:
    pthread_mutex_unlock(&self.lock)


cdef void signal_wake(Progress* self) noexcept nogil:
    """Make the wake descriptor readable; callable from any thread."""
    cdef uint64_t one = 1
    write(self.wake_fd, &one, sizeof(one))
    # Set only now: a thread that cleared it before the descriptor is readable would never read the descriptor.
    aiote_store_word(&self.called, 1)


cdef void kick(Progress* self) noexcept nogil:
    """Count this moment as activity, and wake the native thread if it sleeps. The lock is held."""
    self.fresh = True
    if self.threaded and self.asleep:
        self.asleep = False
        signal_wake(self)


cdef void new_epoch(Progress* self) noexcept nogil:
    self.epoch = fork_epoch()


cdef bint alive(Progress* self) noexcept nogil:
    """Return whether the engine is open and belongs to this process."""
    return not self.closed and self.epoch == fork_epoch()


cdef int usable(Progress* self) except -1:
    check_process(self.epoch)
    if self.closed:
        raise RuntimeError("the engine is closed")
    return 0


cdef void request_over(State* state, Channel* channel, WorkRequest* wr, const Completion* completion) noexcept nogil:
    """Tell the owner of a work request that the NIC is done with it."""
    cdef Op* op
    cdef uint64_t length = wr.length
    if wr.opcode == OP_RECV:
        mailbox_received(state, channel.peer.mailbox, <Slot*> wr.owner, completion)
        return
    channel.outstanding -= 1
    channel.ended += 1
    if channel.waiting != NULL:
        channel.waiting[0] = channel.outstanding
    state.outstanding -= 1
    state.completed += 1
    if completion.status == 0:
        state.carried[channel.rail] += length
    if completion.status != 0 and channel.peer.survivable and channel.open and wr.owner != NULL:
        lose_request(state, wr, completion.status, completion.provider_errno)
        channel_fault(state, channel, SUSPECT, completion.status)
        return
    if wr.opcode == OP_SEND:
        mailbox_sent(state, channel.peer.mailbox, <Slot*> wr.owner, completion)
        return
    op = <Op*> wr.owner
    channel.in_flight -= length
    if channel.peer.channel_count > 1:
        channel.rate_bytes += length
    if channel.peer.survivable and wr.counted and not tally_again(&channel.confirmed, wr.imm_data, <int64_t> wr.parts):
        confirm(state, channel, wr)
    give_back(channel, wr)
    if op != NULL:
        op_completed(state, op, completion.status, completion.provider_errno, channel.rail, length)


cdef int count(State* state, PeerState* peer, const Completion* completion) noexcept nogil:
    """Count an immediate. Where the table is full, make room at the cost of the peers that filled it: those that are
    gone, or else the one with the most counters that have no handle. -ENOSPC where that is this peer, or there is none.
    """
    cdef int code = arrive(&state.counters, completion.imm, completion.times, peer, &state.done)
    cdef PeerState* greediest
    if code != -ENOSPC:
        return code
    if table_forget(&state.counters, NULL) == 0:
        greediest = table_greediest(&state.counters, state.peers)
        if greediest == NULL or greediest == peer:
            return code
        table_forget(&state.counters, greediest)
        peer_fail(state, greediest, code, -1)
    return arrive(&state.counters, completion.imm, completion.times, peer, &state.done)


cdef void handle(State* state, Channel* channel, const Completion* completion) noexcept nogil:
    cdef int code
    if completion.wr == NULL:
        if completion.status != 0:
            queue_failed(state, channel, completion.status)
            return
        state.immediates += completion.times
        if channel.peer.survivable and not tally_again(&channel.arrived, completion.imm, completion.times):
            count_arrival(state, channel, completion.imm, completion.times)
        code = count(state, channel.peer, completion)
        if code != 0:
            peer_fail(state, channel.peer, code, channel.rail)
    elif completion.wr.busy:
        request_over(state, channel, completion.wr, completion)


cdef int drain(State* state, Channel* channel) noexcept nogil:
    cdef Completion batch[POLL_BATCH]
    cdef int got = 0
    cdef int total = 0
    cdef int i
    for _turn in range(DRAIN_ROUNDS):
        got = gate_poll(channel, batch, POLL_BATCH)
        if got < 0:
            queue_failed(state, channel, got)
            break
        for i in range(got):
            handle(state, channel, &batch[i])
        total += got
        if got < POLL_BATCH:
            # The queue is nearly empty, so the rest can wait for the next round: a poll takes the peer's posting locks.
            break
    if total:
        state.events += total
        if channel.rate_bytes and channel.peer.timed:
            measure(channel)
    state.events += goes_on(channel)  # moving bytes keep the loop awake, as completions do
    if channel.peer_page != NULL:
        state.wakeups += wake_peer(channel, total == 0)
    return total


cdef void check_watches(Progress* self) noexcept nogil:
    """Compare each watched value with its old value, and end the watches that see a change."""
    cdef Watched* watched = self.watches
    cdef Watched* following
    cdef uint64_t value
    while watched != NULL:
        following = watched.next
        value = aiote_load_word(watched.address, watched.width)
        if value != watched.old:
            watched.new = value
            watch_unlink(self, watched)
            done_push(&self.state.done, &watched.done)
            self.state.events += 1
        watched = following


cdef void watch_link(Progress* self, Watched* watched) noexcept nogil:
    watched.prev = NULL
    watched.next = self.watches
    if self.watches != NULL:
        self.watches.prev = watched
    self.watches = watched
    watched.linked = True


cdef void watch_unlink(Progress* self, Watched* watched) noexcept nogil:
    if not watched.linked:
        return
    if watched.prev == NULL:
        self.watches = watched.next
    else:
        watched.prev.next = watched.next
    if watched.next != NULL:
        watched.next.prev = watched.prev
    watched.linked = False


cdef bint is_due(Progress* self, Channel* channel, bint every) noexcept nogil:
    """Return whether to poll a channel in this round. Of many channels, the quiet ones are polled now and then."""
    if not channel.open or channel.fault == BROKEN:
        return False
    return (every or self.state.channels <= FEW_CHANNELS or channel.outstanding or channel.quiet < QUIET_ROUNDS
            or (self.rounds + channel.quiet) % RARELY == 0)


cdef void one_round(Progress* self, bint every) noexcept nogil:
    """Do one round. With `every`, all channels are polled, because the loop is about to sleep."""
    cdef State* state = &self.state
    cdef Channel* channel
    cdef Channel* following
    self.rounds += 1
    state.blocked = 0
    if state.lists.announced and (every or self.rounds % TELL_ROUNDS == 0):
        look_for_stirred(self.epoll_fd)
    if state.lists.looked_at != NULL:
        look_at_rings(&state.lists, every)
    channel = state.lists.polled
    while channel != NULL:
        following = channel.next_listed
        if is_due(self, channel, every):
            channel.quiet = 0 if drain(state, channel) else channel.quiet + 1
        channel = following
    if state.lists.pending != NULL:
        pump_pending(state)
    if self.watches != NULL:
        check_watches(self)
    if state.holds != NULL and (every or self.rounds % HOLD_ROUNDS == 0):
        look_at_holds(state)


cdef bint active(Progress* self) noexcept nogil:
    cdef State* state = &self.state
    return state.outstanding != 0 or state.queued != 0 or self.waits != 0 or self.receivers != 0


cdef void clear_wakeups(Progress* self) noexcept nogil:
    cdef uint64_t value
    if self.wakeup_page != NULL:
        drain_wakeups(self.wakeup_fd)
    if aiote_swap_word(&self.called, 0):
        read(self.wake_fd, &value, sizeof(value))
    if self.timer_armed and read(self.timer_fd, &value, sizeof(value)) == sizeof(value):
        self.timer_armed = False


cdef bint all_armed(Progress* self) noexcept nogil:
    """Arm every channel, even after one that has to be polled again; return whether all of them will wake us."""
    cdef Channel* channel = self.state.lists.polled
    cdef Channel* following
    cdef bint armed = True
    cdef int code
    self.copying = False
    while channel != NULL:
        following = channel.next_listed
        code = arm(channel, self.state.channels > FEW_CHANNELS)
        self.copying |= code == ARM_LATER
        armed &= code in (0, ARM_LATER)
        channel = following
    return armed


cdef bint needs_tick(Progress* self) noexcept nogil:
    cdef Channel* channel = self.state.lists.polled
    if self.state.blocked:
        return True
    while channel != NULL:
        if channel.wait_fd < 0 and channel.outstanding:
            return True
        channel = channel.next_listed
    return False


cdef void set_timer(Progress* self) noexcept nogil:
    cdef uint64_t interval, first, last
    cdef bint watching = self.watches != NULL or self.copying or self.state.holds != NULL
    if self.timer_armed or not (watching or needs_tick(self)):
        return
    first = WATCH_FIRST_NS if watching else TICK_FIRST_NS
    last = WATCH_LAST_NS if watching else TICK_LAST_NS
    interval = self.tick_ns if first <= self.tick_ns <= last else first
    self.tick_ns = min(interval * 2, last)
    start_timer(self.clock, self.clock_context, self.timer_fd, interval)
    self.timer_armed = True


cdef void announce_sleep(Progress* self) noexcept nogil:
    if self.wakeup_page != NULL:
        aiote_store_word(&self.wakeup_page.asleep, self.wakeup_page.asleep | 1)
        aiote_full_fence()


cdef void announce_awake(Progress* self) noexcept nogil:
    if self.wakeup_page != NULL and self.wakeup_page.asleep & 1:
        aiote_store_word(&self.wakeup_page.asleep, self.wakeup_page.asleep + 1)


cdef bint made_progress(Progress* self) noexcept nogil:
    if self.state.events == self.seen_events:
        return False
    self.seen_events = self.state.events
    self.fresh = True
    self.tick_ns = 0
    return True


cdef bint may_spin(Progress* self) noexcept nogil:
    """Return whether it is too early to sleep. Every eighth idle round reads the clock, which costs as much as a round.
    An engine that only watches values reads it each time, or it would do eight rounds whenever its timer wakes it."""
    cdef uint64_t now
    if self.spin_ns == 0 or not (active(self) or self.watches != NULL):
        return False
    self.idle += 1
    if self.idle & CLOCK_MASK and active(self):
        return True
    now = clock_ns()
    if self.fresh:
        self.fresh, self.last_activity = False, now
    return now - self.last_activity < self.spin_ns


cdef int progress_once(Progress* self) noexcept nogil:
    """Do one round, locked. Return 1 to be called again soon, 0 if it is safe to sleep on the epoll descriptor."""
    announce_awake(self)
    one_round(self, False)
    if made_progress(self):
        return 1
    if may_spin(self):
        return 1
    clear_wakeups(self)
    announce_sleep(self)
    one_round(self, True)
    if made_progress(self):
        announce_awake(self)
        return 1
    if not all_armed(self):
        # Poll once more here, because another turn of the event loop costs more.
        one_round(self, True)
        if made_progress(self) or not all_armed(self):
            announce_awake(self)
            return 1
    set_timer(self)
    self.sleeps += 1
    return 0


cdef bint has_news(Progress* self) noexcept nogil:
    """Return whether there is news for the event loop."""
    return self.state.done.head != NULL or self.state.failures or (self.state.inbox and self.receivers)


cdef uint64_t slice_end(Progress* self) noexcept nogil:
    """Return until when an event loop that calls now may be kept; 0 if it has other things to do."""
    cdef uint64_t now
    if self.clock != NULL:
        return 0
    now = clock_ns()
    return now + SLICE_NS if now - self.left_ns < ALONE_NS else 0


cdef int progress_until(Progress* self, uint64_t deadline) noexcept nogil:
    """Do one round, or more until there is news or the deadline comes, under the lock; return as `progress_once`."""
    cdef int again = progress_once(self)
    # Where no NIC copies, a round may copy for a third of a millisecond, and only the clock shows how long it took.
    while again and deadline and not has_news(self) and self.wanted == 0 and clock_ns() < deadline:
        again = progress_once(self)
    return again


cdef void call_loop(Progress* self) noexcept nogil:
    """Wake the event loop, once until it has collected what there is."""
    cdef uint64_t one = 1
    if not self.notified:
        self.notified = True
        write(self.notify_fd, &one, sizeof(one))


cdef void notify(Progress* self) noexcept nogil:
    """Tell the event loop that there is news, once for everything that it has not collected yet."""
    if has_news(self):
        call_loop(self)
