from libc.stdint cimport uint64_t

from aiote_native.cuda.sharing cimport Export
from aiote_native.streams.stream cimport Frame, Memory, Registry, Stream, Work

cdef uint64_t lent_room(void* impl, const void* desc, uint64_t key) noexcept nogil
cdef int lend(Stream* self, Work* work) noexcept nogil
cdef void reply(Stream* self, int kind, uint64_t number, int status) noexcept nogil
cdef void note_offered(Stream* self, uint64_t number) noexcept nogil
cdef int note_opened(Stream* self, const Frame* frame) noexcept nogil
cdef int note_forgotten(Stream* self, const Frame* frame) noexcept nogil
cdef int note_pulled(Stream* self) noexcept nogil
cdef void withdraw_ended(Stream* self) noexcept nogil
cdef bint is_lent(const Registry* registry, const Memory* memory) noexcept nogil
cdef void leave_export(Registry* registry, Export* exported) noexcept nogil
cdef void let_go(Registry* registry, Export* exported) noexcept nogil
cdef void leave_lent(Stream* self) noexcept nogil
