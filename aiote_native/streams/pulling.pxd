from aiote_native.streams.stream cimport Frame, Stream, Work

cdef bint is_full(const Stream* self, const Frame* frame) noexcept nogil
cdef int open_reference(Stream* self, const Frame* frame) noexcept nogil
cdef void pull_write(Stream* self, const Frame* frame) noexcept nogil
cdef void pull_answer(Stream* self, Work* asked) noexcept nogil
cdef int take_export(Stream* self, const Frame* frame) noexcept nogil
cdef int take_forget(Stream* self, const Frame* frame) noexcept nogil
cdef void move_imports(Stream* self) noexcept nogil
cdef void note_pulls(Stream* self) noexcept nogil
cdef void leave_imports(Stream* self) noexcept nogil
