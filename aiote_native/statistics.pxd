from aiote_native.progress cimport Progress

cdef dict statistics_of(Progress* engine)
