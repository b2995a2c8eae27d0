from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

# The functions of libcuda.so.1 that aiote uses. An exported name without a version suffix is the function's oldest ABI.
cdef struct Symbols:
    int (*init)(unsigned int flags) noexcept nogil
    int (*version)(int* number) noexcept nogil
    int (*error_name)(int code, const char** text) noexcept nogil
    int (*error_text)(int code, const char** text) noexcept nogil
    int (*pointer_attribute)(void* out, int attribute, uint64_t address) noexcept nogil
    int (*primary_state)(int device, unsigned int* flags, int* active) noexcept nogil
    int (*primary_retain)(void** context, int device) noexcept nogil
    int (*primary_release)(int device) noexcept nogil
    int (*push_context)(void* context) noexcept nogil
    int (*pop_context)(void** context) noexcept nogil
    int (*exchange_capture_mode)(int* mode) noexcept nogil
    int (*host_alloc)(void** pages, size_t length, unsigned int flags) noexcept nogil
    int (*host_free)(void* pages) noexcept nogil
    int (*host_address)(uint64_t* address, void* pages, unsigned int flags) noexcept nogil
    int (*copy)(uint64_t to, uint64_t source, size_t length, void* stream) noexcept nogil
    int (*stream_create)(void** stream, unsigned int flags) noexcept nogil
    int (*stream_destroy)(void* stream) noexcept nogil
    int (*stream_query)(void* stream) noexcept nogil
    int (*stream_write)(void* stream, uint64_t address, uint32_t value, unsigned int flags) noexcept nogil
    int (*stream_is_capturing)(void* stream, int* status) noexcept nogil
    int (*event_create)(void** event, unsigned int flags) noexcept nogil
    int (*event_destroy)(void* event) noexcept nogil
    int (*event_record)(void* event, void* stream) noexcept nogil
    int (*event_query)(void* event) noexcept nogil
    int (*allocate)(uint64_t* address, size_t length) noexcept nogil
    int (*free)(uint64_t address) noexcept nogil

cdef enum:
    NOT_READY = 600

cdef Symbols cuda  # only for code that knows that the library is loaded, such as the owner of a queue of copies
cdef str described(int code)
cdef void* symbol(const char* name) noexcept
cdef int checked(int code, str operation) except -1
cdef int enter(void* context, int* mode) noexcept nogil
cdef void leave(int mode) noexcept nogil
cdef void* retain(int device, uint64_t address, bint* primary) except NULL
cdef void release_primary(int device) noexcept nogil
cdef void free_pinned(void* pages) noexcept nogil

cdef enum:
    HELD_MOST = 8  # events that one transfer waits for: one for each device that its memory is on

# A point in a stream: an event behind the work that the stream had when the event was recorded.
cdef struct StreamPoint:
    void* context
    void* stream
    void* event
    bint passed

# The stream points that one transfer waits for; requests/operations.pyx keeps a list of these.
cdef struct Hold:
    Hold* prev
    Hold* next
    void* op
    bint linked
    int count
    int first    # the first point that is not passed
    int error    # the driver's code if the points cannot be passed any more
    StreamPoint[HELD_MOST] points

cdef class EventPool:
    cdef void* context
    cdef readonly int device
    cdef bint primary
    cdef bint opened
    cdef uint64_t epoch
    cdef list spare
    cdef int take(self, void** event) except -1  # returns the driver's code
    cdef int record(self, uint64_t stream, StreamPoint* point) except -1  # returns the driver's code
    cdef void give(self, void* event) noexcept

cdef int hold_state(Hold* self) noexcept nogil

cdef int flush_writes(void* context) noexcept nogil

# Copies between a GPU and pinned slots. Each pair of a device and a rail has one queue in each direction.
#
# A queue has a stream of its own, which waits for no other, so its copies end in the order in which they were posted.
# Behind each group of copies, the GPU writes the group's number to a word of pinned memory. Checking for the end of a
# copy therefore takes one load and no lock of the driver. After an error of the context, the GPU writes no more
# numbers; `queue_look` detects that.
#
# A call that posts to a full stream blocks until the GPU has done something. Before posting, the owner of a queue
# therefore asks whether there is room.

cdef enum:
    SLOT_BYTES = 256 * 1024
    LEAST_SLOTS = 16
    MOST_SLOTS = 256
    GROUPS = 256  # more than there are groups in flight, because each has an entry of the stream

cdef struct CopyQueue:
    void* context
    void* stream
    uint32_t* word
    uint64_t word_address  # the word's address on the GPU
    uint8_t* slots
    int slot_count
    uint16_t[MOST_SLOTS] free
    int free_count
    # slots that the GPU may still read, in the order of the numbers behind their copies
    uint16_t[MOST_SLOTS] busy
    uint32_t[MOST_SLOTS] busy_until
    int busy_first
    int busy_count
    uint32_t posted        # the number behind the last copy
    uint32_t cleared       # the last number whose entries are not counted in `entries` any more
    int entries            # of the stream: copies and numbers of the groups after `cleared`
    uint8_t[GROUPS] sizes  # the entries of each of these groups
    int begun              # copies of the group that is being posted
    int error              # the driver's code if the device is broken: no copy proceeds any more
    int mode

cdef struct GpuQueues:
    CopyQueue out
    CopyQueue back

cdef class CopyQueues:
    cdef GpuQueues* queues
    cdef int device
    cdef bint primary
    cdef uint64_t epoch
    cdef int open_queue(self, CopyQueue* queue, void* context, int slot_count) except -1
    cdef void close_queue(self, CopyQueue* queue) noexcept

cdef int queue_take(CopyQueue* self) noexcept nogil
cdef void queue_give(CopyQueue* self, int slot) noexcept nogil
cdef void queue_give_behind(CopyQueue* self, int slot) noexcept nogil
cdef uint8_t* slot_at(const CopyQueue* self, int slot) noexcept nogil
cdef bint queue_has_room(CopyQueue* self, int copies, int groups) noexcept nogil
cdef int queue_in_hand(const CopyQueue* self) noexcept nogil
cdef int queue_begin(CopyQueue* self) noexcept nogil
cdef int queue_copy(CopyQueue* self, void* to, const void* source, size_t length) noexcept nogil
cdef uint32_t queue_end(CopyQueue* self) noexcept nogil
cdef int queue_state(const CopyQueue* self, uint32_t number) noexcept nogil
cdef void queue_look(CopyQueue* self) noexcept nogil
cdef void queue_wait(CopyQueue* self, uint32_t number) noexcept nogil
