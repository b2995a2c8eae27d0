from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from aiote_native.engine.structs cimport MAX_SGE, Completion, Sge, WorkRequest

# The structures of a simulated network: scheduled events, NICs, memory, endpoints, and the record of what happened.

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
    STAGE_DELIVER = 1    # the immediate or the message is given to the target
    STAGE_COMPLETE = 2   # the initiator gets the completion, with success or an error
    STAGE_SEND = 3       # the first stage where NICs send packets of several writes in turn (traffic.pyx)

cdef enum NicState:
    NIC_UP = 0
    NIC_SILENT = 1       # it sends and receives nothing and reports no error; operations go on when it is up again
    NIC_BROKEN = 2       # the operations in flight end with an error

cdef enum Happening:
    SAW_POST = 0
    SAW_PLACE = 1
    SAW_DELIVER = 2
    SAW_COMPLETE = 3
    SAW_FAIL = 4
    SAW_OPEN = 5
    SAW_CLOSE = 6
    SAW_FAULT = 7

# An event that is due at a time; events of the same time happen in the order of `order`. The first member of each
# structure that can be scheduled.
cdef struct Item:
    uint64_t time
    uint64_t order
    uint32_t place       # its index in the heap, from 1; 0: it is not scheduled
    int kind

# The times, limits and faults of a NIC; times are in nanoseconds.
cdef struct Model:
    uint64_t latency     # from the local NIC to the remote memory
    uint64_t answer      # from the remote memory back to the initiator's completion
    uint64_t jitter      # the most that is added at random to either
    uint64_t operation   # the NIC's own time for an operation of no bytes
    double per_byte
    double overlap       # x: how `operation` and bytes overlap, time = (operation^x + bytes^x)^(1/x); 0: the larger one
    uint32_t depth       # outstanding operations that an endpoint accepts
    uint32_t receives    # posted receives that an endpoint accepts
    uint32_t events      # arrivals that an endpoint holds until they are polled; further ones wait
    uint32_t pieces      # the most pieces that a payload is placed in
    uint32_t max_sge     # SGEs of one operation
    uint64_t packet      # bytes of a write that a NIC sends before the next write has its turn; 0: all of them
    uint32_t refusals    # how many of 65536 posts are refused for now, chosen at random
    bint null            # every operation ends at once, and no byte is moved (world.pyx)
    bint lingers         # bytes that have left a NIC arrive even if its endpoint is closed meanwhile
    uint64_t forgets     # the longest delay of an immediate's report; closing the endpoint drops pending reports
    uint64_t largest     # bytes of one operation

cdef struct Nic:
    Nic* next
    uint32_t node
    uint32_t rail
    int state
    uint64_t slow        # nanoseconds added to each arrival here
    uint64_t sends_free  # when it has sent everything that it was given
    uint64_t takes_free  # when it has received everything that is on its way
    Work* turns          # writes that send one packet each in turn; the first one's packet is being sent
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
    int access  # MAY_READ, MAY_WRITE: the rights of peers

# One operation, from its post to the completion.
cdef struct Work:
    Item item
    SimPort* source  # NULL: it was closed, and the bytes on the wire go on without it
    Nic* nic
    Nic* far             # the target's NIC; NULL if the target was gone when this was posted
    uint64_t target      # the number of the other endpoint
    Work* prev
    Work* next
    Work* behind         # the next one in the target's queue
    WorkRequest* wr
    uint64_t number
    int opcode
    bint with_imm
    uint32_t imm
    uint32_t counts_for  # the number of immediates that `imm` stands for
    Sge sges[MAX_SGE]
    int sge_count
    uint8_t* copy        # a copy of the bytes of all SGEs, one after the other
    uint64_t local_key
    uint64_t length      # of all SGEs
    uint64_t key
    int stage
    int status
    bint parked          # a silent NIC holds it
    bint queued          # it waits until the target has room or a receive
    bint backwards       # the last piece is placed first
    int pieces
    int piece
    Work* turn           # the next one in the NIC's turns
    bint in_turn
    uint64_t left        # bytes that have not left the NIC
    uint64_t sent
    uint64_t times[MAX_PIECES]

cdef struct Entry:
    Completion completion
    bint own             # it is about an operation of this endpoint; else about an arrival

cdef struct Receive:
    WorkRequest* wr
    uint8_t* memory
    uint64_t length

cdef struct SimPort:
    SimPort* next
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
    uint64_t moved       # bytes, and one more for each piece and delivery, that it has sent or received
    Entry* ring
    uint32_t ring_size
    uint32_t ring_first
    uint32_t ring_count
    uint32_t arrivals    # arrivals in the ring, and immediates that are reported later
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
    uint64_t after       # the count of events at which it is due; 0: it is due at its item's time
    uint64_t slow
    bint slows

# An immediate that has arrived and is reported to its endpoint later.
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
    SimPort* endpoint_table[BUCKETS]
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
cdef SimPort* find_endpoint(Net* net, uint64_t number) noexcept nogil
cdef Memory* find_memory(Net* net, uint64_t key) noexcept nogil
cdef void saw(Net* net, Happening kind, const Nic* nic, uint64_t number, uint64_t length, int status) noexcept nogil

cdef uint64_t later(uint64_t a, uint64_t b) noexcept nogil
cdef uint64_t send_through(Nic* nic, uint64_t ready, uint64_t length) noexcept nogil
cdef uint64_t take_through(Nic* nic, uint64_t arrives, uint64_t length) noexcept nogil
cdef void take_turns(Net* net, Work* work) noexcept nogil
cdef uint64_t next_turn(Net* net, Work* work) noexcept nogil
cdef void leave_turns(Net* net, Work* work) noexcept nogil

cdef void plan_work(Net* net, Work* work) noexcept nogil
cdef void run_due(Net* net, uint64_t until) noexcept nogil
cdef void serve_queue(Net* net, SimPort* endpoint) noexcept nogil
cdef void close_works(Net* net, SimPort* endpoint) noexcept nogil
cdef void change_nic(Net* net, Nic* nic, int state) noexcept nogil
cdef void free_work(Net* net, Work* work) noexcept nogil
