cdef int get_view(object obj, Py_buffer* view) except -1
cpdef int refuse_pointers(object obj, str format) except -1
