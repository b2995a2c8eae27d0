from aiote_native.progress cimport Progress

cdef dict counted(Progress* engine)
