"""The simulated network: its NICs and links, their turns, and the works that pass them."""

from libc.errno cimport EACCES, ECONNRESET, EFAULT, EHOSTUNREACH, EMSGSIZE, ENETDOWN, ENOMEM
from libc.math cimport pow, sqrt
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport write

from aiote_native.engine.structs cimport MAY_READ, MAY_WRITE, OP_READ, OP_SEND, Completion, Sge, WorkRequest

# The simulated network's bookkeeping: time, scheduled events, random numbers, tables, and the record of what happened.
#
# A heap orders the events by time, and events of the same time in the order in which they were scheduled. In virtual
# time, a network with the same seed and the same calls in the same order therefore does the same, to the last
# nanosecond. Time is the system's or virtual; virtual time stands still until `World.advance` moves it on.
#
# The caller holds the network's lock.

cdef extern from "<sys/timerfd.h>" nogil:
    struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_settime(int, int, const itimerspec*, itimerspec*)
    const int TFD_TIMER_ABSTIME

cdef enum:
    SECOND = 1_000_000_000


cdef uint64_t net_now(Net* net) noexcept nogil:
    """Return the nanoseconds since the network was made."""
    cdef timespec now
    if net.is_virtual:
        return net.now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t> now.tv_sec * SECOND + <uint64_t> now.tv_nsec - net.origin


cdef uint64_t draw(Net* net, uint64_t below) noexcept nogil:
    """Return a random number below a bound, 0 for a bound of 0 (SplitMix64, https://prng.di.unimi.it/splitmix64.c)."""
    cdef uint64_t z
    net.random += 0x9E3779B97F4A7C15ULL
    z = net.random
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL
    z ^= z >> 31
    return z % below if below else 0


cdef inline bint earlier(const Item* a, const Item* b) noexcept nogil:
    return a.time < b.time or (a.time == b.time and a.order < b.order)


cdef inline void store_at(Net* net, Item* item, uint32_t place) noexcept nogil:
    net.heap[place] = item
    item.place = place


cdef void sift_up(Net* net, Item* item) noexcept nogil:
    cdef uint32_t place = item.place
    while place > 1 and earlier(item, net.heap[place // 2]):
        store_at(net, net.heap[place // 2], place)
        place //= 2
    store_at(net, item, place)


cdef void sift_down(Net* net, Item* item) noexcept nogil:
    cdef uint32_t place = item.place
    cdef uint32_t child
    while 2 * place <= net.heap_count:
        child = 2 * place
        if child < net.heap_count and earlier(net.heap[child + 1], net.heap[child]):
            child += 1
        if not earlier(net.heap[child], item):
            break
        store_at(net, net.heap[child], place)
        place = child
    store_at(net, item, place)


cdef int put(Net* net, Item* item, uint64_t time) noexcept nogil:
    """Schedule an item for a time; return 0 or -ENOMEM."""
    cdef Item** larger
    if net.heap_count + 2 > net.heap_size:
        larger = <Item**> realloc(net.heap, sizeof(Item*) * (net.heap_size * 2 + 64))
        if larger == NULL:
            return -ENOMEM
        net.heap = larger
        net.heap_size = net.heap_size * 2 + 64
    net.order += 1
    item.time = time
    item.order = net.order
    net.heap_count += 1
    item.place = net.heap_count
    sift_up(net, item)
    return 0


cdef void take_out(Net* net, Item* item) noexcept nogil:
    """Remove an item from the schedule; do nothing if it is not scheduled."""
    cdef Item* last
    cdef uint32_t place = item.place
    if place == 0:
        return
    last = net.heap[net.heap_count]
    net.heap_count -= 1
    item.place = 0
    if last != item:
        store_at(net, last, place)
        sift_up(net, last)
        sift_down(net, last)


cdef void set_alarm_clock(Net* net) noexcept nogil:
    """Set the timer that wakes sleeping endpoints to the time of the next item, where time is the system's."""
    cdef itimerspec when
    cdef uint64_t first = net.heap[1].time + 1 if net.heap_count else 0
    if net.timer_fd < 0 or first == net.armed_for:
        return
    net.armed_for = first
    memset(&when, 0, sizeof(when))
    if first:
        when.it_value.tv_sec = (net.origin + first) // SECOND
        when.it_value.tv_nsec = (net.origin + first) % SECOND
    timerfd_settime(net.timer_fd, TFD_TIMER_ABSTIME, &when, NULL)


cdef SimPort* find_endpoint(Net* net, uint64_t number) noexcept nogil:
    cdef SimPort* found = net.endpoint_table[number % BUCKETS]
    while found != NULL and found.number != number:
        found = found.next
    return found


cdef Memory* find_memory(Net* net, uint64_t key) noexcept nogil:
    cdef Memory* found = net.memory_table[key % BUCKETS]
    while found != NULL and found.key != key:
        found = found.next
    return found


cdef inline void mix(Net* net, uint64_t value) noexcept nogil:
    """Mix a value into the digest: a step of FNV-1a with 64-bit values, and a shift that spreads the high bits."""
    net.digest = (net.digest ^ value) * 0x100000001B3ULL
    net.digest ^= net.digest >> 29


cdef void saw(Net* net, Happening kind, const Nic* nic, uint64_t number, uint64_t length, int status) noexcept nogil:
    """Record an event: mix it into the digest, and keep it in full while there is room."""
    cdef Seen* entry
    cdef uint64_t now = net.now if net.is_virtual else 0
    mix(net, now)
    mix(net, (<uint64_t> nic.node << 32) | (nic.rail << 16) | <uint32_t> kind)
    mix(net, number)
    mix(net, length ^ (<uint64_t> <uint32_t> status << 40))
    if net.seen_count < net.seen_limit:
        entry = &net.seen[net.seen_count]
        entry.time = net_now(net)
        entry.number = number
        entry.length = length
        entry.node = nic.node
        entry.rail = nic.rail
        entry.kind = kind
        entry.status = <int32_t> status
        net.seen_count += 1


# The times during which NICs are busy: with one operation after the other, or with a packet of each in turn.
#
# If the model has no `packet`, a NIC sends a write as a whole, and the times of both NICs are known when it is posted.
# With `packet`, a NIC sends one packet of each of its writes in turn, as RDMA NICs serve their queue pairs, and the
# other NIC receives packets in the order in which they leave. Messages and immediates take turns as well. A read is
# always sent as a whole.
#
# The caller holds the network's lock.


cdef uint64_t service(const Model* model, uint64_t length) noexcept nogil:
    """Return for how many nanoseconds a NIC is busy with one operation."""
    cdef double own = <double> model.operation
    cdef double bytes_ = <double> length * model.per_byte
    if model.overlap <= 0:
        return <uint64_t> (own if own > bytes_ else bytes_)
    if model.overlap == 2:
        return <uint64_t> sqrt(own * own + bytes_ * bytes_)
    return <uint64_t> pow(pow(own, model.overlap) + pow(bytes_, model.overlap), 1 / model.overlap)


cdef uint64_t later(uint64_t a, uint64_t b) noexcept nogil:
    return a if a > b else b


cdef uint64_t send_through(Nic* nic, uint64_t ready, uint64_t length) noexcept nogil:
    """Occupy a NIC's sending side; return when the last byte has left it."""
    cdef uint64_t left = later(ready, nic.sends_free) + service(&nic.model, length)
    nic.sends_free = left
    return left


cdef uint64_t take_through(Nic* nic, uint64_t arrives, uint64_t length) noexcept nogil:
    """Occupy a NIC's receiving side, which receives while the other sends; return when the last byte is in memory."""
    cdef uint64_t wire = <uint64_t> (<double> length * nic.model.per_byte)
    cdef uint64_t there = later(arrives, nic.takes_free + wire)
    if wire:
        nic.takes_free = there
    return there + nic.slow


cdef uint64_t packet_of(const Work* work) noexcept nogil:
    """Return the length of a write's next packet in bytes."""
    return work.left if work.left < work.nic.model.packet else work.nic.model.packet


cdef void set_out(Net* net, Work* work) noexcept nogil:
    """Schedule the end of sending the next packet. The first packet also takes the operation's own time."""
    cdef const Model* model = &work.nic.model
    cdef uint64_t takes = <uint64_t> (<double> packet_of(work) * model.per_byte)
    if work.left == work.length:
        takes += service(model, work.length) - <uint64_t> (<double> work.length * model.per_byte)
    put(net, &work.item, net_now(net) + takes)


cdef void take_turns(Net* net, Work* work) noexcept nogil:
    """Append a write to the writes that a NIC sends in turn."""
    cdef Nic* nic = work.nic
    work.left = work.length
    append(nic, work)
    if nic.turns == work:
        set_out(net, work)


cdef void append(Nic* nic, Work* work) noexcept nogil:
    work.in_turn = True
    work.turn = NULL
    if nic.turns == NULL:
        nic.turns = work
    else:
        nic.last_turn.turn = work
    nic.last_turn = work


cdef uint64_t next_turn(Net* net, Work* work) noexcept nogil:
    """Pass on a packet that has left its NIC, and start the next write's turn; return when the packet arrives."""
    cdef Nic* nic = work.nic
    cdef Nic* far = work.far if work.far != NULL else nic
    cdef uint64_t bytes_ = packet_of(work)
    cdef uint64_t now = net_now(net)
    cdef uint64_t there = take_through(far, now + nic.model.latency, bytes_)
    nic.turns = work.turn
    work.turn = NULL
    work.in_turn = False
    work.left -= bytes_
    if work.left:
        append(nic, work)
    else:
        work.sent = now
    if nic.turns != NULL:
        set_out(net, nic.turns)
    return there


cdef void leave_turns(Net* net, Work* work) noexcept nogil:
    """Remove a write from its NIC's turns. If it was its turn, the next write has it."""
    cdef Nic* nic = work.nic
    cdef Work* before = NULL
    cdef Work* other = nic.turns
    if not work.in_turn:
        return
    while other != work:
        before = other
        other = other.turn
    work.in_turn = False
    if nic.last_turn == work:
        nic.last_turn = before
    if before != NULL:
        before.turn = work.turn
        return
    nic.turns = work.turn
    if nic.turns != NULL:
        set_out(net, nic.turns)


# The operations in flight: each is planned when it is posted, then placed, delivered and completed at its times.
#
# | stage    | effect                                                | if the target cannot take it                    |
# |----------|-------------------------------------------------------|-------------------------------------------------|
# | send     | packets leave the NIC in turn (if it sends packets)   | -                                               |
# | place    | a piece of the payload is copied into memory          | bad key or range: the initiator gets an error   |
# | deliver  | the target gets the immediate or the message          | the operation waits in the target's queue       |
# | complete | the initiator gets the completion                     |                                                 |
#
# All pieces are placed before the immediate is delivered, and it is delivered before the completion. No other order is
# guaranteed, neither of pieces nor of operations. A stage is parked while its own NIC or the target's is silent.
# Closing an endpoint drops its operations in flight, except those that have left its NIC, if the model says that they
# arrive all the same (`lingers`).
#
# The caller holds the network's lock.


cdef void plan_work(Net* net, Work* work) noexcept nogil:
    """Decide when the payload arrives, and schedule the first stage."""
    cdef const Model* model = &work.nic.model
    cdef Nic* far = work.far if work.far != NULL else work.nic
    cdef uint64_t now = net_now(net)
    cdef uint64_t first
    if work.opcode == OP_READ:
        first = send_through(work.nic, now, 0) + model.latency
        work.sent = send_through(far, first, work.length)
        plan_arrival(net, work, first, take_through(work.nic, work.sent + model.answer, work.length))
    elif model.packet:
        work.stage = STAGE_SEND
        take_turns(net, work)
    else:
        work.sent = send_through(work.nic, now, work.length)
        plan_arrival(net, work, now, take_through(far, work.sent + model.latency, work.length))


cdef void plan_arrival(Net* net, Work* work, uint64_t first, uint64_t last) noexcept nogil:
    """Decide in how many pieces a payload arrives between two times, and in which order; schedule the first piece."""
    cdef const Model* model = &work.nic.model
    cdef uint64_t most = model.pieces if model.pieces < work.length else work.length
    last += draw(net, model.jitter + 1)
    work.pieces = 1 + <int> draw(net, most)
    work.backwards = draw(net, 2)
    work.stage = STAGE_DELIVER if work.opcode == OP_SEND else STAGE_PLACE
    plan_pieces(net, work, first, last)
    put(net, &work.item, last if work.opcode == OP_SEND else work.times[0])


cdef void send_packet(Net* net, Work* work) noexcept nogil:
    """Send one packet; after the last packet, plan the arrival of the payload."""
    cdef uint64_t there = next_turn(net, work)
    if not work.in_turn:
        plan_arrival(net, work, net_now(net), there)


cdef void plan_pieces(Net* net, Work* work, uint64_t first, uint64_t last) noexcept nogil:
    """Draw the times of the pieces between two times, in order; the last piece arrives at the later one."""
    cdef uint64_t time
    cdef int i, j
    if work.pieces > MAX_PIECES:
        work.pieces = MAX_PIECES
    work.times[work.pieces - 1] = last
    for i in range(work.pieces - 1):
        time = last - draw(net, last - first + 1)
        j = i
        while j > 0 and work.times[j - 1] > time:
            work.times[j] = work.times[j - 1]
            j -= 1
        work.times[j] = time


cdef void after(Net* net, Work* work, uint64_t time) noexcept nogil:
    """Schedule the next stage `time` nanoseconds from now, plus random jitter."""
    put(net, &work.item, net_now(net) + time + draw(net, work.nic.model.jitter + 1))


cdef void fail(Net* net, Work* work, int status) noexcept nogil:
    saw(net, SAW_FAIL, work.nic, work.number, work.length, status)
    work.status = status
    work.stage = STAGE_COMPLETE
    after(net, work, work.nic.model.answer)


cdef void push_entry(SimPort* endpoint, WorkRequest* wr, int status, uint64_t length, bint own) noexcept nogil:
    """Put a completion into an endpoint's ring, and wake its owner. The ring has room for all outstanding requests."""
    cdef Completion completion
    memset(&completion, 0, sizeof(completion))
    completion.wr = wr
    completion.status = status
    completion.length = length
    enter(endpoint, &completion, own)


cdef void push_immediate(Net* net, SimPort* endpoint, const Work* work) noexcept nogil:
    """Report an immediate to an endpoint: at once, or after a random delay if its model has one (`forgets`)."""
    cdef Completion completion
    cdef Report* report
    memset(&completion, 0, sizeof(completion))
    completion.imm = work.imm
    completion.times = work.counts_for
    if endpoint.nic.model.forgets:
        report = <Report*> calloc(1, sizeof(Report))
        if report != NULL:
            report.item.kind = ITEM_REPORT
            report.target = endpoint.number
            report.completion = completion
            if put(net, &report.item, net_now(net) + draw(net, endpoint.nic.model.forgets + 1)) == 0:
                endpoint.arrivals += 1
                return
            free(report)
    enter(endpoint, &completion, own=False)


cdef void tell(Net* net, Report* report) noexcept nogil:
    """Report an immediate whose delay is over, if its endpoint still exists."""
    cdef SimPort* endpoint = find_endpoint(net, report.target)
    if endpoint != NULL:
        endpoint.arrivals -= 1
        enter(endpoint, &report.completion, own=False)
    free(report)


cdef void enter(SimPort* endpoint, const Completion* completion, bint own) noexcept nogil:
    cdef uint64_t one = 1
    cdef Entry* entry = &endpoint.ring[(endpoint.ring_first + endpoint.ring_count) % endpoint.ring_size]
    entry.completion = completion[0]
    entry.own = own
    endpoint.ring_count += 1
    if not own:
        endpoint.arrivals += 1
    if endpoint.armed:
        endpoint.armed = False
        endpoint.raised = True
        write(endpoint.event_fd, &one, sizeof(one))


cdef const Memory* granted(Net* net, const Work* work, const SimPort* target) noexcept nogil:
    """Return the memory that a work addresses at its target, or NULL if it has no right to it."""
    cdef const Memory* memory = find_memory(net, work.key)
    cdef const Sge* sge
    cdef int i
    if memory == NULL or memory.nic != target.nic:
        return NULL
    if not memory.access & (MAY_READ if work.opcode == OP_READ else MAY_WRITE):
        return NULL
    if work.opcode != OP_READ and not memory.writable:
        return NULL
    for i in range(work.sge_count):
        sge = &work.sges[i]
        if (sge.remote < memory.base or sge.remote - memory.base > memory.length
                or sge.length > memory.length - (sge.remote - memory.base)):
            return NULL
    return memory


cdef void count_moved(Work* work, SimPort* target, uint64_t bytes_) noexcept nogil:
    target.moved += bytes_
    if work.source != NULL:
        work.source.moved += bytes_


cdef void move(const Work* work, const Memory* memory, uint64_t low, uint64_t high) noexcept nogil:
    """Copy the bytes from `low` to `high` of a payload, which consists of all its SGEs one after the other."""
    cdef const Sge* sge
    cdef uint8_t* near
    cdef uint8_t* there
    cdef uint64_t start = 0
    cdef uint64_t first, last
    cdef int i
    for i in range(work.sge_count):
        sge = &work.sges[i]
        first = later(low, start) - start
        last = (high if high < start + sge.length else start + sge.length) - start
        if low < start + sge.length and start < high:
            near = (work.copy + start if work.copy != NULL else sge.local) + first
            there = <uint8_t*> (memory.address + (sge.remote - memory.base)) + first
            if work.opcode == OP_READ:
                memcpy(near, there, last - first)
            else:
                memcpy(there, near, last - first)
        start += sge.length


cdef void place(Net* net, Work* work, SimPort* target) noexcept nogil:
    """Copy the next piece between the two memories; fail the operation if its keys or its range are not valid."""
    cdef const Memory* memory = granted(net, work, target)
    cdef uint64_t number = work.pieces - 1 - work.piece if work.backwards else work.piece
    cdef uint64_t low = work.length // work.pieces * number
    cdef uint64_t high = work.length if number + 1 == <uint64_t> work.pieces else low + work.length // work.pieces
    if memory == NULL:
        fail(net, work, -EACCES)
        return
    if work.copy == NULL and work.length and find_memory(net, work.local_key) == NULL:
        fail(net, work, -EFAULT)
        return
    move(work, memory, low, high)
    count_moved(work, target, high - low + 1)
    saw(net, SAW_PLACE, target.nic, work.number, high - low, 0)
    work.piece += 1
    if work.piece < work.pieces:
        put(net, &work.item, work.times[work.piece])
    elif work.with_imm:
        work.stage = STAGE_DELIVER
        after(net, work, 0)
    else:
        work.stage = STAGE_COMPLETE
        after(net, work, 0 if work.opcode == OP_READ else work.nic.model.answer)


cdef bint deliver(Net* net, Work* work, SimPort* target) noexcept nogil:
    """Give the target an immediate or a message; return False if it has no room or no receive for it."""
    cdef Receive* receive
    if target.arrivals >= target.nic.model.events:
        return False
    if work.opcode == OP_SEND:
        if target.receive_count == 0:
            return False
        receive = &target.receives[target.receive_first]
        target.receive_first = (target.receive_first + 1) % target.nic.model.receives
        target.receive_count -= 1
        if work.length > receive.length:
            push_entry(target, receive.wr, -EMSGSIZE, 0, own=False)
            fail(net, work, -EMSGSIZE)
            return True
        memcpy(receive.memory, work.copy if work.copy != NULL else work.sges[0].local, work.length)
        push_entry(target, receive.wr, 0, work.length, own=False)
    else:
        push_immediate(net, target, work)
    count_moved(work, target, work.length + 1)
    saw(net, SAW_DELIVER, target.nic, work.number, work.length, 0)
    work.stage = STAGE_COMPLETE
    after(net, work, work.nic.model.answer)
    return True


cdef void enqueue(Work* work, SimPort* target) noexcept nogil:
    work.queued = True
    work.behind = NULL
    if target.queue_end == NULL:
        target.queue = work
    else:
        target.queue_end.behind = work
    target.queue_end = work


cdef void dequeue(Work* work, SimPort* target) noexcept nogil:
    cdef Work* before = NULL
    cdef Work* other = target.queue
    while other != NULL and other != work:
        before = other
        other = other.behind
    if other == NULL:
        return
    if before == NULL:
        target.queue = work.behind
    else:
        before.behind = work.behind
    if target.queue_end == work:
        target.queue_end = before
    work.behind = NULL
    work.queued = False


cdef void serve_queue(Net* net, SimPort* endpoint) noexcept nogil:
    """Deliver the queued operations, oldest first. A message that waits for a receive does not hold up the others."""
    cdef Work* work = endpoint.queue
    cdef Work* following
    while work != NULL:
        following = work.behind
        if deliver(net, work, endpoint):
            dequeue(work, endpoint)
        work = following


cdef void complete(Net* net, Work* work) noexcept nogil:
    saw(net, SAW_COMPLETE, work.nic, work.number, work.length, work.status)
    if work.source != NULL:
        push_entry(work.source, work.wr, work.status, 0 if work.status else work.length, own=True)
    free_work(net, work)


cdef bint held(const Work* work) noexcept nogil:
    """Return whether a silent NIC holds an operation. While packets leave its own NIC, only that NIC counts."""
    if work.stage == STAGE_SEND:
        return work.nic.state == NIC_SILENT
    return work.nic.state == NIC_SILENT or (work.far != NULL and work.far.state == NIC_SILENT)


cdef void step(Net* net, Work* work) noexcept nogil:
    """Run the next stage of one operation."""
    cdef SimPort* target
    if held(work):
        work.parked = True
        return
    if work.stage == STAGE_SEND:
        send_packet(net, work)
        return
    if work.stage == STAGE_COMPLETE:
        complete(net, work)
        return
    target = find_endpoint(net, work.target)
    if target == NULL or target.broken:
        fail(net, work, -ECONNRESET)
    elif work.stage == STAGE_PLACE:
        place(net, work, target)
    elif not deliver(net, work, target):
        enqueue(work, target)


cdef void out_of_the_way(Net* net, Work* work) noexcept nogil:
    """Remove an operation from every place where it may wait."""
    cdef SimPort* target
    take_out(net, &work.item)
    work.parked = False
    leave_turns(net, work)
    if work.queued:
        target = find_endpoint(net, work.target)
        if target != NULL:
            dequeue(work, target)


cdef void unlink(Work* work) noexcept nogil:
    if work.source == NULL:
        return
    if work.prev == NULL:
        work.source.works = work.next
    else:
        work.prev.next = work.next
    if work.next != NULL:
        work.next.prev = work.prev
    work.next = work.prev = NULL
    work.source = NULL


cdef void free_work(Net* net, Work* work) noexcept nogil:
    out_of_the_way(net, work)
    unlink(work)
    free(work.copy)
    free(work)


cdef bint lingers(Net* net, Work* work) noexcept nogil:
    """Detach an operation that has left its NIC from its endpoint, so that it goes on; return False if it cannot."""
    cdef uint64_t done = 0
    cdef int i
    if not work.nic.model.lingers or work.opcode == OP_READ or work.stage == STAGE_COMPLETE or work.queued:
        return False
    if work.stage == STAGE_SEND or work.sent > net_now(net) or work.parked:
        return False
    work.copy = <uint8_t*> malloc(work.length + 1)
    if work.copy == NULL:
        return False
    for i in range(work.sge_count):
        memcpy(work.copy + done, work.sges[i].local, work.sges[i].length)
        done += work.sges[i].length
    unlink(work)
    work.wr = NULL
    return True


cdef void close_works(Net* net, SimPort* endpoint) noexcept nogil:
    """Drop the operations in flight of an endpoint that has left the table, and fail those that wait at it."""
    cdef Work* work = endpoint.works
    cdef Work* following
    while work != NULL:
        following = work.next
        if not lingers(net, work):
            free_work(net, work)
        work = following
    work = endpoint.queue
    endpoint.queue = endpoint.queue_end = NULL
    while work != NULL:
        following = work.behind
        work.behind = NULL
        work.queued = False
        fail(net, work, -ECONNRESET)
        work = following


cdef void change_nic(Net* net, Nic* nic, int state) noexcept nogil:
    """Silence a NIC, break it, or bring it back."""
    cdef SimPort* endpoint
    cdef Work* work
    cdef Work* following
    cdef int i
    saw(net, SAW_FAULT, nic, 0, 0, state)
    nic.state = state
    for i in range(BUCKETS):
        endpoint = net.endpoint_table[i]
        while endpoint != NULL:
            work = endpoint.works
            while work != NULL:
                following = work.next
                touched(net, nic, work)
                work = following
            if state == NIC_BROKEN and endpoint.nic == nic:
                break_endpoint(endpoint)
            endpoint = endpoint.next


cdef void touched(Net* net, Nic* nic, Work* work) noexcept nogil:
    """Apply a NIC's change of state to one operation: resume it or fail it."""
    if nic.state == NIC_UP and work.parked and not held(work):
        work.parked = False
        after(net, work, work.nic.model.answer)
    elif nic.state == NIC_BROKEN and (work.nic == nic or work.far == nic):
        # Even a delivered operation fails: its completion cannot come back, so the initiator cannot know.
        out_of_the_way(net, work)
        fail(net, work, -ENETDOWN if work.nic == nic else -EHOSTUNREACH)


cdef void break_endpoint(SimPort* endpoint) noexcept nogil:
    """Fail the posted receives of an endpoint whose NIC broke. The endpoint stays broken when the NIC is up again."""
    cdef Receive* receive
    endpoint.broken = True
    while endpoint.receive_count:
        receive = &endpoint.receives[endpoint.receive_first]
        endpoint.receive_first = (endpoint.receive_first + 1) % endpoint.nic.model.receives
        endpoint.receive_count -= 1
        push_entry(endpoint, receive.wr, -ENETDOWN, 0, own=False)


cdef void apply(Net* net, Fault* fault) noexcept nogil:
    if fault.slows:
        fault.nic.slow = fault.slow
        saw(net, SAW_FAULT, fault.nic, 0, fault.slow, 0)
    else:
        change_nic(net, fault.nic, fault.state)
    free(fault)


cdef void counted_faults(Net* net) noexcept nogil:
    """Apply the faults whose count of events has been reached."""
    cdef Fault** place = &net.faults
    cdef Fault* fault
    while place[0] != NULL:
        fault = place[0]
        if fault.after <= net.events:
            place[0] = fault.next
            apply(net, fault)
        else:
            place = &fault.next


cdef void sound(Net* net, Alarm* alarm) noexcept nogil:
    """Write to an alarm's eventfd, and free the alarm."""
    cdef Alarm** place = &net.alarms
    cdef uint64_t one = 1
    while place[0] != NULL and place[0] != alarm:
        place = &place[0].next
    if place[0] == alarm:
        place[0] = alarm.next
    write(alarm.fd, &one, sizeof(one))
    free(alarm)


cdef void run_due(Net* net, uint64_t until) noexcept nogil:
    """Run everything that is due up to a time, in order; virtual time advances with it."""
    cdef Item* item
    while net.heap_count and net.heap[1].time <= until:
        item = net.heap[1]
        take_out(net, item)
        if net.is_virtual and net.now < item.time:
            net.now = item.time
        net.events += 1
        if item.kind == ITEM_FAULT:
            apply(net, <Fault*> item)
        elif item.kind == ITEM_ALARM:
            sound(net, <Alarm*> item)
        elif item.kind == ITEM_REPORT:
            tell(net, <Report*> item)
        else:
            step(net, <Work*> item)
        if net.faults != NULL:
            counted_faults(net)
    if net.is_virtual and net.now < until:
        net.now = until
    set_alarm_clock(net)
