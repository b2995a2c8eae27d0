"""The native engine: the calls of Python that submit, await and close, its counts, and its native threads."""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from posix.unistd cimport read

from aiote_native.channels.messages cimport mailbox_cancel, mailbox_start
from aiote_native.channels.peers cimport PeerLink, open_peer
from aiote_native.counters.table cimport table_find, table_free, table_init, table_pop_wait
from aiote_native.counters.waits cimport CounterHandle, SourceRange, ValueWatch, open_counter, open_range, start_watch
from aiote_native.cuda.driver cimport Hold
from aiote_native.engine.gates cimport batch_end, batch_flush
from aiote_native.engine.posting cimport op_cancel, split_op
from aiote_native.engine.progress cimport (
    ROUNDS, Progress, Watched, add_descriptor, alive, call_loop, clear_wakeups, close_descriptors, descriptor_of_loop,
    forget_descriptors, kick, lock, new_epoch, notify, one_round, open_descriptors, progress_once, progress_until,
    pthread_cond_init, pthread_cond_signal, pthread_cond_wait, pthread_join, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock, pthread_t, signal_wake, sleep_on, slice_end, time_rails, times_of, unlock, unwatch_descriptor,
    usable, watch_unlink)
from aiote_native.engine.structs cimport (
    MAX_RAILS, OP_READ, OP_SEND, OP_WRITE, Done, Op, PeerState, RailTimes, State, Wait)
from aiote_native.requests.operations cimport (
    LocalMemory, Operation, PageIndex, RemoteMemory, Waitable, finish, hold_of, start_behind, wake_all)
from aiote_native.system.base cimport Clock, check, clock_ns
from aiote_native.system.wakeups cimport WakeupEvent, wake_peer

# The native engine as Python sees it: peers, transfers, counts, and one call that makes progress.
#
# `Core.progress` does one round without the GIL; `Core.reap` calls `on_over` once for each transfer, wait or watch that
# is over. The event loop's thread calls both. With `threaded`, a native thread makes the progress, and only `reap` is
# left to the loop. The core keeps objects in flight alive (by one reference, from submission to reap).

cdef enum:
    IN_VAIN = 4  # turns in a row without anything for a task, after which the idle thread takes over


cdef class Core:
    """The native half of an engine.

    `spin_us` bounds spinning after the last progress. `threaded` moves progress to a native thread, pinned to `cpu` if
    that is not negative. `idle_thread`: one may make progress while the event loop sleeps. `smallest` is the least size
    of a stripe that is split only to spread a write over rails. `counters` limits live immediates. Rails without a wait
    descriptor need `wakeup_event`. With a `clock`, that clock sets the timers, and the engine never spins.
    """

    def __cinit__(self):
        memset(&self.engine, 0, sizeof(self.engine))
        forget_descriptors(&self.engine)
        self.engine.closed = True

    def __init__(self, *, uint64_t spin_us=50, bint threaded=False, int cpu=-1, uint64_t smallest=16384,
                 uint64_t counters=1 << 20, bint wakeup_event=False, Clock clock=None, bint idle_thread=False):
        if not self.engine.closed:
            raise RuntimeError("the core is open already")
        new_epoch(&self.engine)
        self.peers = {}  # a dict keeps the order in which they were made, and a set would not
        self.rooms = []
        self.smallest = smallest
        self.engine.closed = False
        self.engine.spin_ns = spin_us * 1000 if clock is None else 0
        self.clock = clock
        if clock is not None:
            self.engine.clock = clock.clock_ops
            self.engine.clock_context = clock.clock_context
        self.engine.threaded = threaded
        self.engine.cpu = cpu
        pthread_mutex_init(&self.engine.lock, NULL)
        pthread_cond_init(&self.engine.handed_over, NULL)
        try:
            table_init(&self.engine.state.counters, counters)
            if wakeup_event:
                self.wakeup_event = WakeupEvent()
                self.engine.wakeup_page = (<WakeupEvent> self.wakeup_event).page
                self.engine.wakeup_fd = (<WakeupEvent> self.wakeup_event).socket_fd
            open_descriptors(&self.engine, idle_thread and not threaded and clock is None)
            if threaded:
                where = f" on processor {cpu}, which thread_cpu asks for" if cpu >= 0 else ""
                check(-start_thread(&self.engine), f"start the native thread{where}")
        except BaseException:
            self.engine.threaded = False
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor that the event loop watches for reading."""
        return descriptor_of_loop(&self.engine)

    @property
    def closed(self) -> bool:
        return self.engine.closed

    @property
    def threaded(self) -> bool:
        return self.engine.threaded

    @property
    def relieved(self) -> bool:
        """Whether the idle thread makes progress now, in the event loop's place."""
        return self.engine.relieved

    @property
    def left_alone(self) -> bool:
        """Whether the idle thread makes progress, and has no news for the event loop."""
        return self.engine.relieved and not self.engine.notified

    @property
    def hand_overs(self) -> int:
        return self.engine.hand_overs

    def progress(self) -> bool:
        """Do one round. Return True to be called again soon, False when it is safe to sleep until `fd` is readable."""
        cdef int again
        usable(&self.engine)
        with nogil:
            lock(&self.engine)
            take_back(&self.engine)
            again = progress_once(&self.engine)
            if self.engine.threaded:
                # The round may have taken the wake-up of a native thread that sleeps on, so count it as asleep.
                self.engine.asleep = True
                if again:
                    # The round has just announced to the peers that this engine is awake, so it has to be.
                    kick(&self.engine)
            unlock(&self.engine)
        return again != 0

    def run_turn(self, on_round) -> bool:
        """Make progress and run the tasks that waited for it, in a callback of the event loop; return as `progress`.

        A turn is one round, or all that fit in 50 us if the last turn was just now and the loop had nothing else to do.
        An engine that does not spin does up to eight, because it sleeps right after a round without progress. With
        `shares`, as other cores are on the loop, it is one. `on_round(failed)` is for failed peers and messages.
        """
        # An engine that does not spin reads no clock: that can be a system call, and its round has few of those.
        cdef bint spins = self.engine.spin_ns != 0, again = True
        # If tasks woke in the last two turns, the loop usually has more to do: they started a task or filled a queue.
        cdef bint kept = spins and not self.shares and self.recent_wakes == 0
        cdef uint64_t deadline = slice_end(&self.engine) if kept else 0
        cdef int rounds = 0, most = 1 if spins or self.shares else ROUNDS
        # This turn itself looks at what the woken tasks start, so they need not tell the engine.
        self.awake = True
        self.recent_wakes = max(self.recent_wakes - 1, 0)
        try:
            while again:
                usable(&self.engine)
                with nogil:
                    lock(&self.engine)
                    take_back(&self.engine)
                    again = progress_until(&self.engine, deadline)
                    unlock(&self.engine)
                self.woke = False
                self.collect(direct=True, on_round=on_round)
                if not alive(&self.engine):
                    return False
                again = again or self.woke
                if self.woke or (self.engine.state.inbox and self.engine.receivers):
                    self.recent_wakes = 2
                rounds += 1
                if rounds < most:
                    continue
                if deadline == 0 or clock_ns() >= deadline:
                    break
        finally:
            self.awake = False
        if spins:
            self.engine.left_ns = clock_ns()
        if not again:
            self.end_turn()
        return again

    cdef void end_turn(self) noexcept:
        """Leave progress to the idle thread if the last turns were in vain. It is safe to sleep."""
        self.turns_in_vain += 1
        if self.turns_in_vain >= IN_VAIN and self.engine.loop_fd >= 0 and alive(&self.engine):
            self.turns_in_vain = 0
            with nogil:
                lock(&self.engine)
                hand_over(&self.engine)
                unlock(&self.engine)

    def wake(self) -> None:
        """Make `fd` readable, or wake the native thread; callable from any thread. Does nothing once closed."""
        if self.engine.closed:
            return  # the descriptor's number may belong to another file by now
        usable(&self.engine)
        if self.engine.loop_fd >= 0:
            with nogil:
                lock(&self.engine)
                call_loop(&self.engine)
                unlock(&self.engine)
        else:
            signal_wake(&self.engine)

    def take_wakeups(self) -> None:
        """Take the wake-ups that came since the last sleep, once for each sleep, while a round is still to come.

        A wake-up that stayed until the next sleep would make `fd` readable, and call the loop, in each turn until then.
        """
        if not self.awake or self.engine.relieved or self.sleeps_cleared == self.engine.sleeps:
            return
        usable(&self.engine)
        with nogil:
            lock(&self.engine)
            clear_wakeups(&self.engine)
            self.sleeps_cleared = self.engine.sleeps
            unlock(&self.engine)

    def reap(self, *, bint direct=False, on_round=None) -> list[PeerLink]:
        """Finish everything that is over, wake its waiters, and return the peers that failed since the last call.

        First all of it ends; then `on_round(failed)` is called where peers failed or messages are there, and `on_room`
        of links; tasks wake last, because they may do anything. `direct`: no task is running, so woken tasks run here,
        and messages are for `on_messages` alone, if that is set. An exception from any of these is raised at the end.
        """
        return self.collect(direct, on_round)

    cdef list collect(self, bint direct, on_round):
        """Do what `reap` says."""
        cdef Done *item, *following
        cdef uint64_t value
        cdef bint failures
        cdef list woken = [], failed = []
        if not alive(&self.engine):
            return failed  # in a child of a fork the lock may be held for good, and the descriptor is the parent's
        with nogil:
            lock(&self.engine)
            if self.engine.notified:
                self.engine.notified = False
                read(self.engine.notify_fd, &value, sizeof(value))
            item = self.engine.state.done.head
            self.engine.state.done.head = self.engine.state.done.tail = NULL
            failures = self.engine.state.failures != 0
            unlock(&self.engine)
        if item != NULL or failures:
            self.turns_in_vain = 0
        while item != NULL:
            following = item.next
            finish(<Waitable> <object> item.owner, woken)
            item = following
        failed = self.failed_peers() if failures else failed
        listener = self.on_messages if direct and self.engine.state.inbox else None
        raised = self.report_failures(failed, woken, on_round, listener is None)
        if woken or listener is not None:
            self.woke = True
            self.turns_in_vain = 0
            raised = self.run_woken(woken, direct, listener) or raised
        if raised is not None:
            raise raised
        return failed

    cdef object run_woken(self, list woken, bint direct, listener):
        """Wake tasks. The posts of tasks that run here are handed over after all of them have run."""
        if direct and alive(&self.engine):
            with nogil:
                lock(&self.engine)
                self.engine.state.batch.on = True
                unlock(&self.engine)
        raised = wake_all(woken, direct, listener)
        if direct and alive(&self.engine):
            with nogil:
                lock(&self.engine)
                batch_end(&self.engine.state.batch)
                unlock(&self.engine)
        return raised

    cdef object report_failures(self, list failed, list woken, on_round, bint untold):
        """Call `on_round` and the links' `on_room`, which may have tasks woken; return the last exception, or None."""
        cdef PeerLink link
        cdef list rooms = self.rooms
        raised = None
        # Peers first, because a lost peer has no room to offer.
        if on_round is not None and (failed or self.engine.state.failures or (untold and self.engine.state.inbox)):
            try:
                woken += on_round(failed)
            except BaseException as error:
                raised = error
        if rooms:
            self.rooms = []
            for link in rooms:
                link.is_room_due = False
                try:
                    if link.on_room is not None:
                        link.on_room()
                except BaseException as error:
                    raised = error
        return raised

    def noticed_peers(self) -> list[PeerLink]:
        """Return the peers that have `notices`."""
        cdef PeerLink link
        return [link for link in self.peers if link.is_noticed()] if self.engine.state.failures else []

    def failed_peers(self) -> list[PeerLink]:
        """Return the peers that failed since the last call."""
        cdef PeerLink link
        return [link for link in tuple(self.peers) if link.take_failure()]

    def submit_single(self, PeerLink peer, Operation operation, bint reads, LocalMemory local, uint64_t local_offset,
                      RemoteMemory remote, uint64_t remote_offset, uint64_t length, int64_t imm) -> None:
        """Start one write (or read) of `length` bytes; `imm` below 0 means that there is no immediate.

        Without memories `length` is 0, and an immediate alone is written. Raises ValueError for a range that leaves its
        region, and for bytes without memory on both sides.
        """
        usable(&self.engine)
        if length and (local is None or remote is None):
            raise ValueError(f"{length} bytes need both a local and a remote memory: only an empty write needs none")
        operation.take(local, local_offset, remote, remote_offset, length, length, reads)
        operation.op.part_bytes = length
        operation.op.parts = 1
        self.begin(peer, operation, reads, imm)

    def submit_probe(self, PeerLink peer, Operation operation, int number) -> None:
        """Start a write of no bytes over one channel, which need not carry anything else yet."""
        usable(&self.engine)
        if not 0 <= number < peer.state.channel_count:
            raise RuntimeError(f"there is no channel {number}")
        operation.take(None, 0, None, 0, 0, 0, False)
        operation.op.parts = 1
        operation.op.proof = number + 1
        self.begin(peer, operation, False, -1)

    cpdef object submit_pages(self, PeerLink peer, Operation operation, LocalMemory local, uint64_t local_offset,
                              PageIndex source, uint64_t source_stride, RemoteMemory remote, uint64_t remote_offset,
                              PageIndex target, uint64_t target_stride, uint64_t page_bytes, int64_t imm,
                              bint reads=False):
        """Start paged writes, or reads: page i is offset + source[i] * stride here, offset + target[i] * stride there.
        Raises ValueError for lists of different lengths and for a page that leaves its region.
        """
        cdef int64_t bad
        usable(&self.engine)
        if source.count != target.count:
            raise ValueError(f"{source.count} source pages, but {target.count} target pages: expected as many")
        bad = source.first_outside(page_bytes, source_stride, local_offset, local.length)
        if bad >= 0:
            raise ValueError(f"source page {bad} (index {source.values[bad]}) leaves a region of {local.length} bytes")
        bad = target.first_outside(page_bytes, target_stride, remote_offset, remote.length)
        if bad >= 0:
            raise ValueError(f"target page {bad} (index {target.values[bad]}) leaves a region of {remote.length} bytes")
        operation.take_pages(local, local_offset, source, source_stride, remote, remote_offset, target, target_stride,
                             page_bytes, reads)
        self.begin(peer, operation, reads, imm)

    cpdef bint is_at_home(self) except -1:  # whether the caller runs in the engine's event loop, if it has one
        return self.own_loop is None or self.own_loop.is_running()

    cdef int begin(self, PeerLink peer, Operation operation, bint reads, int64_t imm) except -1:
        cdef Op* op = &operation.op
        if peer.closed:
            raise RuntimeError("the peer is closed")
        if operation.remote is not None and operation.remote.rails <= peer.widest():
            raise ValueError("the remote memory was registered with fewer rails than its owner has connected")
        op.opcode = OP_READ if reads else OP_WRITE
        op.counted = imm >= 0
        op.imm = <uint32_t> imm if imm >= 0 else 0
        op.total = op.part_bytes * op.parts
        split_op(op, &peer.state, peer.largest(), self.smallest)
        self.launch(peer, operation)
        return 0

    def submit_send(self, PeerLink peer, Operation operation, bytes payload) -> None:
        """Start one message, which waits for a credit. Raises ValueError for one longer than the peer's pool takes."""
        usable(&self.engine)
        if peer.closed or peer.state.mailbox == NULL:
            raise RuntimeError("the peer is closed or takes no messages")
        if len(payload) > peer.message_limit:
            raise ValueError(f"a message of {len(payload)} bytes, but the peer accepts at most {peer.message_limit}")
        if operation.submitted:
            raise RuntimeError("the operation was already submitted")
        operation.kept = payload
        operation.op.opcode = OP_SEND
        operation.op.local_address = <uint64_t> <char*> payload
        operation.op.part_bytes = operation.op.total = len(payload)
        operation.op.parts = 1
        self.launch(peer, operation)

    cdef int launch(self, PeerLink peer, Operation operation) except -1:
        cdef Hold* hold = hold_of(operation.order, &self.engine)
        usable(&self.engine)
        operation.submitted = True
        if operation.local is not None:
            operation.local.in_flight += 1
        Py_INCREF(operation)
        with nogil:
            lock(&self.engine)
            if operation.op.opcode == OP_SEND:
                mailbox_start(&self.engine.state, &peer.state, &operation.op)
            else:
                start_behind(&self.engine.state, &peer.state, &operation.op, hold)
            kick(&self.engine)
            unlock(&self.engine)
        return 0

    def cancel(self, Operation operation) -> None:
        """Post nothing more of a transfer; it is over when its posted requests are."""
        cdef Op* op = &operation.op
        if not operation.submitted or operation.is_over or not alive(&self.engine):
            return
        with nogil:
            lock(&self.engine)
            # The peer of a transfer that is over may be gone before the transfer is reaped.
            if not op.over and op.opcode == OP_SEND:
                mailbox_cancel(&self.engine.state, op.peer.mailbox, op)
            elif not op.over:
                op_cancel(&self.engine.state, op)
            kick(&self.engine)
            unlock(&self.engine)

    def add_peer(self, tag: object) -> PeerLink:
        """Make the native half of a peer, which has no channels yet."""
        cdef PeerLink link = open_peer(self, &self.engine, tag)
        self.peers[link] = None
        return link

    def counter(self, uint32_t imm) -> CounterHandle:
        """Return a handle of the count of one immediate. Raises OverflowError at the limit of live immediates."""
        return open_counter(self, &self.engine, imm)

    def source_range(self, uint32_t first, uint32_t count) -> SourceRange:
        """Let only allowed peers count on `count` immediates from `first` on. The range must overlap no other."""
        return open_range(self, &self.engine, first, count)

    def watch(self, ValueWatch watch, object old) -> None:
        """Watch a value until it differs from `old`."""
        start_watch(self, &self.engine, watch, old)

    def is_counted(self, uint32_t imm) -> bool:
        """Return whether an immediate has counts, handles or waiters."""
        cdef bint present
        usable(&self.engine)
        with nogil:
            lock(&self.engine)
            present = table_find(&self.engine.state.counters, imm) != NULL
            unlock(&self.engine)
        return present

    def expect_messages(self, int change) -> None:
        """Record that `change` more (or, if negative, fewer) receivers wait for a message."""
        if not alive(&self.engine):
            return
        with nogil:
            lock(&self.engine)
            self.engine.receivers += change
            if change > 0:
                kick(&self.engine)
            unlock(&self.engine)

    @property
    def inbox(self) -> int:
        """The number of messages that arrived and were not taken."""
        return self.engine.state.inbox

    @property
    def rounds(self) -> int:
        """The number of rounds that were done, read without the lock: a change shows that the engine runs."""
        return self.engine.rounds

    def statistics(self) -> dict[str, Any]:
        """Return the counts since the core was opened."""
        return statistics_of(&self.engine)

    def time_rails(self, uint32_t every) -> None:
        """Time one work request in `every` on each rail from now on; 0 ends that, and keeps the times."""
        time_rails(&self.engine, every)

    def stop_thread(self) -> None:
        """End the native threads and wait for their ends (they never wait for the GIL). Idempotent."""
        if not alive(&self.engine):
            return
        with nogil:
            end_threads(&self.engine)

    def close(self) -> None:
        """Stop, and free everything. Idempotent; raises RuntimeError while peers are open."""
        if self.engine.closed:
            return
        if alive(&self.engine):
            if self.peers:
                raise RuntimeError(f"{len(self.peers)} peers are still open")
            if self.proxy is not None:
                self.proxy.close()
            self.stop_thread()
            self.collect(direct=False, on_round=None)
            self.end_waits()
        self.engine.closed = True
        if self.engine.clock != NULL:
            self.engine.clock.forget(self.engine.clock_context, self.engine.timer_fd)
        close_descriptors(&self.engine)
        if self.wakeup_event is not None:
            self.engine.wakeup_page = NULL
            self.wakeup_event.close()

    def end_waits(self) -> None:
        """End the waits and watches that are left, without satisfying them."""
        cdef Wait* wait
        cdef Watched* watched
        cdef uint64_t bucket = 0
        while True:
            wait = table_pop_wait(&self.engine.state.counters, &bucket)
            if wait == NULL:
                break
            finish(<Waitable> <object> wait.done.owner)
        while self.engine.watches != NULL:
            watched = self.engine.watches
            watch_unlink(&self.engine, watched)
            finish(<Waitable> <object> watched.done.owner)

    def __dealloc__(self):
        # A running thread uses this memory, so an engine that was never closed leaves it (and says so, in Python).
        if not self.engine.threaded and not self.engine.has_idle_thread:
            table_free(&self.engine.state.counters)
            free(self.engine.times)


# The counts of an engine, as a dictionary: taken together, so that the numbers fit each other.

cdef struct Counts:
    State state
    uint64_t sleeps
    uint64_t rounds
    uint64_t waits
    uint64_t depth[MAX_RAILS]  # work requests that a rail's channels hold now, without receives
    bint timed
    RailTimes times[MAX_RAILS]


cdef void copy(Progress* engine, Counts* counts) noexcept nogil:
    cdef PeerState* peer = engine.state.peers
    cdef int i
    counts.state, counts.sleeps, counts.rounds = engine.state, engine.sleeps, engine.rounds
    counts.waits = engine.waits
    memset(counts.depth, 0, sizeof(counts.depth))
    counts.timed = engine.times != NULL
    if counts.timed:
        memcpy(counts.times, engine.times, sizeof(counts.times))
    while peer != NULL:
        for i in range(peer.channel_count):
            counts.depth[peer.channels[i].rail] += peer.channels[i].outstanding
            counts.state.ended[peer.channels[i].rail] += peer.channels[i].ended
        peer = peer.next_peer


cdef dict statistics_of(Progress* engine):
    """Return the counts; those of a closed engine stay as they were."""
    cdef Counts counts
    cdef State* state = &counts.state
    cdef int rail
    if not ((engine.threaded or engine.has_idle_thread) and alive(engine)):
        copy(engine, &counts)
    else:
        with nogil:  # a native thread changes these counts, most of them under the lock
            lock(engine)
            copy(engine, &counts)
            unlock(engine)
    return {
        "posted": state.posted, "completed": state.completed,
        "refused": sum([state.refused[rail] for rail in range(MAX_RAILS)]),
        "immediates": state.immediates, "uninvited": state.counters.uninvited,
        "outstanding": state.outstanding, "queued": state.queued,
        "peer_wakeups": state.wakeups, "sleeps": counts.sleeps, "rounds": counts.rounds, "inbox": state.inbox,
        "counters": state.counters.used, "waits": counts.waits,
        "times": times_of(counts.times) if counts.timed else [],
        "refused_by": tuple([state.refused[rail] for rail in range(MAX_RAILS)]),
        "carried": tuple([state.carried[rail] for rail in range(MAX_RAILS)]),
        "ended": tuple([state.ended[rail] for rail in range(MAX_RAILS)]),
        "depth": tuple([counts.depth[rail] for rail in range(MAX_RAILS)]),
    }


# Native threads that make progress. They never take the GIL, so they run while Python computes.
#
# With the setting `progress="thread"` an engine has one for its whole life. The *idle thread* makes progress while the
# engine has no news for its event loop. A loop that sleeps in its selector wakes up in Python, and most turns of an
# engine whose memory others write end without anything for a task. So after a few such turns in a row the loop leaves
# the engine's descriptors to the idle thread and sleeps on, until there is news for it. Then it makes progress itself
# again, as it does when a task starts something.
#
# `loop_fd`, which the event loop watches, is an epoll set of the eventfd of notifications and, except while the idle
# thread makes progress, of the engine's own set. So nothing changes for the loop itself.

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #define aiote_load_int(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
    /* Start a thread that runs on processor `cpu` from its first instruction; on any processor if that is negative. */
    static int aiote_start(pthread_t* thread, int cpu, void* (*function)(void*), void* argument) {
        pthread_attr_t attributes;
        cpu_set_t set;
        int status = pthread_attr_init(&attributes);
        if (status != 0) return status;
        CPU_ZERO(&set);
        if (cpu >= 0) {
            if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
            status = pthread_attr_setaffinity_np(&attributes, sizeof(set), &set);
        }
        if (status == 0) status = pthread_create(thread, &attributes, function, argument);
        pthread_attr_destroy(&attributes);
        return status;
    }
    """
    int aiote_load_int(const int*) noexcept nogil
    int aiote_start(pthread_t*, int, void* (*)(void*) noexcept nogil, void*) noexcept nogil
    int sched_yield() noexcept nogil
    int pthread_setname_np(pthread_t, const char*) noexcept nogil


cdef int start_thread(Progress* self) noexcept nogil:
    """Start the native thread; return 0 or an error number (EINVAL where it may not run on the processor asked for)."""
    return aiote_start(&self.thread, self.cpu, run_thread, self)


cdef void end_threads(Progress* self) noexcept nogil:
    """End those that run, and wait for their ends. Takes the lock."""
    if not self.threaded and not self.has_idle_thread:
        return
    pthread_mutex_lock(&self.lock)
    self.stop = True
    pthread_cond_signal(&self.handed_over)
    pthread_mutex_unlock(&self.lock)
    signal_wake(self)
    pthread_join(self.thread, NULL)
    self.threaded = self.has_idle_thread = self.relieved = False


cdef void hand_over(Progress* self) noexcept nogil:
    """Leave progress to the idle thread, and start it if this is the first time. The lock is held.

    The caller may sleep now. Where the system has no thread for this, the loop goes on as before.
    """
    if self.loop_fd < 0 or self.relieved or self.stop:
        return
    if not self.has_idle_thread:
        if aiote_start(&self.thread, -1, run_idle_thread, self) != 0:
            return
        self.has_idle_thread = True
        pthread_setname_np(self.thread, "aiote-idle")
    unwatch_descriptor(self.loop_fd, self.epoll_fd)
    self.relieved = True
    self.hand_overs += 1
    pthread_cond_signal(&self.handed_over)


cdef void take_back(Progress* self) noexcept nogil:
    """Let the event loop make progress itself. The lock is held.

    If the kernel has no memory to watch the descriptor, the idle thread goes on, and notifies the loop of all news.
    """
    if self.relieved and add_descriptor(self.loop_fd, self.epoll_fd) == 0:
        self.relieved = False


cdef bint make_progress(Progress* self) noexcept nogil:
    """Do a round on a thread; return whether to do another one at once. The lock is held."""
    cdef int again
    # A woken task that has posted may compute for a long time before its turn ends.
    batch_flush(&self.state.batch)
    again = progress_once(self)
    notify(self)
    return again


cdef void pause(Progress* self, bint again) noexcept nogil:
    """Sleep unless there is more to do, and let the event loop have the lock first.

    A mutex is not fair: without that the loop could wait for as long as the thread spins.
    """
    if not again:
        sleep_on(self.epoll_fd)
    while aiote_load_int(&self.wanted) > 0:
        sched_yield()


cdef void* run_thread(void* argument) noexcept nogil:
    cdef Progress* self = <Progress*> argument
    cdef bint again
    pthread_mutex_lock(&self.lock)
    while not self.stop:
        self.asleep = False
        again = make_progress(self)
        self.asleep = not again
        pthread_mutex_unlock(&self.lock)
        pause(self, again)
        pthread_mutex_lock(&self.lock)
    pthread_mutex_unlock(&self.lock)
    return NULL


cdef void* run_idle_thread(void* argument) noexcept nogil:
    cdef Progress* self = <Progress*> argument
    cdef bint again
    pthread_mutex_lock(&self.lock)
    while not self.stop:
        if not self.relieved:
            pthread_cond_wait(&self.handed_over, &self.lock)
            continue
        again = make_progress(self)
        pthread_mutex_unlock(&self.lock)
        pause(self, again)
        pthread_mutex_lock(&self.lock)
    pthread_mutex_unlock(&self.lock)
    return NULL


# Make sleeping peers look while no work is in flight, because the rails' own messages wake no peer.


def nudge(Core core not None) -> None:
    """Do a round, so that rails send their own messages; wake sleeping peers; and look again soon. Does nothing once
    the engine is closed.
    """
    cdef PeerState* peer
    cdef int i
    if not alive(&core.engine):
        return
    with nogil:
        lock(&core.engine)
        one_round(&core.engine, every=True)
        peer = core.engine.state.peers
        while peer != NULL:
            for i in range(peer.channel_count):
                if peer.channels[i].peer_page != NULL and peer.channels[i].open:
                    wake_peer(peer.channels[i], polled=False)
            peer = peer.next_peer
        unlock(&core.engine)
    signal_wake(&core.engine)
