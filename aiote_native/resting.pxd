from aiote_native.structs cimport Channel, Worklists

cdef int announce(int epoll_fd, Channel* channel) noexcept nogil
cdef void look_for_stirred(int epoll_fd) noexcept nogil
cdef void look_at_rings(Worklists* lists, bint every) noexcept nogil
cdef int arm(Channel* channel, bint many) noexcept nogil
cdef bint goes_on(Channel* channel) noexcept nogil
