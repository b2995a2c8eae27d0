# The structures that the native floor shares. A rail kind (libfabric, verbs, a simulated one) fills in RailOps and
# its own `impl`; everything above sees only what is declared here.
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from posix.types cimport pid_t

from aiote_native.tallies cimport Tally

cdef enum:
    # What a registration opens to peers.
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
    MAX_STRIPES = 16     # stripes that one immediate can be split in
    MAX_SGE = 4          # of one work request
    POLL_BATCH = 64
    MAX_PARTS = 32       # of a transfer in one work request, for which an immediate counts
    TIME_BUCKETS = 26    # of a histogram: up to a microsecond, up to 2, 4, ... 16.8 seconds, and longer
    ARM_LATER = 2        # what `arm` says where nothing but the clock tells when to look again

# What a provider owns from post to completion. `context` comes first: libfabric's FI_CONTEXT2 wants 64 bytes of its
# own there.
cdef struct WorkRequest:
    void* context[8]
    WorkRequest* next
    Channel* channel
    void* owner
    uint64_t length
    int opcode
    bint busy
    # where in its transfer it is, and what it counts: for doing it again elsewhere
    uint64_t part
    uint64_t parts       # more than one where they were gathered
    uint64_t stripe
    int phase
    bint counted
    uint32_t imm_data
    # `lost`: its channel failed before it ended well, so nobody knows whether it arrived (recovery.pyx)
    bint lost
    int status
    int provider_errno

# A scatter-gather element: bytes that are contiguous in both memories.
cdef struct Sge:
    uint8_t* local
    uint64_t remote
    size_t length

# The arguments of one posted operation. Beside its first SGE it has `more_sge` of the same two regions, where the
# kind of rail gathers (gathering.pyx).
cdef struct Post:
    int opcode
    bint with_imm
    uint32_t imm
    void* local
    void* desc
    size_t length
    uint64_t remote
    uint64_t key
    uint64_t payload       # bytes of the user's, which `length` exceeds where a provider cannot write nothing
    Sge more[MAX_SGE - 1]
    int more_sge
    uint64_t part
    uint64_t parts         # an immediate counts for so many
    uint64_t stripe
    int phase

# One thing that a completion queue reported: the end of a work request, or (wr is NULL) an immediate that arrived.
cdef struct Completion:
    WorkRequest* wr
    int status
    int provider_errno
    uint32_t imm
    uint32_t times         # so many immediates in one
    size_t length

# post: 0, -EAGAIN (queue full or not connected yet: later), or another -errno: nothing was posted. An endpoint posts
# the `more_sge` that its `max_sge` allows, with one immediate that counts for `parts`; the other side's `poll` reports
# them in `times`, 1 where nothing was gathered. flush (or NULL): hands over what a kind keeps until the end of a turn;
# `poll` reports what comes of it. poll: number of completions, or -errno. arm: 0 when it is safe to sleep on the
# descriptor, 1 when there is more to drain, ARM_LATER where no descriptor tells of what is under way. stirred (or NULL,
# then channels never rest, see resting.pyx): whether there is something to poll for or to send; `announced`: from the
# peer's side only what its descriptor tells of. moved (or NULL): how many bytes it has taken from the peer and handed
# to it, of kinds that copy them in post and poll themselves, and whether it is within a request. disconnect: ends
# the endpoint's connection where that has to come before the close, so that what is under way ends by itself; whether
# it did. reached (or NULL): whether the peer still copies out of memory of ours what it took before we shut the gate:
# its GPU does so outside of any call. room (or NULL): how many bytes may be under way at once where a write from that
# memory (as `desc`) to that key does not move through the channel itself; 0: `window`, as for all else. shut: closes
# the endpoint; when it returns no byte moves through it any more. release: frees impl.
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

# What is known against a channel: a request ended badly on it, and others may still end well; or nothing more will.
cdef enum Fault:
    SOUND = 0
    SUSPECT = 1
    BROKEN = 2

# While it is `on`, what kinds keep until the end of a turn is kept until all who run have posted.
cdef struct Batch:
    bint on
    Channel* waiting

# How long work requests took on a rail (timing.pyx).
cdef struct RailTimes:
    uint64_t buckets[TIME_BUCKETS]
    uint64_t sum_ns

# One endpoint pair: a local rail's endpoint and the one remote endpoint that it talks to.
cdef struct Channel:
    const RailOps* ops
    void* impl
    PeerState* peer
    int rail
    int remote_rail
    int wait_fd
    bint open
    bint resting         # it is neither polled nor armed before something stirs it (resting.pyx)
    bint unflushed       # it is in the batch's list
    Channel* next_unflushed
    bint paused          # nothing more is posted: it is suspected, or being brought up
    Fault fault
    int error            # the negative error number of the fault
    bint noticed         # Python has still to hear of the fault, or that it is time to acknowledge
    uint32_t depth
    uint32_t outstanding
    uint64_t in_flight   # bytes of transfers that were posted and are not over
    uint64_t window      # how many these may be
    uint32_t quiet       # rounds in a row in which nothing came
    uint64_t ended       # work requests that have ended since the channel was opened
    WorkRequest* requests
    uint32_t fresh       # of these the first that was never used: memory that is not touched takes none
    WorkRequest* spare
    uint64_t imm_address
    uint64_t imm_key
    void* scratch
    void* scratch_desc
    uint64_t largest
    uint64_t least       # bytes that an immediate alone carries, from scratch to the peer's scratch
    int max_sge          # of one work request
    uint64_t gathers_from  # bytes of a part, below which only neighbours are gathered
    bint forgets         # closing an endpoint drops what its completion queue still holds
    # how to wake the peer, for rails without a wait descriptor (peer_wakeups.pxd)
    const uint32_t* peer_page
    int peer_wakeup_fd
    const char* peer_wakeup_secret
    uint32_t peer_slot
    uint32_t woken_epoch
    uint64_t moved       # bytes that its endpoint had taken and handed over when it was looked at last
    uint32_t* waiting
    # the gates of both sides in the same pages (gates.pyx); NULL where there are none
    uint32_t* own_gate
    uint32_t* own_busy
    const uint32_t* peer_gate
    const uint32_t* peer_busy
    uint32_t peer_generation
    bint within          # the gate, between the posts of one turn
    # what was posted since the peer's last step into or out of its library, which its epoch tells
    uint32_t paced_epoch
    uint64_t paced_bytes
    # what has ended well and what has come over it, by immediate (tallies.pyx); used where a peer has several channels
    Tally confirmed
    Tally arrived
    # how fast it is, and how much it has carried beside the others (schedule.pyx)
    uint64_t carried
    uint64_t rate_since
    uint64_t rate_bytes
    uint64_t cost
    uint64_t nominal     # what it would cost by the NIC's own account; 0: it gives none
    # While times are taken (timing.pyx), `ops` and `impl` are those of the timing, and these the endpoint's own.
    const RailOps* endpoint_ops
    void* endpoint
    RailTimes* times
    uint32_t timed_every
    uint32_t untimed     # posts to come that are not timed
    WorkRequest* timed_wr
    uint64_t timed_ns

# Something that is over and has to be told to Python; the first member of what can be.
cdef struct Done:
    int bell  # the eventfd of a thread that waits for it (direct.pyx), counted from 1; 0: none
    Done* next
    PyObject* owner

cdef struct DoneList:
    Done* head
    Done* tail

# Transfers with something to post.
cdef struct Queue:
    Op* head
    Op* tail

cdef struct PeerState:
    Channel* channels[MAX_CHANNELS]
    int channel_count
    uint32_t turn    # the channel that is looked at first
    Queue queue
    Queue probes     # what is to prove channels: one may wait long for its own, and nothing is to wait behind it
    Queue armed      # what nobody posts before its flag is raised (proxy.pyx)
    PeerState* next_peer
    PeerState* prev_peer
    Mailbox* mailbox
    Batch* batch
    int error
    int error_rail
    bint failed
    bint reported
    bint counted  # counters were made for what it wrote
    uint64_t unasked  # how many of those nobody asked for, when the table was last full
    bint survivable  # there are several channels, and what one has lost is done again on the others
    const Op* streak_of  # the transfer that the last posts were of, without another between
    uint32_t streak      # how many there were in a row on the channel that was chosen for it
    uint64_t streak_bytes
    int choice       # the channel that the last post was made on
    bint timed       # channels are measured by the clock, which there is none of in virtual time
    bint round_robin  # channels take turns, whatever they are able to carry
    bint greeting  # the peer may not have looked at our endpoint yet
    bint reached    # a GPU of its may still copy out of memory of ours, of what it took before an endpoint was shut
    bint unsettled  # it may carry out some of what was under way when an endpoint was shut
    PyObject* owner

# How a part is split (a page, or the whole of a single write): `head` plain stripes first, then, when they are over,
# `tail` ones.
cdef struct Split:
    uint64_t head_bytes
    uint64_t head_count
    uint64_t tail_bytes
    uint32_t tail_count

# A user's transfer; a part of one that is done again; the immediates that are sent again (recovery.pyx).
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
    const uint8_t* ranks  # how far each rail is from the local memory, 0 the nearest; NULL: all alike
    int pin              # the only rail to use while it is there; -1: any
    int proof            # the channel, counted from 1, that this is to prove, though it carries nothing else yet
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
    uint32_t carried     # the channels, as bits, that a head went over
    uint32_t owed        # of them those that the tail of this part has not gone over yet
    uint64_t outstanding
    uint64_t confirmed
    uint64_t total
    int status
    int provider_errno
    int rail
    # Of a request with a target each for many peers: `parent` of a target, `children` and `child_count` of the request.
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

# Two-sided messages of one peer: a pool of receive slots, and as many credits at the sender (messages.pyx).
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
    # Messages are numbered from 1 on, so that each is taken once whatever becomes of the channel that it came by.
    uint64_t numbered
    uint64_t top
    uint64_t floor       # all up to this one have come
    uint64_t advertised_floor  # and the peer was told so up to this one
    uint64_t peer_floor  # what the peer has told of ours
    uint64_t* seen       # seen[n % slots] is n when message n has come
    Slot* unsure         # sent, and not known to have arrived
    Slot* resend
    bint held            # a new channel was taken, and the peer has not said that it has it, too
    Op* head
    Op* tail

cdef extern from "<errno.h>" nogil:
    const int ECANCELED  # not among the names of libc.errno
