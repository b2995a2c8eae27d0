from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

from aiote_native.cuda.driver cimport GpuQueues
from aiote_native.cuda.memory cimport Export, Handle, Import
from aiote_native.engine.structs cimport MAX_SGE, Completion, Post, WorkRequest

# The structures of a stream, which both of its halves use. A kind of wire (endpoints.pyx) fills in Wire, and its
# own structure has a Stream as the first member.
#
# Each direction carries a sequence of frames: a header of 104 bytes and, in some kinds, a payload:
#
#   FRAME_WRITE     bytes for `iov` of the receiver's memory under `key`; `imm` arrives `counts_for` times, 0: no `imm`
#   FRAME_SEND      a message for the oldest posted receive; it waits until there is one
#   FRAME_READ      asks for the bytes of `iov` of the receiver's memory under `key`
#   FRAME_ANSWER    bytes for the oldest unanswered read
#   FRAME_ANSWERED  the end of that read, with `status`
#   FRAME_DONE      `done` writes and sends of the receiver are over; the last of them ended with `status`
#
# Between processes of one host, bytes on a GPU may stay where they are, and their receiver copies them:
#
#   FRAME_EXPORT    the handle of the sender's allocation number `key`; the receiver opens it on its device `imm`
#   FRAME_OPENED    the receiver has opened it, or could not: `status` is 0, the driver's code or -errno
#   FRAME_LEND      FRAME_WRITE by reference: the allocation's number, and the offset in it for each element of the iov
#   FRAME_LENT      FRAME_ANSWER by reference; the FRAME_READ had 1 + the device in `imm`
#   FRAME_PULLED    the bytes of the oldest FRAME_LENT were copied, so their owner may change them
#   FRAME_FORGET    asks the receiver to close the allocation `key`
#   FRAME_FORGOTTEN the receiver has closed it
#
# Every header acknowledges in `done` how many writes and sends of its receiver are over. They ended well, except those
# that a FRAME_DONE with a status names. A standalone acknowledgement is sent when there is no frame to piggyback on.

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len

cdef enum:
    FRAME_WRITE = 1
    FRAME_SEND = 2
    FRAME_READ = 3
    FRAME_ANSWER = 4
    FRAME_ANSWERED = 5
    FRAME_DONE = 6
    FRAME_LEND = 7
    FRAME_LENT = 8
    FRAME_PULLED = 9
    FRAME_EXPORT = 10
    FRAME_OPENED = 11
    FRAME_FORGET = 12
    FRAME_FORGOTTEN = 13

cdef enum:
    BUCKETS = 256        # of the table of keys
    NAME_BYTES = 24      # of an engine: its identity and incarnation
    STREAM_DEPTH = 1024  # outstanding requests of one side
    FRAMES_BEGUN = 8     # frames handed to the wire together
    MAX_VECTORS = FRAMES_BEGUN * (1 + MAX_SGE)
    SHARED_DEVICES = 63  # devices that keys can tell apart
    DEVICE_SHIFT = 58    # the bits of a key above it are 1 + the device of the memory, or 0 for host memory
    REFERENCE = 1 + MAX_SGE

cdef struct RmaIov:
    uint64_t address
    uint64_t length

cdef struct Frame:
    uint16_t kind
    uint16_t iov_count
    uint32_t imm
    uint32_t counts_for  # 0: there is no immediate
    int32_t status
    uint64_t done
    uint64_t key
    uint64_t length      # bytes of the whole iov; in a FRAME_READ the bytes asked for
    RmaIov iov[MAX_SGE]

# A frame to be sent, or a request that was sent and is not over.
cdef struct Work:
    Frame frame
    Work* next
    WorkRequest* wr
    uint8_t* local[MAX_SGE]
    uint64_t moved       # bytes of header and payload that the wire has taken
    Work* trailer        # the FRAME_ANSWERED of a FRAME_ANSWER
    uint64_t epoch       # the registry's epoch when an answer's iov was last found open
    # if `local` is on a GPU (sending.pyx, stream.pyx)
    GpuQueues* gpu
    uint16_t[MAX_SGE] slots  # hold its bytes on their way out
    int slot_count
    bint copied          # its copies were posted; `number` is behind them
    uint32_t number
    int status
    # if it goes by reference (stream.pyx)
    Export* exported
    uint64_t[REFERENCE] reference
    Stream* lender
    Work* next_lent
    bint pulled

cdef struct WorkList:
    Work* head
    Work* tail

cdef struct Memory:
    Memory* next
    uint64_t key
    uint64_t address
    uint64_t length
    GpuQueues* gpu       # NULL: it is host memory
    int device           # the device that it is on; -1: host memory, or a device that keys cannot name
    Export* exported     # what other processes open to copy from it; NULL: they cannot
    bint writable
    int access  # MAY_READ, MAY_WRITE: the rights of peers
    bint bound           # the key serves only the peer named `holder`
    uint8_t[NAME_BYTES] holder

# The memory of one device by its keys. Each call that moves bytes holds the lock, so that no byte goes to memory whose
# registration has ended.
cdef struct Registry:
    pthread_mutex_t lock
    Memory* table[BUCKETS]
    uint64_t epoch       # changes when a registration ends
    uint64_t served      # bytes that peers have read or written here
    # shared GPU memory (stream.pyx)
    bint shares
    GpuQueues* gpus[SHARED_DEVICES]
    Export* exports
    uint64_t withdrawn   # exports that have ended
    Work* lent           # answers whose bytes peers may be copying
    int refused          # the code of the last failure of a peer to open an export; `refusals` counts the failures
    uint64_t refusals
    int notify_fd        # becomes readable when `refusals` has changed

# An allocation that the peer was asked to open on one of its devices.
cdef struct ExportOffer:
    ExportOffer* next
    uint64_t number
    Export* exported
    int device
    int state
    Handle handle

# The wire under a stream. Both functions return how many bytes they moved, 0 if no byte can move now, or -errno.
cdef struct Wire:
    long (*send)(void* stream, const iovec* vectors, int count) noexcept nogil
    long (*receive)(void* stream, const iovec* vectors, int count) noexcept nogil

cdef struct Stream:
    const Wire* wire
    Registry* registry
    bint named
    uint8_t[NAME_BYTES] peer
    bint eager           # each post is sent at once, not at the end of the turn
    bint connected
    bint closed
    int broken           # the -errno of the failure after which no byte moves any more
    bint reported_broken  # by a poll
    # sending: frames not begun (urgent ones first), frames begun, and requests sent and not over
    WorkList urgent
    WorkList queue
    WorkList begun
    WorkList unacked
    WorkList unread
    Work* spare
    uint32_t outstanding
    uint32_t refusals    # refused requests of the peer that it has not been told of
    bint paused          # the last push ended because of its budget, though the wire had room
    uint64_t sent        # writes and sends that the wire has taken whole
    uint64_t confirmed   # writes and sends that the peer has acknowledged
    uint64_t ended       # writes and sends that a poll has reported
    WorkList held        # frames with bytes on a GPU, and answers behind such frames
    Work* uncopied       # the first of these whose copies were not posted
    int staged           # slots in use by its frames
    WorkList unsent      # requests whose copies failed
    uint64_t bad         # the number of the acknowledged request that failed, as `ended` counts
    int bad_status
    # receiving: the header, and where its payload goes
    Frame heads[2]
    int head             # the index of the current frame's header
    uint32_t head_got
    uint32_t next_got    # bytes of the other header, which came with the end of the current frame
    bint stalled         # a message waits for a receive
    bint opened          # the header was read, and the place of the payload is known
    bint discards        # the payload is dropped
    bint cached          # the payload goes to memory that a processor's caches may hold
    int status
    uint64_t left
    iovec into[MAX_SGE]
    int into_count
    int into_first
    uint64_t epoch       # the registry's epoch when `into` was last found open
    GpuQueues* gpu       # the device that `into` is on; NULL: the host
    int slot             # the slot that receives the payload; -1: none
    uint64_t filled
    uint32_t number      # the number behind the last copy
    bint starved         # no slot was free, or too many copies are in flight
    WorkList landing     # frames that wait for copies, and frames behind them
    uint32_t landings
    WorkRequest* receiving
    WorkList receives
    uint32_t answers     # reads of the peer that are not answered yet
    bint shares          # peers on this wire are on this host, and GPU memory may be shared with them
    ExportOffer* offers
    uint64_t numbers     # how many numbers were given to allocations
    uint64_t withdrawn   # the registry's count when ended exports were last looked for
    WorkList lent        # answers by reference that were sent
    uint32_t lent_count
    Import* imports
    Import* opener       # the import that is being opened or closed
    uint32_t import_count
    uint32_t moving      # imports that are being opened or closed, or wait for that
    uint64_t* pulling    # tells the peer whether this side copies out of its memory; NULL: the wire has no such word
    uint32_t replies     # frames of sharing that the wire has not taken
    uint64_t[REFERENCE] reference  # the reference being received
    Handle handle        # the handle being received
    uint64_t received    # writes and sends of the peer that are over
    uint64_t acknowledged  # the value of `received` that the peer was told

cdef Memory* find_memory(const Registry* registry, uint64_t key) noexcept nogil
cdef bint is_open(const Stream* self, const Frame* frame, bint writes) noexcept nogil
cdef void append(WorkList* works, Work* work) noexcept nogil
cdef Work* take_first(WorkList* works) noexcept nogil
cdef Work* new_work(Stream* self) noexcept nogil
cdef void free_work(Stream* self, Work* work) noexcept nogil
cdef void free_works(Stream* self) noexcept nogil
cdef bint is_copying(const Stream* self) noexcept nogil
cdef int armed(Stream* self, bint again) noexcept nogil

cdef uint64_t lent_room(void* impl, const void* desc, uint64_t key) noexcept nogil
cdef int lend(Stream* self, Work* work) noexcept nogil
cdef void reply(Stream* self, int kind, uint64_t number, int status) noexcept nogil
cdef void note_offered(Stream* self, uint64_t number) noexcept nogil
cdef int note_opened(Stream* self, const Frame* frame) noexcept nogil
cdef int note_forgotten(Stream* self, const Frame* frame) noexcept nogil
cdef int note_pulled(Stream* self) noexcept nogil
cdef void withdraw_ended(Stream* self) noexcept nogil
cdef bint is_lent(const Registry* registry, const Memory* memory) noexcept nogil
cdef void leave_export(Registry* registry, Export* exported) noexcept nogil
cdef void let_go(Registry* registry, Export* exported) noexcept nogil
cdef void leave_lent(Stream* self) noexcept nogil

cdef bint is_full(const Stream* self, const Frame* frame) noexcept nogil
cdef int open_reference(Stream* self, const Frame* frame) noexcept nogil
cdef void pull_write(Stream* self, const Frame* frame) noexcept nogil
cdef void pull_answer(Stream* self, Work* asked) noexcept nogil
cdef int take_export(Stream* self, const Frame* frame) noexcept nogil
cdef int take_forget(Stream* self, const Frame* frame) noexcept nogil
cdef void move_imports(Stream* self) noexcept nogil
cdef void note_pulls(Stream* self) noexcept nogil
cdef void leave_imports(Stream* self) noexcept nogil

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t

cdef struct Giver:
    Registry* registry
    int listener
    int asking           # the connection being served; -1: none
    bint ended
    uint8_t[64] name
    pthread_t thread

cdef Giver* start_giving(Registry* registry) except NULL
cdef void stop_giving(Giver* self) noexcept

cdef int list_slot(Stream* self, iovec* vectors) noexcept nogil
cdef void land(Stream* self, uint64_t bytes) noexcept nogil
cdef void drop_slot(Stream* self) noexcept nogil
