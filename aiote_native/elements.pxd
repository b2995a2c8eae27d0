cdef int get_view(object obj, Py_buffer* view) except -1
cdef int refuse_mask(object obj) except -1
cpdef int check_elements(object obj, str format) except -1
