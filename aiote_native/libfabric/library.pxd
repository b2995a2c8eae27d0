from libc.stdint cimport uint32_t, uint64_t

from aiote_native.libfabric.fabric cimport fi_fabric_attr, fi_info, fid_fabric

ctypedef int (*getinfo_function)(uint32_t, const char*, const char*, uint64_t, const fi_info*,
                                 fi_info**) noexcept nogil

cdef struct Symbols:
    getinfo_function getinfo
    void (*freeinfo)(fi_info*) noexcept nogil
    fi_info* (*dupinfo)(const fi_info*) noexcept nogil
    int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) noexcept nogil
    uint32_t (*version)() noexcept nogil

cdef Symbols* symbols() except NULL
