"""Progress: one round of an engine, when it may sleep, which channels rest, and how long work requests take."""

from libc.errno cimport ENOSPC, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close, read, write

from aiote_native.channels.failover cimport channel_fault, confirm, count_arrival, lose_request, queue_failed
from aiote_native.channels.messages cimport mailbox_received, mailbox_sent
from aiote_native.counters.table cimport arrive, done_push, table_forget, table_greediest, tally_again
from aiote_native.engine.gates cimport channel_arm, gate_poll
from aiote_native.engine.posting cimport give_back, measure, op_completed, peer_fail, pump_pending
from aiote_native.engine.structs cimport (
    ARM_LATER, BROKEN, MAX_RAILS, OP_RECV, OP_SEND, POLL_BATCH, SUSPECT, TIME_BUCKETS, Channel, Completion, Op,
    PeerState, Post, RailOps, RailTimes, Slot, WorkRequest)
from aiote_native.engine.worklists cimport rest, stir
from aiote_native.requests.operations cimport look_at_holds
from aiote_native.system.base cimport check, check_process, clock_ns, fork_epoch, start_timer
from aiote_native.system.wakeups cimport drain_wakeups, wake_peer

# The progress loop: drain completion queues, post what waits, and sleep when there is nothing to do.
#
# A round drains every channel and gives every peer's queue its turn. While something is outstanding or awaited, the
# loop keeps going for `spin_ns` after the last progress. Then it clears its own wake-ups, announces that it sleeps,
# drains once more, and arms every rail. Only then may its caller sleep on the one epoll descriptor, because whatever
# comes after the last drain makes that descriptor readable. A timer covers the things that no descriptor announces:
# posts that a provider refused, rails without a wait descriptor, watched values, and copies by a GPU.
#
# The same function serves an event loop, and a native thread that never takes the GIL.

cdef extern from *:
    """
    #define aiote_swap_word(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
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
    uint32_t aiote_swap_word(uint32_t*, uint32_t) noexcept nogil
    void aiote_full_fence() noexcept nogil
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
    one_round(self, every=False)
    if made_progress(self):
        return 1
    if may_spin(self):
        return 1
    clear_wakeups(self)
    announce_sleep(self)
    one_round(self, every=True)
    if made_progress(self):
        announce_awake(self)
        return 1
    if not all_armed(self):
        # Poll once more here, because another turn of the event loop costs more.
        one_round(self, every=True)
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


# Channels at rest: most of many peers have nothing to say, and should not cost a poll each whenever the loop sleeps.
#
# A channel of our own rails comes to rest when it is armed while nothing is outstanding on it and nothing is to be
# sent. Then only two things change it: this side posts on it (`gate_post` ends its rest), or its peer does something.
# The descriptor of a socket or of a simulated endpoint, which lies in the engine's epoll set, reports that: one call
# asks for all of them. For a ring, a look at its head and at the peer's gate shows it, without passing the gate or
# taking a lock. Until one of the two happens, the channel is neither polled nor armed again. A round looks at LOOKS
# rings, and at all of them before the engine sleeps, so that a thousand of them do not delay the work of one. Channels
# of other kinds, whose libraries have to be called, and those of engines with few channels never rest.

cdef extern from *:
    """
    #include <sys/epoll.h>
    #include <string.h>
    #define aiote_gate(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_SEQ_CST)
    /* Make the set report, with events of a descriptor, the tag that belongs to it. */
    static int aiote_tag(int epoll_fd, int fd, void* tag) {
        struct epoll_event event;
        memset(&event, 0, sizeof(event));
        event.events = EPOLLIN;
        event.data.ptr = tag;
        return epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
    }
    /* Store the tags of the readable descriptors, NULL for those without; return how many there are. */
    static int aiote_tags(int epoll_fd, void** tags) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll_fd, events, 64, 0);
        for (int i = 0; i < count; i++) tags[i] = events[i].data.ptr;
        return count;
    }
    """
    uint32_t aiote_gate(const uint32_t*) noexcept nogil
    int aiote_tag(int, int, void*) noexcept nogil
    int aiote_tags(int, void**) noexcept nogil


cdef enum:
    LOOKS = 16  # rings that a round looks at: no more than an engine had when each round looked at all of few


cdef int announce(int epoll_fd, Channel* channel) noexcept nogil:
    """Tag the channel's descriptor in the engine's set. The lock is held, so the set never reports a freed channel."""
    if channel.ops.announced and channel.wait_fd >= 0:
        return aiote_tag(epoll_fd, channel.wait_fd, channel)
    return 0


cdef void look_for_stirred(int epoll_fd) noexcept nogil:
    """End the rest of channels whose descriptors are readable: up to 64 of them, the others in the next round."""
    cdef void* tags[64]
    cdef int i
    for i in range(aiote_tags(epoll_fd, tags)):
        if tags[i] != NULL:
            stir(<Channel*> tags[i])


cdef bint is_stirred(Channel* channel) noexcept nogil:
    return channel.ops.stirred(channel.impl) or (
        channel.peer_gate != NULL and aiote_gate(channel.peer_gate) != channel.peer_generation)


cdef void look_at_rings(Worklists* lists, bint every) noexcept nogil:
    """End the rest of rings that something stirred: of the next few, or of all."""
    cdef Channel* channel = lists.looked_at if every or lists.next_look == NULL else lists.next_look
    cdef Channel* following
    cdef int left = LOOKS
    while channel != NULL and (every or left > 0):
        following = channel.next_listed
        if is_stirred(channel):
            stir(channel)
        channel = following
        left -= 1
    if not every:
        lists.next_look = channel


cdef int arm(Channel* channel, bint many) noexcept nogil:
    """Arm a channel that does not rest. If there are many, it rests from here on, unless it has something to do."""
    cdef int code = channel_arm(channel)
    if (code == 0 and many and channel.open and channel.outstanding == 0 and channel.ops.stirred != NULL
            and (not channel.ops.announced or channel.wait_fd >= 0) and not channel.ops.stirred(channel.impl)):
        rest(channel)
    return code


cdef bint goes_on(Channel* channel) noexcept nogil:
    """Return whether bytes of a request in flight have moved since the last look."""
    cdef const RailOps* ops = channel.ops if channel.endpoint_ops == NULL else channel.endpoint_ops
    cdef uint64_t before = channel.moved
    cdef bint within = False
    if ops.moved != NULL and channel.impl != NULL:
        channel.moved = ops.moved(channel.impl if channel.endpoint_ops == NULL else channel.endpoint, &within)
    return within and channel.moved != before


# Histograms of how long work requests take on each rail, from the post until the completion is polled.
#
# The functions here stand between a channel and its endpoint: the channel calls them, with itself as the endpoint, and
# they call the endpoint. A channel that is not timed has its endpoint's own functions, so timing costs nothing unless
# someone asks for it. A channel times one work request at once, every `every`-th, so work requests need no room for a
# time. Receives are left out, because they wait for the peer.


cdef int bucket_of(uint64_t ns) noexcept nogil:
    """Return the first bucket whose bound, 2 ** n microseconds, is not less; the last one has no bound."""
    cdef uint64_t us = (ns - 1) // 1000 if ns else 0
    cdef int bucket = 0
    while us and bucket < TIME_BUCKETS - 1:
        us >>= 1
        bucket += 1
    return bucket


def bucket(uint64_t ns) -> int:
    """Return the bucket that counts a time, to check it against the plain reference."""
    return bucket_of(ns)


cdef int timed_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    cdef int code
    if channel.timed_wr != NULL or args.opcode == OP_RECV:
        return channel.endpoint_ops.post(channel.endpoint, args, wr)
    if channel.untimed:
        code = channel.endpoint_ops.post(channel.endpoint, args, wr)
        channel.untimed -= code == 0
        return code
    channel.timed_ns = clock_ns()
    code = channel.endpoint_ops.post(channel.endpoint, args, wr)
    if code == 0:
        channel.timed_wr = wr
        channel.untimed = channel.timed_every - 1
    return code


cdef int timed_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    cdef int got = channel.endpoint_ops.poll(channel.endpoint, out, capacity)
    cdef int i
    if channel.timed_wr != NULL:
        for i in range(got):
            if out[i].wr == channel.timed_wr:
                take_time(channel, out[i].status)
                break
    return got


cdef void take_time(Channel* channel, int status) noexcept nogil:
    cdef uint64_t ns = clock_ns() - channel.timed_ns
    channel.timed_wr = NULL
    if status == 0:
        channel.times.buckets[bucket_of(ns)] += 1
        channel.times.sum_ns += ns


cdef int timed_flush(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.flush((<Channel*> impl).endpoint)


cdef int timed_arm(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.arm((<Channel*> impl).endpoint)


cdef bint timed_disconnect(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.disconnect((<Channel*> impl).endpoint)


cdef bint timed_reached(void* impl) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    return channel.endpoint_ops.reached != NULL and channel.endpoint_ops.reached(channel.endpoint)


cdef uint64_t timed_room(void* impl, const void* desc, uint64_t key) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    return 0 if channel.endpoint_ops.room == NULL else channel.endpoint_ops.room(channel.endpoint, desc, key)


cdef void timed_shut(void* impl) noexcept nogil:
    (<Channel*> impl).endpoint_ops.shut((<Channel*> impl).endpoint)


cdef void timed_release(void* impl) noexcept nogil:
    (<Channel*> impl).endpoint_ops.release((<Channel*> impl).endpoint)


cdef RailOps timed
timed.post = timed_post
timed.flush = NULL
timed.poll = timed_poll
timed.arm = timed_arm
timed.disconnect = timed_disconnect
timed.reached = timed_reached
timed.room = timed_room
timed.shut = timed_shut
timed.release = timed_release

# For kinds that keep posts until the end of a turn.
cdef RailOps timed_keeping = timed
timed_keeping.flush = timed_flush


cdef void time_channel(Progress* engine, Channel* channel) noexcept nogil:
    """Time an open channel, or time it no longer, as the engine is set."""
    # Only the endpoint's own functions tell what stirs a channel at rest, so a resting one is looked at once more.
    stir(channel)
    if channel.endpoint_ops != NULL and engine.timed_every == 0:
        channel.ops = channel.endpoint_ops
        channel.impl = channel.endpoint
        channel.endpoint_ops = NULL
    elif channel.endpoint_ops == NULL and engine.timed_every != 0:
        channel.endpoint_ops = channel.ops
        channel.endpoint = channel.impl
        channel.ops = &timed if channel.ops.flush == NULL else &timed_keeping
        channel.impl = channel
    channel.timed_wr = NULL
    channel.untimed = 0
    channel.timed_every = engine.timed_every
    channel.times = &engine.times[channel.rail] if engine.times != NULL else NULL


cdef int time_rails(Progress* engine, uint32_t every) except -1:
    """Time one work request in `every` on each rail from now on; 0 ends that, and keeps the times."""
    cdef PeerState* peer
    cdef int i
    usable(engine)
    if engine.times == NULL:
        engine.times = <RailTimes*> calloc(MAX_RAILS, sizeof(RailTimes))
        if engine.times == NULL:
            raise MemoryError
    with nogil:
        lock(engine)
        engine.timed_every = every
        peer = engine.state.peers
        while peer != NULL:
            for i in range(peer.channel_count):
                if peer.channels[i].open:
                    time_channel(engine, peer.channels[i])
            peer = peer.next_peer
        unlock(engine)
    return 0


cdef list times_of(const RailTimes* times):
    """Return the buckets of each rail and the sum of its times in nanoseconds."""
    cdef int rail, i
    return [(tuple([times[rail].buckets[i] for i in range(TIME_BUCKETS)]), times[rail].sum_ns)
            for rail in range(MAX_RAILS)]


# Open and close the descriptors of an engine: an epoll set for its progress, and the one that the event loop watches.
#
# The set contains the rails' wait descriptors, a timer, an eventfd that any thread may write (`wake_fd`) and the socket
# of peer wake-ups. The eventfd of notifications (`notify_fd`) tells the event loop that a thread has news for it.

cdef extern from "<sys/epoll.h>" nogil:
    struct epoll_event:
        uint32_t events
    int epoll_create1(int)
    int epoll_wait(int, epoll_event*, int, int)
    int epoll_ctl(int, int, int, epoll_event*)
    const int EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL
    const uint32_t EPOLLIN

cdef extern from "<sys/timerfd.h>" nogil:
    int timerfd_create(int, int)
    const int TFD_CLOEXEC, TFD_NONBLOCK

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK


cdef void forget_descriptors(Progress* self) noexcept nogil:
    """Record that there is no descriptor."""
    self.epoll_fd = self.wake_fd = self.timer_fd = self.notify_fd = self.loop_fd = -1


cdef int open_descriptors(Progress* self, bint idle_thread) except -1:
    """Open them all; `close_descriptors` closes those that are open where this raises. `idle_thread`: core.pyx."""
    self.epoll_fd = open_set()
    check(self.epoll_fd, "epoll_create1")
    self.timer_fd = open_timer() if self.clock == NULL else open_eventfd()
    check(self.timer_fd, "timerfd_create")
    self.notify_fd = open_eventfd()
    check(self.notify_fd, "eventfd")
    self.wake_fd = open_eventfd()
    check(self.wake_fd, "eventfd")
    if self.wakeup_page != NULL:
        watch_descriptor(self.epoll_fd, self.wakeup_fd)
    watch_descriptor(self.epoll_fd, self.wake_fd)
    watch_descriptor(self.epoll_fd, self.timer_fd)
    if idle_thread:
        self.loop_fd = open_set()
        check(self.loop_fd, "epoll_create1")
        watch_descriptor(self.loop_fd, self.epoll_fd)
        watch_descriptor(self.loop_fd, self.notify_fd)
    elif not self.threaded:  # a thread that makes a round (requests/threaded.pyx) tells the loop through it
        watch_descriptor(self.epoll_fd, self.notify_fd)
    return 0


cdef void close_descriptors(Progress* self) noexcept:
    """Close those that are open."""
    for fd in (self.epoll_fd, self.timer_fd, self.notify_fd, self.wake_fd, self.loop_fd):
        if fd >= 0:
            close(fd)


cdef int descriptor_of_loop(const Progress* self) noexcept nogil:
    """Return the descriptor that the event loop watches for reading."""
    if self.loop_fd >= 0:
        return self.loop_fd
    return self.notify_fd if self.threaded else self.epoll_fd


cdef int open_set() noexcept nogil:
    cdef int fd = epoll_create1(EPOLL_CLOEXEC)
    return fd if fd >= 0 else -errno


cdef int open_timer() noexcept nogil:
    cdef int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
    return fd if fd >= 0 else -errno


cdef int open_eventfd() noexcept nogil:
    cdef int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return fd if fd >= 0 else -errno


cdef int add_descriptor(int epoll_fd, int fd) noexcept nogil:
    """Add a descriptor to a set; return 0 or a negative error number."""
    cdef epoll_event event
    memset(&event, 0, sizeof(event))
    event.events = EPOLLIN
    return -errno if epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) else 0


cdef int watch_descriptor(int epoll_fd, int fd) except -1:
    """Add a descriptor to a set. `unwatch_descriptor` takes it out, before it is closed."""
    return check(add_descriptor(epoll_fd, fd), "epoll_ctl")


cdef void unwatch_descriptor(int epoll_fd, int fd) noexcept nogil:
    """Take a descriptor out of a set. Closing it does not do that after a fork: the child has it, too."""
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL)


cdef void sleep_on(int epoll_fd) noexcept nogil:
    """Sleep until a descriptor of the set is readable. It stays readable; a round reads it."""
    cdef epoll_event event
    epoll_wait(epoll_fd, &event, 1, -1)
