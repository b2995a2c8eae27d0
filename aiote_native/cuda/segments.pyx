"""Sharing memory of `cuMemCreate` between processes: one file descriptor for each segment, mapped side by side.

Torch with expandable segments has one segment for each 2 or 20 MiB, so a tensor may lie in thousands of them. The owner
makes descriptors when a peer asks for them, and closes them when they are sent, because all of them together could
exceed the number of files that a process may have open.
"""

from libc.errno cimport ENOMEM, ENOSYS
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close

from aiote_native.cuda.descriptors cimport AioteRequest, BATCH, aiote_ask, aiote_meet
from aiote_native.cuda.driver cimport checked, cuda, enter, leave, symbol
from aiote_native.cuda.sharing cimport Segment, TOKEN_BYTES, address_range
from aiote_native.status import StatusError

cdef enum:
    POSIX_DESCRIPTOR = 1     # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    BUFFER_ID = 7            # CU_POINTER_ATTRIBUTE_BUFFER_ID
    ALLOWED_HANDLES = 14     # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    ON_DEVICE = 1            # CU_MEM_LOCATION_TYPE_DEVICE
    READ_AND_WRITE = 3       # CU_MEM_ACCESS_FLAGS_PROT_READWRITE, as other libraries ask for
    INVALID = 1              # CUDA_ERROR_INVALID_VALUE

# CUmemAccessDesc
cdef struct Access:
    int kind
    int device
    int flags

# In the order of the names in `find_segment_functions`. A driver that lacks one of them shares no such memory.
cdef struct Functions:
    int (*retain)(uint64_t* handle, void* address) noexcept nogil
    int (*give)(void* descriptor, uint64_t handle, int kind, unsigned long long flags) noexcept nogil
    int (*take)(uint64_t* handle, void* descriptor, int kind) noexcept nogil
    int (*release)(uint64_t handle) noexcept nogil
    int (*reserve)(uint64_t* address, size_t size, size_t alignment, uint64_t near,
                   unsigned long long flags) noexcept nogil
    int (*free)(uint64_t address, size_t size) noexcept nogil
    int (*map)(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) noexcept nogil
    int (*unmap)(uint64_t address, size_t size) noexcept nogil
    int (*set_access)(uint64_t address, size_t size, const Access* access, size_t count) noexcept nogil

cdef Functions segments
cdef bint found = False


cdef bint find_segment_functions():
    """Find the driver's functions; return whether it has all of them."""
    global found
    cdef void** function = <void**> &segments
    for name in (b"cuMemRetainAllocationHandle", b"cuMemExportToShareableHandle", b"cuMemImportFromShareableHandle",
                 b"cuMemRelease", b"cuMemAddressReserve", b"cuMemAddressFree", b"cuMemMap", b"cuMemUnmap",
                 b"cuMemSetAccess"):
        function[0] = symbol(name)
        if function[0] == NULL:
            return False
        function += 1
    found = True
    return True


cdef int list_segments(uint64_t address, size_t length, Export* made) except -1:
    """List the segments that some memory lies in, in the current context.

    Raises StatusError if one of them cannot be shared, or if there are more than MOST_SEGMENTS.
    """
    cdef uint64_t allowed, buffer, base = 0
    cdef uint64_t end = address + length
    cdef size_t size = 0
    listed = []
    if not found and not find_segment_functions():
        raise StatusError(ENOSYS, "share segments", "the driver has no cuMemExportToShareableHandle")
    made.buffer = 0
    while not listed or base + size < end:
        checked(address_range(&base, &size, base + size if listed else address), "cuMemGetAddressRange")
        allowed = buffer = 0
        checked(cuda.pointer_attribute(&allowed, ALLOWED_HANDLES, base), "cuPointerGetAttribute(ALLOWED_HANDLE_TYPES)")
        if not allowed & POSIX_DESCRIPTOR:
            raise StatusError(ENOSYS, "share segments", "it was allocated without POSIX_FILE_DESCRIPTOR handles")
        checked(cuda.pointer_attribute(&buffer, BUFFER_ID, base), "cuPointerGetAttribute(BUFFER_ID)")
        # One number identifies all segments. It changes if another segment is mapped at the same address.
        made.buffer = (made.buffer ^ buffer) * <uint64_t> 0x9E3779B97F4A7C15
        listed.append((base, size))
        if len(listed) > MOST_SEGMENTS:
            raise StatusError(ENOSYS, "share segments", f"it lies in more than {MOST_SEGMENTS} segments")
    made.parts = <Segment*> calloc(len(listed), sizeof(Segment))
    if made.parts == NULL:
        raise MemoryError
    for i, (base, size) in enumerate(listed):
        made.parts[i].address, made.parts[i].size = base, size
    made.base = made.parts[0].address
    made.handle.size = base + size - made.base
    made.handle.segments = len(listed)
    return 0


cdef void export_batch(const Export* made, uint64_t first, AioteBatch* batch, int* descriptors) noexcept nogil:
    """Make the descriptors of a batch of segments, from number `first` on; `batch.code` tells of a failure."""
    cdef uint64_t handle = 0
    cdef int mode
    batch.count = 0
    batch.code = enter(made.context, &mode)
    if batch.code:
        return
    while batch.code == 0 and batch.count < BATCH and first + batch.count < made.handle.segments:
        batch.code = segments.retain(&handle, <void*> made.parts[first + batch.count].address)
        if batch.code:
            break
        batch.code = segments.give(&descriptors[batch.count], handle, POSIX_DESCRIPTOR, 0)
        segments.release(handle)
        if batch.code == 0:
            batch.sizes[batch.count] = made.parts[first + batch.count].size
            batch.count += 1
    leave(mode)


cdef int map_one(Import* self, int descriptor, uint64_t size, uint64_t at) noexcept nogil:
    """Map one segment; return 0 or the driver's code.

    If a peer states a wrong size, the driver refuses the mapping, or the sum of all sizes is wrong in the end.
    """
    cdef uint64_t handle = 0
    cdef int code
    if size == 0 or size > self.handle.size - at:
        return INVALID
    code = segments.take(&handle, <void*> <uintptr_t> descriptor, POSIX_DESCRIPTOR)
    if code:
        return code
    code = segments.map(self.address + at, size, 0, handle, 0)
    segments.release(handle)
    if code == 0:
        self.sizes[self.mapped] = size
        self.mapped += 1
    return code


cdef int map_all(Import* self) noexcept nogil:
    cdef int[BATCH] descriptors
    cdef AioteRequest request
    cdef AioteBatch batch
    cdef uint64_t at = 0
    cdef int i, count, code
    memcpy(request.token, self.handle.token, TOKEN_BYTES)
    while self.mapped < self.handle.segments:
        request.first = self.mapped
        count = aiote_ask(self.socket, &request, &batch, descriptors)
        if count <= 0:
            return count if count else batch.code if batch.code else INVALID
        code = 0 if count <= <int64_t> (self.handle.segments - self.mapped) else INVALID
        for i in range(count):
            if code == 0:
                code = map_one(self, descriptors[i], batch.sizes[i], at)
                at += batch.sizes[i]
            close(descriptors[i])
        if code:
            return code
    return 0 if at == self.handle.size else INVALID


cdef int map_segments(Import* self) noexcept nogil:
    """Map the segments whose descriptors a peer gives, in the current context.

    Return 0, or the driver's code or -errno; after a failure, all mappings are undone.
    """
    cdef Access access
    cdef int code = -ENOSYS if not found else aiote_meet(self.socket, self.handle.bytes)
    if code:
        return code
    if self.handle.segments > MOST_SEGMENTS:
        return INVALID
    self.sizes = <uint64_t*> calloc(self.handle.segments, sizeof(uint64_t))
    if self.sizes == NULL:
        return -ENOMEM
    code = segments.reserve(&self.address, self.handle.size, 0, 0, 0)
    if code:
        self.address = 0
    else:
        code = map_all(self)
    if code == 0:
        access.kind, access.device, access.flags = ON_DEVICE, self.device, READ_AND_WRITE
        code = segments.set_access(self.address, self.handle.size, &access, 1)
    if code:
        unmap_segments(self)
    return code


cdef void unmap_segments(Import* self) noexcept nogil:
    """Unmap all segments, in the current context. Errors are ignored: a broken context has lost its mappings anyway.

    A failed call is repeated, because the failure may be transient.
    """
    cdef uint64_t at = 0
    cdef uint64_t i
    if self.address:
        for i in range(self.mapped):
            if segments.unmap(self.address + at, self.sizes[i]):
                segments.unmap(self.address + at, self.sizes[i])
            at += self.sizes[i]
        if segments.free(self.address, self.handle.size):
            segments.free(self.address, self.handle.size)
    self.mapped = 0
    self.address = 0
    free(self.sizes)
    self.sizes = NULL
