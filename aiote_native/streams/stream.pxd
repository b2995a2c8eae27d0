# What the two ends of a stream share. A kind of wire (rings.pyx) fills in Wire and has a Stream as its first member.
#
# Frames follow each other in both directions, each a header of 104 bytes and, for some, as many bytes as it says:
#
#   FRAME_WRITE     bytes for `iov` of the receiver's memory under `key`; counts `counts_for` times for `imm`, if any
#   FRAME_SEND      a message, for the oldest receive that was posted; it waits for one
#   FRAME_READ      asks for the bytes of `iov` of the receiver's memory under `key`
#   FRAME_ANSWER    bytes for the oldest read that was not answered
#   FRAME_ANSWERED  that read is over, with `status`
#   FRAME_DONE      of the requests with bytes `done` are over, the last one of them with `status`
#
# Between processes of one host whose memory is on GPUs, bytes may stay where they are, and their receiver copies them:
#
#   FRAME_EXPORT    the allocation `key`, a number of the sender's, by its handle: to be opened on the device `imm`
#   FRAME_OPENED    it was, or not: `status` is the driver's code
#   FRAME_LEND      FRAME_WRITE by reference: the allocation's number, and for each of the iov where in it the bytes are
#   FRAME_LENT      FRAME_ANSWER by reference; the FRAME_READ had 1 + the device in `imm`
#   FRAME_PULLED    the bytes of the oldest FRAME_LENT were copied, and are the sender's again
#   FRAME_FORGET    the allocation `key` is to be closed
#   FRAME_FORGOTTEN it is
#
# Every header says in `done` how many writes and sends of its receiver are over, all well but those of which a
# FRAME_DONE has said otherwise: an acknowledgement of its own is sent only by who has nothing else to say.
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

from aiote_native.cuda.copies cimport GpuQueues
from aiote_native.cuda.sharing cimport Export, Handle, Import
from aiote_native.structs cimport Completion, MAX_SGE, Post, WorkRequest

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
    STREAM_DEPTH = 1024  # requests of one side that are not over
    FRAMES_BEGUN = 8     # frames that are handed over together
    MAX_VECTORS = FRAMES_BEGUN * (1 + MAX_SGE)
    SHARED_DEVICES = 63  # that keys tell apart
    DEVICE_SHIFT = 58    # of a key: above it stand 1 + the device that the memory is on, or 0 for the host's
    REFERENCE = 1 + MAX_SGE

cdef struct RmaIov:
    uint64_t address
    uint64_t length

cdef struct Frame:
    uint16_t kind
    uint16_t iov_count
    uint32_t imm
    uint32_t counts_for  # 0: without an immediate
    int32_t status
    uint64_t done
    uint64_t key
    uint64_t length      # of all of the iov; of FRAME_READ what is asked for
    RmaIov iov[MAX_SGE]

# A frame to be sent, and what was asked for by one that was.
cdef struct Work:
    Frame frame
    Work* next
    WorkRequest* wr
    uint8_t* local[MAX_SGE]
    uint64_t moved       # bytes of header and payload that the wire has taken
    Work* trailer        # the FRAME_ANSWERED of a FRAME_ANSWER
    uint64_t epoch       # of the registry in which an answer's iov was good
    # where `local` is on a GPU (staging.pyx, landing.pyx)
    GpuQueues* gpu
    uint16_t[MAX_SGE] slots  # of its bytes on their way out
    int slot_count
    bint copied          # its copies were posted, and `number` is behind them
    uint32_t number
    int status
    # where it goes by reference (lending.pyx, pulling.pyx)
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
    GpuQueues* gpu       # NULL: it is the host's
    int device           # that it is on; -1: the host's
    Export* exported     # what other processes open to reach it; NULL: they cannot
    bint writable
    int access  # what peers may do
    bint bound           # to the peer of that name
    uint8_t[NAME_BYTES] holder

# The memory of one device by its keys. Its lock is held while anything moves, so that no byte goes to memory whose
# registration has ended.
cdef struct Registry:
    pthread_mutex_t lock
    Memory* table[BUCKETS]
    uint64_t epoch       # changes with every registration that ends
    uint64_t served      # bytes that peers have read here, or written
    # GPU memory that is shared (lending.pyx, pulling.pyx)
    bint shares
    GpuQueues* gpus[SHARED_DEVICES]
    Export* exports
    uint64_t withdrawn   # exports that have ended
    Work* lent           # answers whose bytes peers may be copying
    int refused          # the last code for which a peer could not open what is shared, and how many could not
    uint64_t refusals
    int notify_fd        # readable when that has changed

# An allocation that a peer was told of, to be opened on one of its devices.
cdef struct Told:
    Told* next
    uint64_t number
    Export* exported
    int device
    int state
    Handle handle

# The wire under a stream: bytes that were moved, 0 where none can be now, or -errno.
cdef struct Wire:
    long (*send)(void* stream, const iovec* vectors, int count) noexcept nogil
    long (*receive)(void* stream, const iovec* vectors, int count) noexcept nogil

cdef struct Stream:
    const Wire* wire
    Registry* registry
    bint named
    uint8_t[NAME_BYTES] peer
    bint eager           # what is posted is sent at once, not at the end of the turn
    bint connected
    bint closed
    int broken           # the -errno for which nothing moves any more
    bint reported_broken  # by a poll
    # sending: not begun (what is urgent before the rest), begun, sent and not over
    WorkList urgent
    WorkList queue
    WorkList begun
    WorkList unacked
    WorkList unread
    Work* spare
    uint32_t outstanding
    uint32_t refusals    # requests of the peer's that were refused, which it does not know yet
    bint paused          # the last push ended for its budget, not for the wire
    uint64_t sent        # writes and sends that the wire has taken whole
    uint64_t confirmed   # of them those of which the peer has said that they are over
    uint64_t ended       # of these those that a poll has reported
    WorkList held        # what comes from a GPU, and answers that follow such ones
    Work* uncopied       # the first of these whose copies were not posted
    int staged           # slots that its frames have
    WorkList unsent      # requests whose copies went wrong
    uint64_t bad         # the one of them that did not end well, counted from 1
    int bad_status
    # receiving: the header, and where its bytes go
    Frame heads[2]
    int head             # which of the two is that of the frame under way
    uint32_t head_got
    uint32_t next_got    # bytes of the other one, which came with the end of this one
    bint stalled         # a message waits for a receive
    bint opened          # the header was read, and what follows is known
    bint discards
    bint cached          # its bytes go to memory that a processor's caches may hold
    int status
    uint64_t left
    iovec into[MAX_SGE]
    int into_count
    int into_first
    uint64_t epoch       # of the registry in which `into` was good
    GpuQueues* gpu       # where `into` is
    int slot             # that its bytes come through; -1: none
    uint64_t filled
    uint32_t number      # behind the last copy
    bint starved         # no slot was free
    WorkList landing     # frames that wait for copies, and those behind them
    uint32_t landings
    WorkRequest* receiving
    WorkList receives
    uint32_t answers     # reads of the peer that are not answered yet
    bint shares          # peers on this wire are of this host, and GPU memory may be shared with them
    Told* told
    uint64_t numbers     # that were given to allocations
    uint64_t withdrawn   # as it was in the registry when they were last looked at
    WorkList lent        # answers by reference that were sent
    uint32_t lent_count
    Import* imports
    Import* opener       # the one that is being opened or closed
    uint32_t import_count
    uint32_t moving      # of them those that are being opened or closed, or wait for that
    uint64_t* pulling    # where the peer sees whether we copy out of its memory; NULL: nowhere
    uint32_t replies     # of sharing, that the wire has not taken
    uint64_t[REFERENCE] reference  # that comes
    Handle handle        # that comes
    uint64_t received    # writes and sends of the peer's that are over
    uint64_t acknowledged  # of these, as the peer was told

cdef Memory* find_memory(const Registry* registry, uint64_t key) noexcept nogil
cdef bint is_open(const Stream* self, const Frame* frame, bint writes) noexcept nogil
cdef void append(WorkList* works, Work* work) noexcept nogil
cdef Work* take_first(WorkList* works) noexcept nogil
cdef Work* new_work(Stream* self) noexcept nogil
cdef void free_work(Stream* self, Work* work) noexcept nogil
cdef void free_works(Stream* self) noexcept nogil
cdef bint is_copying(const Stream* self) noexcept nogil
cdef int armed(Stream* self, bint again) noexcept nogil
