from aiote_native.structs cimport Completion

cdef int stream_poll(void* impl, Completion* out, int capacity) noexcept nogil
