"""The simulated network's bookkeeping: time, scheduled events, random numbers, tables, and the record of what happened.

A heap orders the events by time, and events of the same time in the order in which they were scheduled. In virtual
time, a network with the same seed and the same calls in the same order therefore does the same, to the last nanosecond.
Time is the system's or virtual; virtual time stands still until `World.advance` moves it on.

The caller holds the network's lock.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

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
