"""Export GPU memory to other processes of this host, and open their exports (sharing.pxd)."""

from libc.errno cimport ENOSYS, errno
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close

import os

from aiote_native.cuda.descriptors cimport aiote_named_socket
from aiote_native.cuda.driver cimport checked, cuda, described, enter, leave, symbol
from aiote_native.cuda.segments cimport find_segment_functions, list_segments, map_segments, unmap_segments
from aiote_native.status import StatusError

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <sys/socket.h>
    typedef struct { char reserved[64]; } AioteIpcHandle;
    static pthread_mutex_t aiote_own_lock = PTHREAD_MUTEX_INITIALIZER;
    #define aiote_state(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define aiote_set_state(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    ctypedef struct AioteIpcHandle:
        char reserved[64]
    ctypedef struct pthread_mutex_t:
        pass
    pthread_mutex_t aiote_own_lock
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int aiote_state(const int*)
    void aiote_set_state(int*, int)
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int shutdown(int, int)
    const int SHUT_RDWR

cdef enum:
    BUFFER_ID = 7            # CU_POINTER_ATTRIBUTE_BUFFER_ID
    LAZY_PEER_ACCESS = 1     # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    NO_THREAD = 2            # CUDA_ERROR_OUT_OF_MEMORY

# In the order of the names in `find_functions`. A driver that lacks one of them shares no memory.
cdef struct Functions:
    int (*address_range)(uint64_t* base, size_t* size, uint64_t address) noexcept nogil
    int (*get_handle)(AioteIpcHandle* handle, uint64_t address) noexcept nogil
    int (*open_handle)(uint64_t* address, AioteIpcHandle handle, unsigned int flags) noexcept nogil
    int (*close_handle)(uint64_t address) noexcept nogil

cdef Functions ipc
cdef bint found = False
cdef Export* own_exports = NULL


cdef str find_functions():
    """Find the driver's functions; return the name of a missing function, or an empty string."""
    global found
    cdef void** function = <void**> &ipc
    cdef bytes name
    if found:
        return ""
    names = (b"cuMemGetAddressRange_v2", b"cuIpcGetMemHandle", b"cuIpcOpenMemHandle_v2", b"cuIpcCloseMemHandle")
    for name in names:
        function[0] = symbol(name)
        if function[0] == NULL:
            return name.decode()
        function += 1
    found = True
    find_segment_functions()
    return ""


cdef int address_range(uint64_t* base, size_t* size, uint64_t address) noexcept nogil:
    """Find the allocation, or the single segment, that an address lies in; return 0 or the driver's code."""
    return ipc.address_range(base, size, address)


cdef str whole_allocation(uint64_t address, size_t length, Export* made):
    """Get the handle of the allocation that some memory lies in; return an empty string, or why there is no handle.

    Raises StatusError if the driver does not know the memory.
    """
    cdef AioteIpcHandle handle
    cdef size_t size = 0
    cdef int code
    checked(ipc.address_range(&made.base, &size, address), "cuMemGetAddressRange")
    if length > size - (address - made.base):
        return "it spans several allocations, but a handle of cuIpcGetMemHandle covers one"
    checked(cuda.pointer_attribute(&made.buffer, BUFFER_ID, made.base), "cuPointerGetAttribute(BUFFER_ID)")
    code = ipc.get_handle(&handle, made.base)
    if code:
        return f"cuIpcGetMemHandle: {described(code)}"
    made.handle.size = size
    memcpy(made.handle.bytes, &handle, HANDLE_BYTES)
    return ""


cdef int export_memory(void* context, uint64_t address, size_t length, Export* made) except -1:
    """Fill in an export of the allocation or the segments that some memory lies in.

    For segments, the caller has to fill in the name of the socket. Raises StatusError if other processes cannot open
    the memory.
    """
    cdef bytes token = os.urandom(TOKEN_BYTES)
    cdef int mode
    missing = "" if found else find_functions()
    if missing:
        raise StatusError(ENOSYS, "share GPU memory", f"the driver has no {missing}")
    checked(enter(context, &mode), "cuCtxPushCurrent")
    try:
        reason = whole_allocation(address, length, made)
        if reason:
            try:
                list_segments(address, length, made)
            except StatusError as error:
                reason = f"{reason}; {error.operation}: {error.strerror}"
                raise StatusError(ENOSYS, "share GPU memory", reason) from None
    finally:
        leave(mode)
    made.context = context
    memcpy(made.handle.token, <const char*> token, TOKEN_BYTES)
    return 0


cdef void publish(Export* made) noexcept nogil:
    """Enter an export in the list in which other engines of this process find it."""
    global own_exports
    pthread_mutex_lock(&aiote_own_lock)
    made.next_own = own_exports
    own_exports = made
    pthread_mutex_unlock(&aiote_own_lock)


cdef void withdraw(Export* made) noexcept nogil:
    global own_exports
    cdef Export** link = &own_exports
    pthread_mutex_lock(&aiote_own_lock)
    while link[0] != NULL and link[0] != made:
        link = &link[0].next_own
    if link[0] != NULL:
        link[0] = made.next_own
    pthread_mutex_unlock(&aiote_own_lock)


cdef bint is_own(Import* self) noexcept nogil:
    """Return whether this process made the export, and take its address and size from there.

    A peer's own statements about it are not trusted.
    """
    cdef Export* made
    pthread_mutex_lock(&aiote_own_lock)
    made = own_exports
    while made != NULL and memcmp(made.handle.token, self.handle.token, TOKEN_BYTES):
        made = made.next_own
    if made != NULL:
        self.address = made.base
        self.handle.size = made.handle.size
    pthread_mutex_unlock(&aiote_own_lock)
    return made != NULL


cdef int open_whole(Import* self) noexcept nogil:
    """Open an allocation by the driver's handle; return 0, or an error code."""
    cdef AioteIpcHandle handle
    cdef uint64_t base = 0
    cdef size_t size = 0
    cdef int code
    memcpy(&handle, self.handle.bytes, HANDLE_BYTES)
    code = ipc.open_handle(&self.address, handle, LAZY_PEER_ACCESS)
    # Check the size that the driver tells, because a peer may claim more.
    if code == 0 and (ipc.address_range(&base, &size, self.address) or base != self.address
                      or size < self.handle.size):
        ipc.close_handle(self.address)
        code = 1
    return code


cdef void* run_open(void* argument) noexcept nogil:
    cdef Import* self = <Import*> argument
    cdef int mode
    cdef int code = enter(self.gpu.back.context, &mode) if found else -ENOSYS
    if code == 0:
        code = map_segments(self) if self.handle.segments else open_whole(self)
        leave(mode)
    self.code = code
    aiote_set_state(&self.state, FAILED if code else OPEN)
    return NULL


cdef void* run_close(void* argument) noexcept nogil:
    cdef Import* self = <Import*> argument
    cdef int mode
    # Errors are ignored: a broken context has lost its mappings anyway. A failed call is repeated, because the failure
    # may be transient.
    if enter(self.gpu.back.context, &mode) == 0:
        if self.handle.segments:
            unmap_segments(self)
        elif ipc.close_handle(self.address):
            ipc.close_handle(self.address)
        leave(mode)
    aiote_set_state(&self.state, CLOSED)
    return NULL


cdef void begin(Import* self, int state, void* (*run)(void*) noexcept nogil) noexcept nogil:
    aiote_set_state(&self.state, state)
    self.threaded = pthread_create(&self.thread, NULL, run, self) == 0
    if not self.threaded and state == OPENING:
        self.code = NO_THREAD
        aiote_set_state(&self.state, FAILED)
    elif not self.threaded:
        run(self)


cdef void import_open(Import* self) noexcept nogil:
    """Begin to open an import; `import_state` tells when it is open or has failed."""
    self.own = is_own(self)
    self.socket = -1
    if not self.own and self.handle.segments:
        # The socket is made here, not in the thread, because shutting the channel uses it to wake the thread.
        self.socket = aiote_named_socket()
        self.code = -errno if self.socket < 0 else 0
    if self.own:
        aiote_set_state(&self.state, OPEN)
    elif self.code:
        aiote_set_state(&self.state, FAILED)
    else:
        begin(self, OPENING, run_open)


cdef void import_close(Import* self) noexcept nogil:
    """Begin to close an open import. No copy from it may be in flight."""
    if self.own:
        aiote_set_state(&self.state, CLOSED)
    else:
        begin(self, CLOSING, run_close)


cdef void join(Import* self) noexcept nogil:
    pthread_join(self.thread, NULL)
    self.threaded = False
    if self.socket >= 0:
        close(self.socket)
        self.socket = -1


cdef int import_state(Import* self) noexcept nogil:
    """Return the state of an import; join its thread if that has finished."""
    cdef int state = aiote_state(&self.state)
    if self.threaded and state != OPENING and state != CLOSING:
        join(self)
    return state


cdef bint import_lives(Import* self) noexcept nogil:
    """Return whether an import still exists: an export of this process may have ended while a peer kept its token."""
    return not self.own or is_own(self)


cdef void import_end(Import* self) noexcept nogil:
    """Wait for the thread of an import, and close the import if it is open. No copy from it may be in flight."""
    if self.threaded:
        if self.socket >= 0:
            # Do not wait for the peer, which may be stopped.
            shutdown(self.socket, SHUT_RDWR)
        join(self)
    if aiote_state(&self.state) == OPEN and not self.own:
        run_close(self)
