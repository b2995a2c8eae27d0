"""Receive bytes by reference: copy them out of another process's GPU memory (lending.pyx), on a local queue of copies.

A reference is only a number that a peer states, so it is not trusted. When the copies are posted, the receiver looks up
the number among the allocations that this peer has exported, compares the offsets with the size that the driver tells,
and checks the destination as for any write. A write is counted, and an answer is given back, when its copies are over.
"""

from libc.errno cimport EACCES, EINVAL, ENODEV, ENOSPC, EPERM, EPROTO
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.cuda.copies cimport (
    GpuQueues, queue_begin, queue_copy, queue_end, queue_seen, queue_state, queue_wait)
from aiote_native.cuda.sharing cimport (
    CLOSED, FAILED, Import, OPEN, WAITING, import_close, import_end, import_lives, import_open, import_state)
from aiote_native.streams.lending cimport reply
from aiote_native.streams.stream cimport (
    FRAME_FORGOTTEN, FRAME_LENT, FRAME_OPENED, Memory, SHARED_DEVICES, find_memory, is_open)
from aiote_native.structs cimport MAX_SGE

cdef extern from * nogil:
    """
    #define aiote_say(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    """
    void aiote_say(uint64_t*, uint64_t)

cdef enum:
    MOST_IMPORTS = 4096
    MOST_REPLIES = 2 * MOST_IMPORTS
    # Groups of copies in flight on one queue, of at most MAX_SGE copies each. Posting to a full queue of the driver
    # would block; such a queue is said to hold 256 copies.
    MOST_GROUPS = 48


cdef bint is_full(const Stream* self, const Frame* frame) noexcept nogil:
    """Return whether a frame by reference has to wait until earlier copies are over."""
    cdef const Memory* memory
    cdef const GpuQueues* gpu
    if frame.kind == FRAME_LENT:
        gpu = self.unread.head.gpu if self.unread.head != NULL else NULL
    else:
        memory = find_memory(self.registry, frame.key)
        gpu = memory.gpu if memory != NULL else NULL
    return gpu != NULL and gpu.back.error == 0 and gpu.back.posted - queue_seen(&gpu.back) >= MOST_GROUPS


cdef int open_reference(Stream* self, const Frame* frame) noexcept nogil:
    """Receive a reference into its place; return -EPROTO without sharing, or for an answer that no read asked for."""
    cdef const Work* asked = self.unread.head
    if not self.shares or frame.iov_count == 0:
        return -EPROTO
    if frame.kind == FRAME_LENT and (
            asked == NULL or asked.gpu == NULL or asked.frame.imm == 0 or asked.pulled
            or asked.frame.length != frame.length or asked.frame.iov_count != frame.iov_count):
        return -EPROTO
    self.left = (1 + frame.iov_count) * sizeof(uint64_t)
    self.into[0].iov_base = self.reference
    self.into[0].iov_len = self.left
    self.into_count = 1
    return 0


cdef Import* find_import(const Stream* self, uint64_t number) noexcept nogil:
    cdef Import* shared = self.imports
    while shared != NULL and shared.number != number:
        shared = shared.next
    return shared


cdef int pull(Stream* self, GpuQueues* gpu, const Frame* frame, uint8_t** local) noexcept nogil:
    """Post the copies of a reference; return 0 or a negative error number. With -EIO some copies may be in flight."""
    cdef Import* shared = find_import(self, self.reference[0])
    cdef const uint64_t* offset = &self.reference[1]
    cdef int code = 0
    cdef int i
    if (shared == NULL or import_state(shared) != OPEN or shared.forgotten or shared.gpu != gpu
            or not import_lives(shared)):
        return -EINVAL
    for i in range(frame.iov_count):
        if offset[i] > shared.handle.size or frame.iov[i].length > shared.handle.size - offset[i]:
            return -EINVAL
    code = queue_begin(&gpu.back)
    if code:
        return code
    if self.pulling != NULL:
        # Set before the first copy and within the gate, so that the peer knows what to wait for when it shuts the gate.
        aiote_say(self.pulling, 1)
    for i in range(frame.iov_count):
        if code == 0 and frame.iov[i].length:
            code = queue_copy(&gpu.back, local[i], <const uint8_t*> shared.address + offset[i], frame.iov[i].length)
    shared.last = queue_end(&gpu.back)
    return code


cdef void pull_write(Stream* self, const Frame* frame) noexcept nogil:
    """Copy the bytes of a peer's write by reference into memory that its key opens; `status` tells of a failure."""
    cdef uint8_t* local[MAX_SGE]
    cdef const Memory* memory
    cdef int i
    if not is_open(self, frame, True):
        self.status = -EACCES
        return
    memory = find_memory(self.registry, frame.key)
    if memory == NULL or memory.gpu == NULL:
        self.status = 0 if frame.length == 0 else -EINVAL
        return
    for i in range(frame.iov_count):
        local[i] = <uint8_t*> frame.iov[i].address
    self.gpu = memory.gpu
    self.slot = -1
    self.status = pull(self, memory.gpu, frame, local)
    self.number = memory.gpu.back.posted


cdef void pull_answer(Stream* self, Work* asked) noexcept nogil:
    """Copy the bytes of an answer by reference; the read ends after the copies, and then gives the bytes back."""
    asked.status = pull(self, asked.gpu, &asked.frame, asked.local)
    asked.copied = asked.pulled = True
    asked.number = asked.gpu.back.posted


cdef int take_export(Stream* self, const Frame* frame) noexcept nogil:
    """Queue the opening of a peer's export, or reply why it cannot be opened.

    Return -EPROTO for a number that is in use, or if the peer leaves too many replies unread.
    """
    cdef Import* shared
    if find_import(self, frame.key) != NULL or self.replies >= MOST_REPLIES:
        return -EPROTO
    if not self.shares or self.import_count >= MOST_IMPORTS:
        reply(self, FRAME_OPENED, frame.key, -EPERM if not self.shares else -ENOSPC)
        return 0
    shared = <Import*> calloc(1, sizeof(Import))
    if shared == NULL or frame.imm >= SHARED_DEVICES or self.registry.gpus[frame.imm] == NULL:
        free(shared)
        reply(self, FRAME_OPENED, frame.key, -ENODEV)
        return 0
    shared.number = frame.key
    shared.handle = self.handle
    shared.gpu = self.registry.gpus[frame.imm]
    shared.device = <int> frame.imm
    shared.last = shared.gpu.back.posted
    shared.socket = -1
    shared.next = self.imports
    self.imports = shared
    self.import_count += 1
    self.moving += 1
    return 0


cdef int take_forget(Stream* self, const Frame* frame) noexcept nogil:
    """Queue the closing of an import that the peer wants back.

    Return -EPROTO for an import that is not open or is being closed, or if the peer leaves too many replies unread.
    """
    cdef Import* shared = find_import(self, frame.key)
    if shared == NULL or shared.forgotten or import_state(shared) != OPEN or self.replies >= MOST_REPLIES:
        return -EPROTO
    shared.forgotten = True
    self.moving += 1
    return 0


cdef void drop_import(Stream* self, Import* shared) noexcept nogil:
    cdef Import** link = &self.imports
    while link[0] != shared:
        link = &link[0].next
    link[0] = shared.next
    self.import_count -= 1
    free(shared)


cdef void end_moving(Stream* self, Import* shared, int kind, int status) noexcept nogil:
    reply(self, kind, shared.number, status)
    self.moving -= 1
    self.opener = NULL


cdef void begin_moving(Stream* self) noexcept nogil:
    """Open or close the next import; one at a time, so that a peer cannot make this side start many threads."""
    cdef Import* shared = self.imports
    cdef int state
    while shared != NULL and self.opener == NULL:
        state = import_state(shared)
        if state == WAITING:
            self.opener = shared
            import_open(shared)
        elif shared.forgotten and state == OPEN and queue_state(&shared.gpu.back, shared.last):
            self.opener = shared
            import_close(shared)
        shared = shared.next


cdef void move_imports(Stream* self) noexcept nogil:
    """Go on opening and closing imports, and tell the peer of each result."""
    cdef Import* shared = self.opener
    cdef int state
    if self.moving == 0:
        return
    if shared == NULL:
        begin_moving(self)
        shared = self.opener
    if shared == NULL:
        return
    state = import_state(shared)
    if state == OPEN:
        end_moving(self, shared, FRAME_OPENED, 0)
    elif state == FAILED:
        end_moving(self, shared, FRAME_OPENED, shared.code)
        drop_import(self, shared)
    elif state == CLOSED:
        end_moving(self, shared, FRAME_FORGOTTEN, 0)
        drop_import(self, shared)


cdef void note_pulls(Stream* self) noexcept nogil:
    """Tell the peer when no copy out of its memory is in flight any more."""
    cdef const Import* shared = self.imports
    if self.pulling == NULL or self.pulling[0] == 0:
        return
    while shared != NULL:
        if queue_state(&shared.gpu.back, shared.last) == 0:
            return
        shared = shared.next
    aiote_say(self.pulling, 0)


cdef void leave_imports(Stream* self) noexcept nogil:
    """Close the imports of a stream that is shut. The caller holds the registry's lock."""
    cdef Import* shared = self.imports
    cdef Import* following
    self.imports = self.opener = NULL
    self.moving = self.import_count = 0
    while shared != NULL:
        following = shared.next
        queue_wait(&shared.gpu.back, shared.last)
        import_end(shared)
        free(shared)
        shared = following
    if self.pulling != NULL:
        aiote_say(self.pulling, 0)
        self.pulling = NULL
