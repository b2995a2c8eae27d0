# The structures that the native modules share. A kind of rail (libfabric, verbs, a simulated one) fills in RailOps and
# its own `impl`; the modules above see only what is declared here.
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from posix.types cimport pid_t

from aiote_native.cuda.driver cimport Hold

cdef enum:
    # Access of peers to registered memory.
    MAY_READ = 1
    MAY_WRITE = 2
    MAY_ALL = 3

cdef enum Opcode:
    OP_WRITE = 0
    OP_READ = 1
    OP_SEND = 2
    OP_RECV = 3

cdef enum:
    MAX_RAILS = 8        # rails of one engine
    MAX_CHANNELS = 16    # endpoint pairs of one peer
    MAX_STRIPES = 16     # stripes that one immediate can be split into
    MAX_SGE = 4          # SGEs of one work request
    POLL_BATCH = 64
    MAX_PARTS = 32       # parts of a transfer in one work request; its immediate counts for all of them
    TIME_BUCKETS = 26    # buckets of a histogram: up to a microsecond, up to 2, 4, ... 16.8 seconds, and longer
    ARM_LATER = 2        # the result of `arm` where no descriptor will report anything: only a timer tells when to look

# A provider owns this from post to completion. `context` comes first because libfabric's FI_CONTEXT2 wants 64 bytes of
# its own there.
cdef struct WorkRequest:
    void* context[8]
    WorkRequest* next
    Channel* channel
    void* owner
    uint64_t length
    int opcode
    bint busy
    # its position in the transfer, and its immediate: the recovery needs these to do it again on another channel
    uint64_t part
    uint64_t parts       # more than one where several were gathered
    uint64_t stripe
    int phase
    bint counted
    uint32_t imm_data
    # `lost`: its channel failed before it ended well, so it is unknown whether it arrived (channels/failover.pyx)
    bint lost
    int status
    int provider_errno

# A scatter-gather element: bytes that are contiguous in both memories.
cdef struct Sge:
    uint8_t* local
    uint64_t remote
    size_t length

# The arguments of one posted operation. Where the kind of rail gathers (posting.pyx), `more_sge` SGEs follow the
# first one; all lie in the same two regions.
cdef struct Post:
    int opcode
    bint with_imm
    uint32_t imm
    void* local
    void* desc
    size_t length
    uint64_t remote
    uint64_t key
    uint64_t payload       # the user's bytes; `length` is larger where a provider cannot write zero bytes
    Sge more[MAX_SGE - 1]
    int more_sge
    uint64_t part
    uint64_t parts         # the number of parts that the immediate counts for
    uint64_t stripe
    int phase

# One entry of a completion queue: the end of a work request, or (wr is NULL) an immediate that arrived.
cdef struct Completion:
    WorkRequest* wr
    int status
    int provider_errno
    uint32_t imm
    uint32_t times         # the number of immediates that it stands for
    size_t length

# The functions of a kind of rail:
#
# post: returns 0 if it has posted, otherwise -EAGAIN (the queue is full, or it is not connected yet: try later) or
#     another -errno. An endpoint posts up to `max_sge` SGEs with one immediate, which counts for `parts`; the other
#     side's `poll` reports that number in `times`. It is 1 for a post that was not gathered.
# flush (or NULL): hands over the posts that the kind keeps until the end of a turn; `poll` reports what comes of them.
# poll: returns the number of completions, or -errno.
# arm: returns 0 when it is safe to sleep on the descriptor, 1 when there is more to drain, and ARM_LATER where no
#     descriptor reports the work that is in flight.
# stirred (or NULL, then channels never rest, see progress.pyx): whether there is something to poll for or to send.
#     `announced`: the descriptor reports everything that comes from the peer, so `stirred` leaves that out.
# moved (or NULL): how many bytes the endpoint has taken from the peer and handed to it, for kinds that copy the bytes
#     themselves in post and poll; sets `within` to whether the endpoint is in the middle of a request.
# disconnect: ends the endpoint's connection where that has to come before the close, so that the requests in flight end
#     by themselves. Returns whether it did.
# reached (or NULL): whether the peer still copies out of our memory what it took before we shut the gate, because its
#     GPU copies outside of any call.
# room (or NULL): how many bytes may be in flight at once where a write from that memory (as `desc`) to that key does
#     not move through the channel itself; 0 means `window`, as for everything else.
# shut: closes the endpoint; when it returns no byte moves through it any more.
# release: frees impl.
cdef struct RailOps:
    int (*post)(void* impl, const Post* args, WorkRequest* wr) noexcept nogil
    int (*flush)(void* impl) noexcept nogil
    int (*poll)(void* impl, Completion* out, int capacity) noexcept nogil
    int (*arm)(void* impl) noexcept nogil
    bint (*stirred)(void* impl) noexcept nogil
    bint announced
    uint64_t (*moved)(void* impl, bint* within) noexcept nogil
    bint (*disconnect)(void* impl) noexcept nogil
    bint (*reached)(void* impl) noexcept nogil
    uint64_t (*room)(void* impl, const void* desc, uint64_t key) noexcept nogil
    void (*shut)(void* impl) noexcept nogil
    void (*release)(void* impl) noexcept nogil

# The fault of a channel. SUSPECT: a request ended badly on it, and others may still end well. BROKEN: no
# request will end well any more.
cdef enum Fault:
    SOUND = 0
    SUSPECT = 1
    BROKEN = 2

# While it is `on`, the posts that kinds keep until the end of a turn are kept until every woken task has posted.
cdef struct Batch:
    bint on
    Channel* waiting

# How long work requests took on a rail (progress.pyx).
cdef struct RailTimes:
    uint64_t buckets[TIME_BUCKETS]
    uint64_t sum_ns

# How often each immediate was counted. Open addressing; the next growth may drop an entry whose count is 0.
cdef struct Tally:
    uint32_t* imm_data
    int64_t* counts
    bint* taken
    uint32_t size
    uint32_t used
    uint32_t last

# One endpoint pair: a local rail's endpoint, and the one remote endpoint that it talks to.
cdef struct Channel:
    const RailOps* ops
    void* impl
    PeerState* peer
    int rail
    int remote_rail
    int wait_fd
    bint open
    # its place in one of its engine's lists (worklists.pxd)
    Channel* next_listed
    Channel* prev_listed
    bint resting         # it is neither polled nor armed until something stirs it (progress.pyx)
    bint unflushed       # it is in the batch's list
    Channel* next_unflushed
    bint paused          # nothing more is posted, because it is suspected or is being brought up
    Fault fault
    int error            # the negative error number of the fault
    bint noticed         # Python has yet to look at it: it has a fault, or its counts are to be acknowledged
    uint32_t depth
    uint32_t outstanding
    uint64_t in_flight   # bytes of transfers that were posted and are not over
    uint64_t window      # the limit of `in_flight`, in bytes
    uint32_t quiet       # rounds in a row in which nothing came
    uint64_t ended       # work requests that have ended since the channel was opened
    WorkRequest* requests
    uint32_t fresh       # the first request that was never used: untouched pages take no memory
    WorkRequest* spare
    uint64_t imm_address
    uint64_t imm_key
    void* scratch
    void* scratch_desc
    uint64_t largest
    uint64_t least       # bytes that an immediate alone carries, from scratch to the peer's scratch
    int max_sge          # SGEs of one work request
    uint64_t gathers_from  # bytes; smaller parts are gathered only with their neighbours
    bint forgets         # closing an endpoint drops what its completion queue still holds
    # how to wake the peer, for rails without a wait descriptor (system/wakeups.pxd)
    const uint32_t* peer_page
    int peer_wakeup_fd
    const char* peer_wakeup_secret
    uint32_t peer_slot
    uint32_t woken_epoch
    uint64_t moved       # bytes that its endpoint had taken and handed over at the last look
    uint32_t* waiting
    # the gates of both sides, in the wake-up pages (gates.pxd); NULL where there are none
    uint32_t* own_gate
    uint32_t* own_busy
    const uint32_t* peer_gate
    const uint32_t* peer_busy
    uint32_t peer_generation
    bint within          # we are inside the gate, between the posts of one turn
    # the peer's epoch, which changes when the peer enters or leaves its library, and the bytes posted since it changed
    uint32_t paced_epoch
    uint64_t paced_bytes
    # tallies by immediate (counters/table.pyx), where a peer has several channels: our requests that ended well, and
    # the peer's that arrived
    Tally confirmed
    Tally arrived
    # its measured speed, and how much it has carried compared with the other channels (posting.pyx)
    uint64_t carried
    uint64_t rate_since
    uint64_t rate_bytes
    uint64_t cost
    uint64_t nominal     # its cost by the speed that the NIC states; 0: the NIC states none
    # While times are taken (progress.pyx), `ops` and `impl` belong to progress.pyx, and these are the endpoint's own.
    const RailOps* endpoint_ops
    void* endpoint
    RailTimes* times
    uint32_t timed_every
    uint32_t untimed     # posts to leave untimed before the next timed one
    WorkRequest* timed_wr
    uint64_t timed_ns

# The first member of every structure whose end has to be told to Python.
cdef struct Done:
    int eventfd  # the eventfd of a thread that waits for it (requests/threaded.pyx), plus 1; 0: none
    Done* next
    PyObject* owner

cdef struct DoneList:
    Done* head
    Done* tail

# Transfers with something to post.
cdef struct Queue:
    Op* head
    Op* tail

# The channels and peers of one engine that its rounds look at (worklists.pxd).
cdef struct Worklists:
    Channel* polled      # open channels that do not rest
    Channel* looked_at   # channels at rest that are looked at, because no descriptor reports what stirs them
    Channel* next_look   # the one of those to begin with; NULL: the first
    uint32_t announced   # the number of channels at rest whose descriptors report what stirs them
    PeerState* pending   # peers with something to post, to grant or to end

cdef struct PeerState:
    Channel* channels[MAX_CHANNELS]
    int channel_count
    uint32_t turn    # the channel to look at first
    Queue queue
    Queue probes     # transfers that prove channels: each may wait long for its own, so others must not queue here
    Queue armed      # transfers that wait for a flag (requests/threaded.pyx) or a GPU stream (requests/operations.pyx)
    PeerState* next_peer
    PeerState* prev_peer
    Worklists* lists
    bint pending     # it is in the list of peers with something to do
    PeerState* next_pending
    PeerState* prev_pending
    Mailbox* mailbox
    Batch* batch
    int error
    int error_rail
    bint failed
    bint reported
    bint counted  # its immediates created counters
    uint64_t unasked  # how many of those counters no user had opened when the table was last full
    bint survivable  # there are several channels, and work that one has lost is done again on the others
    const Op* streak_of  # the transfer of the last posts, with no other transfer's between them
    uint32_t streak      # the number of those in a row on the channel that was chosen for it
    uint64_t streak_bytes
    int choice       # the channel that was chosen last
    bint timed       # channel speeds are measured by the clock; virtual time has none
    bint round_robin  # channels take turns, whatever they can carry
    bint greeting  # the peer may not have looked at our endpoint yet
    bint reached    # a GPU of the peer may still copy out of our memory what it took before an endpoint was shut
    bint unsettled  # the peer may still carry out some of the work that was in flight when an endpoint was shut
    PyObject* owner

# How a part (a page, or the whole of a single write) is split: first `head_count` stripes without an immediate; when
# those are over, `tail_count` stripes with the immediate.
cdef struct Split:
    uint64_t head_bytes
    uint64_t head_count
    uint64_t tail_bytes
    uint32_t tail_count

# PLAIN: a user's transfer. PIECE: a part of one that is done again. RESENT: immediates that are sent again
# (channels/failover.pyx).
cdef enum OpKind:
    PLAIN = 0
    PIECE = 1
    RESENT = 2

# A transfer: `parts` parts of `part_bytes`, each split in the same way.
cdef struct Op:
    Done done
    Op* prev
    Op* next
    PeerState* peer
    OpKind kind
    int opcode
    bint counted
    uint32_t imm
    const uint8_t* ranks  # how far each rail is from the local memory, 0 the nearest; NULL: all are equally near
    int pin              # the only rail to use while it is there; -1: any
    int proof            # the channel, counted from 1, that this proves before it carries anything else; 0: none
    bint queued
    bint armed
    bint over
    bint cancelled
    bint posted_all
    uint64_t local_address
    uint64_t local_stride
    const int64_t* local_index
    void* const* local_desc
    uint64_t remote_offset
    const uint64_t* remote_base
    const uint64_t* remote_key
    uint64_t remote_stride
    const int64_t* remote_index
    uint64_t part_bytes
    uint64_t parts
    Split split
    uint64_t stripe_bytes  # about the size of each stripe
    uint64_t part
    uint64_t stripe
    int phase
    uint32_t carried     # the channels, as bits, that carried the head
    uint32_t owed        # those of them, as bits, that the tail of this part has not gone over yet
    uint64_t outstanding
    uint64_t confirmed
    uint64_t total
    int status
    int provider_errno
    int rail
    # Of a request with many targets, which may be at many peers: a target has its `parent`, the request has `children`
    # and `child_count`.
    Op* parent
    Op* children
    uint32_t child_count

cdef struct Slot:
    WorkRequest wr
    uint8_t* memory
    Slot* next
    uint32_t length
    uint64_t number
    Op* op

# Two-sided messages with one peer: a pool of receive slots, and as many credits at the sender (channels/messages.pyx).
cdef struct Mailbox:
    Channel* channel
    uint32_t slots
    uint32_t peer_slots
    uint32_t transmit_slots
    uint32_t slot_bytes
    uint8_t* memory
    void* desc
    Slot* receive
    Slot* transmit
    Slot* spare_transmit
    Slot* repost
    Slot* ready_head
    Slot* ready_tail
    uint32_t ready
    uint64_t consumed
    uint64_t advertised
    uint64_t granted
    uint64_t sent
    uint32_t credits_in_flight
    # Messages are numbered from 1, so that each is taken once, whatever becomes of the channel that carried it.
    uint64_t numbered
    uint64_t top
    uint64_t floor       # all messages up to this number have come
    uint64_t advertised_floor  # the floor that the peer was last told
    uint64_t peer_floor  # the floor that the peer last told us, for our messages
    uint64_t* seen       # seen[n % slots] is n when message n has come
    Slot* unsure         # messages that were sent and are not known to have arrived
    Slot* resend
    bint awaits_peer     # the mailbox has a new channel, and the peer has not said yet that it has it, too
    Op* head
    Op* tail

cdef extern from "<errno.h>" nogil:
    const int ECANCELED  # not among the names of libc.errno

cdef struct Counter:
    Counter* chain
    uint32_t imm
    uint32_t handles     # everything that keeps the counter alive: handles of users, and waits
    uint32_t opened      # handles of users
    bint dropped         # the last user closed its handle with `discard`: only pending waits still use the counts
    uint64_t units
    PeerState* maker     # the peer whose immediate created it; NULL: a user created it, or the peer is gone
    Wait* head
    Wait* tail

cdef struct Wait:
    Done done
    Wait* prev
    Wait* next
    Counter* counter
    uint64_t need
    int state

# Consecutive immediates on which only some peers may count (counters/table.pyx); a SourceRange owns it.
cdef struct Range:
    uint32_t first
    uint32_t end
    PeerState** peers    # sorted by address
    uint64_t count
    uint64_t room

cdef struct Table:
    Counter** buckets
    uint64_t size
    uint64_t used
    uint64_t limit
    Range** ranges       # sorted by their first values
    uint64_t range_count
    uint64_t range_room
    uint64_t uninvited   # immediates that were not counted, because their peer may not count on their values

# The state that all channels of an engine share. The engine's lock guards it.
cdef struct State:
    DoneList done
    Table counters
    PeerState* peers
    Batch batch
    Worklists lists
    uint64_t outstanding     # work requests of transfers and messages that a NIC holds
    uint64_t queued          # transfers and messages with something left to post
    uint64_t blocked         # posts that a provider refused for now in the last round
    uint64_t inbox           # messages that arrived and that the user has not taken yet
    uint64_t channels        # open channels
    uint64_t failures        # failed peers, and channels to look at, that Python was not told of yet
    uint64_t events          # everything that ever happened: a changed value means that there was progress
    uint64_t posted
    uint64_t completed
    uint64_t refused[MAX_RAILS]  # posts that a rail refused
    uint64_t immediates
    uint64_t wakeups
    Hold* holds              # the holds of transfers that wait for a GPU stream, in the order of submission
    Hold* last_hold
    uint64_t carried[MAX_RAILS]  # bytes of our own requests that a rail carried
    uint64_t ended[MAX_RAILS]    # work requests of a rail that ended on channels which no longer exist
