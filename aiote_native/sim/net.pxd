# A simulated network: what happens in it at which time, who is on it, and what is remembered of it.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from aiote_native.structs cimport Completion, MAX_SGE, Sge, WorkRequest

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef enum:
    BUCKETS = 1024
    MAX_PIECES = 4

cdef enum ItemKind:
    ITEM_WORK = 0
    ITEM_FAULT = 1
    ITEM_ALARM = 2
    ITEM_REPORT = 3

cdef enum Stage:
    STAGE_PLACE = 0      # a piece of the payload goes into memory
    STAGE_DELIVER = 1    # the immediate, or the message, is given to the target
    STAGE_COMPLETE = 2   # the initiator is told, of an error too
    STAGE_SEND = 3       # before all of them, where NICs take turns: packets leave (turns.pyx)

cdef enum NicState:
    NIC_UP = 0
    NIC_SILENT = 1       # nothing comes or goes, and nobody is told; what is under way goes on when it is back
    NIC_BROKEN = 2       # what is under way ends with an error

cdef enum Happening:
    SAW_POST = 0
    SAW_PLACE = 1
    SAW_DELIVER = 2
    SAW_COMPLETE = 3
    SAW_FAIL = 4
    SAW_OPEN = 5
    SAW_CLOSE = 6
    SAW_FAULT = 7

# Something that happens at a time; those of one time in the order of `order`. The first member of what can.
cdef struct Item:
    uint64_t time
    uint64_t order
    uint32_t place       # in the heap, from 1; 0: it is not there
    int kind

# What a NIC takes for what; times in nanoseconds.
cdef struct Model:
    uint64_t latency     # from the NIC here to the memory there
    uint64_t answer      # from there back to the initiator's completion
    uint64_t jitter      # the most that is drawn on top of either
    uint64_t operation   # of the NIC itself, for an operation of no bytes
    double per_byte
    double overlap       # how well both overlap: time = (operation^x + bytes^x)^(1/x); 0: perfectly
    uint32_t depth       # operations that an endpoint takes at once
    uint32_t receives    # posted receives of an endpoint
    uint32_t events      # arrivals that lie untaken before those behind them wait
    uint32_t pieces      # the most pieces that a payload is placed in
    uint32_t max_sge     # of one operation
    uint64_t packet      # bytes of a write that a NIC sends before it is another's turn; 0: all of them
    uint32_t refusals    # of 65536 posts, drawn, that are refused for now
    bint null            # every operation ends at once, and nothing is moved (null.pyx)
    bint lingers         # what has left a NIC arrives, though its endpoint was closed meanwhile
    uint64_t forgets     # how much later an immediate is reported at most, or never if the endpoint is closed then
    uint64_t largest

cdef struct Nic:
    Nic* next
    uint32_t node
    uint32_t rail
    int state
    uint64_t slow        # added to what arrives here
    uint64_t sends_free  # when it has sent all that it was given
    uint64_t takes_free
    Work* turns          # whose packets leave, one of each in turn; the first one's is on its way out
    Work* last_turn
    Model model

cdef struct Memory:
    Memory* next
    Nic* nic
    uint64_t key
    uint64_t base
    uint64_t address
    uint64_t length
    bint writable
    int access  # what peers may do

# One operation, from its post to the completion.
cdef struct Work:
    Item item
    SimEndpoint* source  # NULL: it was closed, and only what is on the wire goes on
    Nic* nic
    Nic* far             # the target's; NULL where that was gone when this was posted
    uint64_t target      # the number of the other endpoint
    Work* prev
    Work* next
    Work* behind         # in the target's queue
    WorkRequest* wr
    uint64_t number
    int opcode
    bint with_imm
    uint32_t imm
    uint32_t counts_for  # so many immediates
    Sge sges[MAX_SGE]
    int sge_count
    uint8_t* copy        # of all SGEs, one after the other
    uint64_t local_key
    uint64_t length      # of all SGEs
    uint64_t key
    int stage
    int status
    bint parked          # a silent NIC holds it
    bint queued          # it waits for the target to have room or a receive
    bint backwards
    int pieces
    int piece
    Work* turn           # behind it in the NIC's turns
    bint in_turn
    uint64_t left        # bytes that have not left the NIC
    uint64_t sent
    uint64_t times[MAX_PIECES]

cdef struct Entry:
    Completion completion
    bint own             # of an operation of this endpoint's; else of an arrival

cdef struct Receive:
    WorkRequest* wr
    uint8_t* memory
    uint64_t length

cdef struct SimEndpoint:
    SimEndpoint* next
    Net* net
    Nic* nic
    uint64_t number
    uint64_t peer
    int event_fd
    int wait_fd
    bint armed
    bint raised
    bint closed
    bint broken
    Work* works
    uint32_t outstanding
    uint64_t moved       # bytes and immediates that came or went
    Entry* ring
    uint32_t ring_size
    uint32_t ring_first
    uint32_t ring_count
    uint32_t arrivals    # of the ring's entries
    Receive* receives
    uint32_t receive_first
    uint32_t receive_count
    Work* queue
    Work* queue_end

cdef struct Fault:
    Item item
    Fault* next
    Nic* nic
    int state
    uint64_t after       # events; 0: at its time
    uint64_t slow
    bint slows

# An immediate that came and that its endpoint is not told of yet.
cdef struct Report:
    Item item
    uint64_t target
    Completion completion

cdef struct Alarm:
    Item item
    Alarm* next
    int fd

cdef struct Seen:
    uint64_t time
    uint64_t number
    uint64_t length
    uint32_t node
    uint32_t rail
    uint32_t kind
    int32_t status

cdef struct Net:
    pthread_mutex_t lock
    bint is_virtual
    uint64_t now
    uint64_t origin
    uint64_t random
    uint64_t order
    uint64_t events
    uint64_t works
    uint64_t endpoints
    int timer_fd
    uint64_t armed_for
    Item** heap
    uint32_t heap_count
    uint32_t heap_size
    SimEndpoint* endpoint_table[BUCKETS]
    Memory* memory_table[BUCKETS]
    Nic* nics
    Fault* faults
    Alarm* alarms
    Seen* seen
    uint64_t seen_count
    uint64_t seen_limit
    uint64_t digest

cdef uint64_t net_now(Net* net) noexcept nogil
cdef uint64_t draw(Net* net, uint64_t below) noexcept nogil
cdef int put(Net* net, Item* item, uint64_t time) noexcept nogil
cdef void take_out(Net* net, Item* item) noexcept nogil
cdef void set_alarm_clock(Net* net) noexcept nogil
cdef SimEndpoint* find_endpoint(Net* net, uint64_t number) noexcept nogil
cdef Memory* find_memory(Net* net, uint64_t key) noexcept nogil
cdef void saw(Net* net, Happening kind, const Nic* nic, uint64_t number, uint64_t length, int status) noexcept nogil
