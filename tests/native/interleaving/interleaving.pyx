# cython: language_level=3, boundscheck=False, cdivision=True
"""Two native cores over a scripted rail, each on a stack of its own, that take turns at every step in random order.

The rail has no wires: what is posted lies in the other side's queue until that one polls, as over shm, and its end
comes back the same way. Some messages go in pieces, each of which asks for the next without any completion. With a wait
descriptor the queue is announced as tcp does it, else by the real wake-up event. A schedule is over when nobody can
run: both sleep on a descriptor that is not readable and have nothing more to submit. Then everything must have arrived
and ended. Where channels may rest, an engine also keeps its lists of what to look at in these orders.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import os

from aiote_native.engine.core cimport Core
from aiote_native.engine.posting cimport has_work, op_start
from aiote_native.engine.progress cimport Progress, announce, progress_once, watch_descriptor
from aiote_native.engine.structs cimport (
    OP_WRITE, Channel, Completion, Done, Op, PeerState, Post, RailOps, WorkRequest, Worklists)
from aiote_native.engine.worklists cimport list_channel
from aiote_native.system.base cimport check
from aiote_native.system.wakeups cimport PeerWakeup

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <setjmp.h>
    #include <ucontext.h>
    /* Contexts begin the two stacks; from then on jumps switch between them, which take no system call. */
    static ucontext_t aiote_first[2];
    static jmp_buf aiote_scheduler, aiote_sides[2];
    static int aiote_begun[2];
    static char aiote_stacks[2][256 * 1024];
    static void aiote_begin(int side, void (*body)(void)) {
        getcontext(&aiote_first[side]);
        aiote_first[side].uc_stack.ss_sp = aiote_stacks[side];
        aiote_first[side].uc_stack.ss_size = sizeof(aiote_stacks[side]);
        aiote_first[side].uc_link = NULL;
        makecontext(&aiote_first[side], body, 0);
        aiote_begun[side] = 0;
    }
    static void aiote_resume(int side) {
        if (_setjmp(aiote_scheduler)) return;
        if (aiote_begun[side]) _longjmp(aiote_sides[side], 1);
        aiote_begun[side] = 1;
        setcontext(&aiote_first[side]);
    }
    static void aiote_suspend(int side) {
        if (!_setjmp(aiote_sides[side])) _longjmp(aiote_scheduler, 1);
    }
    static int aiote_readable(int epoll_fd) {
        struct epoll_event event;
        return epoll_wait(epoll_fd, &event, 1, 0) > 0;
    }
    static int aiote_install(void (*step)(void)) {
        void (**place)(void) = dlsym(RTLD_DEFAULT, "aiote_step");
        if (place == NULL) return 0;
        *place = step;
        return 1;
    }
    /* Not the names that are preloaded: within one of these calls of the rail nobody else runs. */
    static void aiote_raise(int fd) { eventfd_write(fd, 1); }
    static void aiote_quiet(int fd) { eventfd_t value; eventfd_read(fd, &value); }
    """
    void aiote_begin(int, void (*)() noexcept nogil) nogil
    void aiote_resume(int) noexcept nogil
    void aiote_suspend(int) noexcept nogil
    bint aiote_readable(int) noexcept nogil
    int aiote_install(void (*)() noexcept nogil) nogil
    void aiote_raise(int) noexcept nogil
    void aiote_quiet(int) noexcept nogil
    int eventfd(unsigned int, int) nogil
    const int EFD_NONBLOCK, EFD_CLOEXEC

cdef enum:
    LENGTH = 64      # entries of a queue; more are never under way
    DEPTH = 8        # work requests of a side
    MOST_POSTS = 3   # of a side in one schedule
    MAX_PIECES = 3
    MANY_CHANNELS = 100

cdef enum Kind:
    PIECE = 1        # of a message: asks for the next one, or is the last
    ASK = 2
    END = 3          # of a work request

cdef struct Entry:
    Kind kind
    WorkRequest* wr
    uint32_t imm
    int pieces

cdef struct Side:
    int number
    Side* other
    Progress* engine
    Channel channel
    PeerState peer
    WorkRequest requests[DEPTH]
    Entry queue[LENGTH]
    unsigned int first
    unsigned int last
    bint armed
    int wait_fd
    bint asleep
    int to_post
    uint64_t posted
    uint64_t ended
    uint64_t rests
    uint64_t misplaced

cdef Side sides[2]
cdef Side* current = NULL
cdef uint64_t random_state = 1
cdef uint64_t switches = 0
cdef bint lies = False
cdef uint32_t never_asleep = 0


cdef uint32_t draw(uint32_t below) noexcept nogil:
    global random_state
    random_state ^= random_state << 13
    random_state ^= random_state >> 7
    random_state ^= random_state << 17
    return <uint32_t> (random_state >> 11) % below


cdef void step() noexcept nogil:
    """Let the scheduler choose who goes on."""
    global current
    cdef Side* here = current
    if here != NULL:
        current = NULL
        aiote_suspend(here.number)
        current = here


cdef void put(Side* to, Kind kind, WorkRequest* wr, uint32_t imm, int pieces) noexcept nogil:
    cdef Entry* entry = &to.queue[to.last % LENGTH]
    entry.kind = kind
    entry.wr = wr
    entry.imm = imm
    entry.pieces = pieces
    to.last += 1
    if to.wait_fd >= 0 and to.armed:
        to.armed = False
        aiote_raise(to.wait_fd)


cdef int rail_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Side* here = <Side*> impl
    step()
    put(here.other, PIECE, wr, args.imm, <int> draw(MAX_PIECES))
    step()
    return 0


cdef int rail_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef Side* here = <Side*> impl
    cdef Entry entry
    cdef int got = 0
    step()
    while here.first != here.last and got < capacity:
        entry = here.queue[here.first % LENGTH]
        here.first += 1
        if entry.kind == ASK:
            put(here.other, PIECE, entry.wr, entry.imm, entry.pieces - 1)
        elif entry.kind == PIECE and entry.pieces > 0:
            put(here.other, ASK, entry.wr, entry.imm, entry.pieces)
        else:
            memset(&out[got], 0, sizeof(Completion))
            if entry.kind == END:
                out[got].wr = entry.wr
            else:
                out[got].imm = entry.imm
                out[got].times = 1
                put(here.other, END, entry.wr, 0, 0)
            got += 1
    step()
    return got


cdef int rail_arm(void* impl) noexcept nogil:
    cdef Side* here = <Side*> impl
    cdef int more = 0
    step()
    if here.wait_fd >= 0:
        # As fi_trywait does it: first the descriptor is made quiet, then it is looked whether that was wrong.
        aiote_quiet(here.wait_fd)
        here.armed = here.first == here.last
        more = not here.armed
    step()
    return more and not lies


cdef bint rail_disconnect(void* impl) noexcept nogil:
    return False


cdef void rail_end(void* impl) noexcept nogil:
    pass


cdef bint rail_stirred(void* impl) noexcept nogil:
    cdef Side* here = <Side*> impl
    cdef bint stirred
    step()
    stirred = not operations.announced and here.first != here.last
    step()
    return stirred


cdef RailOps operations
operations.post = rail_post
operations.poll = rail_poll
operations.arm = rail_arm
operations.disconnect = rail_disconnect
operations.shut = rail_end
operations.release = rail_end


cdef void submit(Side* here) noexcept nogil:
    """Start a write of an immediate alone, as `Core` does."""
    cdef Op* op = <Op*> calloc(1, sizeof(Op))
    op.opcode = OP_WRITE
    op.counted = True
    op.imm = 1
    op.parts = 1
    op.split.tail_count = 1
    here.to_post -= 1
    here.posted += 1
    op_start(&here.engine.state, &here.peer, op)


cdef void reap(Side* here) noexcept nogil:
    cdef Done* item = here.engine.state.done.head
    cdef Done* following
    here.engine.state.done.head = here.engine.state.done.tail = NULL
    while item != NULL:
        following = item.next
        here.ended += 1
        free(<Op*> item)
        item = following


cdef bint in_place(Side* here) noexcept nogil:
    """Return whether the next round looks at all that has something to do."""
    cdef const Worklists* lists = &here.engine.state.lists
    if has_work(&here.peer) and not here.peer.pending or here.channel.resting and here.channel.outstanding:
        return False
    if not here.channel.resting:
        return lists.polled == &here.channel and lists.looked_at == NULL and lists.announced == 0
    return lists.polled == NULL and (
        lists.announced == 1 if operations.announced else lists.looked_at == &here.channel)


cdef void loop(Side* here) noexcept nogil:
    """An event loop: rounds for as long as the core asks for them, then sleep until the descriptor is readable."""
    cdef int again
    while True:
        if here.to_post and draw(3) == 0:
            submit(here)
        step()
        again = progress_once(here.engine)
        here.misplaced += not in_place(here)
        here.rests += here.channel.resting
        reap(here)
        if again:
            continue
        here.asleep = True
        step()
        here.asleep = False


cdef void body() noexcept nogil:
    loop(current)


cdef bint runnable(Side* side) noexcept nogil:
    return not side.asleep or side.to_post > 0 or aiote_readable(side.engine.epoll_fd)


cdef bint schedule() noexcept nogil:
    """Run until nobody can; tell whether all that was posted arrived and ended."""
    global current, switches
    cdef int i
    for i in range(2):
        sides[i].to_post = <int> draw(MOST_POSTS + 1)
    while True:
        i = <int> draw(2)
        if not runnable(&sides[i]):
            i = 1 - i
            if not runnable(&sides[i]):
                break
        switches += 1
        current = &sides[i]
        aiote_resume(i)
    current = NULL
    for i in range(2):
        if (sides[i].misplaced or sides[i].ended != sides[i].posted or sides[i].engine.state.immediates != sides[1 - i].posted
                or sides[i].engine.state.outstanding or sides[i].engine.state.queued):
            return False
    return True


cdef int prepare(Side* side, int number, Core core, Core other, PeerWakeup wakeup, bint waits,
                 bint may_rest) except -1:
    cdef int i
    memset(side, 0, sizeof(Side))
    side.number = number
    side.other = &sides[1 - number]
    side.engine = &core.engine
    side.wait_fd = side.channel.wait_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) if waits else -1
    side.channel.ops = &operations
    side.channel.impl = side
    side.channel.peer = &side.peer
    side.channel.open = True
    side.channel.depth = DEPTH
    side.channel.requests = side.requests
    side.channel.largest = 1 << 20
    for i in range(DEPTH):
        side.requests[i].channel = &side.channel
        side.requests[i].next = side.channel.spare
        side.channel.spare = &side.requests[i]
    if waits:
        watch_descriptor(core.engine.epoll_fd, side.wait_fd)
    else:
        side.channel.peer_page = &never_asleep if lies else <const uint32_t*> other.engine.wakeup_page
        side.channel.peer_wakeup_fd = wakeup.socket_fd
        side.channel.peer_wakeup_secret = wakeup.secret
        side.channel.waiting = &core.engine.wakeup_page.waiting[0]
    side.peer.channels[0] = &side.channel
    side.peer.channel_count = 1
    side.peer.lists = &core.engine.state.lists
    list_channel(&side.channel)
    if may_rest:
        core.engine.state.channels = MANY_CHANNELS
        check(announce(core.engine.epoll_fd, &side.channel), "epoll_ctl")
    core.engine.state.peers = &side.peer
    return 0


def run(bint waits, uint64_t count, uint64_t seed, bint deaf=False, bint may_rest=False):
    """Run so many schedules; the first that does not go well ends it.

    `deaf` loses wake-ups: arming always says that it is safe to sleep, a wake-up is never seen to be needed.
    `may_rest` has the channels come to rest, as those of engines with many do.
    Returns (schedules that went well, switches, sleeps, rounds that ended with the channel at rest).
    """
    global random_state, switches, lies
    cdef uint64_t done = 0
    cores = [Core(spin_us=0, wakeup_event=not waits) for _ in range(2)]
    random_state = seed * 0x9E3779B97F4A7C15ULL + 1
    switches = 0
    lies = deaf
    operations.stirred = NULL
    if may_rest:
        operations.stirred = rail_stirred
    operations.announced = waits
    wakeups = [None if waits else PeerWakeup(os.dup(event.memory_fd), event.address)
               for event in (core.wakeup_event for core in cores)]
    for number in range(2):
        prepare(&sides[number], number, cores[number], cores[1 - number], wakeups[1 - number], waits, may_rest)
        aiote_begin(number, body)
    if not aiote_install(step):
        raise RuntimeError("steps.so is not preloaded")
    with nogil:
        while done < count and schedule():
            done += 1
    aiote_install(NULL)
    sleeps = sum([core.statistics()["sleeps"] for core in cores])
    return done, switches, sleeps, sides[0].rests + sides[1].rests
