"""Handles of GPU memory for other processes of this host (sharing.pxd)."""

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

# Each is there or not: a driver without them shares nothing.
cdef struct Functions:
    int (*address_range)(uint64_t* base, size_t* size, uint64_t address) noexcept nogil
    int (*get_handle)(AioteIpcHandle* handle, uint64_t address) noexcept nogil
    int (*open_handle)(uint64_t* address, AioteIpcHandle handle, unsigned int flags) noexcept nogil
    int (*close_handle)(uint64_t address) noexcept nogil

cdef Functions ipc
cdef bint found = False
cdef Export* own_exports = NULL


cdef str find_functions():
    """Find the driver's functions; return the name of one that it lacks, or an empty string."""
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
    """Find the allocation, or the one segment, that an address lies in."""
    return ipc.address_range(base, size, address)


cdef str whole_allocation(uint64_t address, size_t length, Export* made):
    """Ask for the handle of the one allocation that memory lies in; say why there is none, or nothing."""
    cdef AioteIpcHandle handle
    cdef size_t size = 0
    cdef int code
    checked(ipc.address_range(&made.base, &size, address), "cuMemGetAddressRange")
    if length > size - (address - made.base):
        return "it spans several allocations, and a handle of cuIpcGetMemHandle is of one"
    checked(cuda.pointer_attribute(&made.buffer, BUFFER_ID, made.base), "cuPointerGetAttribute(BUFFER_ID)")
    code = ipc.get_handle(&handle, made.base)
    if code:
        return f"cuIpcGetMemHandle: {described(code)}"
    made.handle.size = size
    memcpy(made.handle.bytes, &handle, HANDLE_BYTES)
    return ""


cdef int export_memory(void* context, uint64_t address, size_t length, Export* made) except -1:
    """Ask the driver for the handle of what memory lies in. Raises StatusError where other processes cannot have it.

    Of segments it lists which they are, and the socket's name is to be filled in.
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
    """Have other engines of this process find what was exported."""
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
    """Find what this process has exported itself. What a peer says of it is not believed, but looked up."""
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
    """Open an allocation of which the driver has made the handle."""
    cdef AioteIpcHandle handle
    cdef uint64_t base = 0
    cdef size_t size = 0
    cdef int code
    memcpy(&handle, self.handle.bytes, HANDLE_BYTES)
    code = ipc.open_handle(&self.address, handle, LAZY_PEER_ACCESS)
    # How much of it is there is the driver's to say: a peer may say more.
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
    # What a broken context says is no error: the mapping has gone with it. A call that failed by chance is made again.
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
    """Begin to open it; `import_state` says when that is over."""
    self.own = is_own(self)
    self.socket = -1
    if not self.own and self.handle.segments:
        # Here, and not in the thread: whoever shuts the channel wakes the thread by it.
        self.socket = aiote_named_socket()
        self.code = -errno if self.socket < 0 else 0
    if self.own:
        aiote_set_state(&self.state, OPEN)
    elif self.code:
        aiote_set_state(&self.state, FAILED)
    else:
        begin(self, OPENING, run_open)


cdef void import_close(Import* self) noexcept nogil:
    """Begin to close what is open; no copy from it is under way."""
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
    """Tell how far it is; one whose thread has said its last is without one then."""
    cdef int state = aiote_state(&self.state)
    if self.threaded and state != OPENING and state != CLOSING:
        join(self)
    return state


cdef bint import_lives(Import* self) noexcept nogil:
    """Whether what this process has exported itself still is: a peer may have kept the token beyond that."""
    return not self.own or is_own(self)


cdef void import_end(Import* self) noexcept nogil:
    """Wait for its thread, and close what is open. No copy from it is under way."""
    if self.threaded:
        if self.socket >= 0:
            # A peer that is stopped answers nothing: it is not waited for.
            shutdown(self.socket, SHUT_RDWR)
        join(self)
    if aiote_state(&self.state) == OPEN and not self.own:
        run_close(self)
