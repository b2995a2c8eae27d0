from aiote_native.progress cimport Progress

cdef void forget_descriptors(Progress* self) noexcept nogil
cdef int open_descriptors(Progress* self, bint idle_thread) except -1
cdef void close_descriptors(Progress* self) noexcept
cdef int descriptor_of_loop(const Progress* self) noexcept nogil
cdef int add_descriptor(int epoll_fd, int fd) noexcept nogil
cdef int watch_descriptor(int epoll_fd, int fd) except -1
cdef void unwatch_descriptor(int epoll_fd, int fd) noexcept nogil
cdef void sleep_on(int epoll_fd) noexcept nogil
