from libc.stdint cimport uint32_t, uint64_t

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
