"""libibverbs.so.1, opened with dlopen: the functions that it exports, in the symbol versions that the headers name."""

from libc.errno cimport EIO, errno
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen

from aiote_native.status cimport check

cdef extern from "<dlfcn.h>" nogil:
    void* dlvsym(void* handle, const char* symbol, const char* version)

cdef enum:
    FUNCTIONS = 29  # in the table

cdef extern from * nogil:
    """
    /* In the order of Symbols. Each version is the first one of that function with today's structures. */
    static const char* const aiote_verbs_names[][2] = {
        {"ibv_get_device_list", "1.1"}, {"ibv_free_device_list", "1.1"}, {"ibv_get_device_name", "1.1"},
        {"ibv_open_device", "1.1"}, {"ibv_close_device", "1.1"}, {"ibv_query_device", "1.1"},
        {"ibv_query_port", "1.1"}, {"ibv_query_gid", "1.1"}, {"ibv_alloc_pd", "1.1"}, {"ibv_dealloc_pd", "1.1"},
        {"ibv_reg_mr", "1.1"}, {"ibv_dereg_mr", "1.1"}, {"ibv_create_comp_channel", "1.0"},
        {"ibv_destroy_comp_channel", "1.0"}, {"ibv_create_cq", "1.1"}, {"ibv_destroy_cq", "1.1"},
        {"ibv_get_cq_event", "1.1"}, {"ibv_ack_cq_events", "1.1"}, {"ibv_create_srq", "1.1"},
        {"ibv_destroy_srq", "1.1"}, {"ibv_create_qp", "1.1"}, {"ibv_modify_qp", "1.1"}, {"ibv_destroy_qp", "1.1"},
        {"ibv_get_async_event", "1.1"}, {"ibv_ack_async_event", "1.1"}, {"ibv_event_type_str", "1.1"},
        {"ibv_wc_status_str", "1.1"}, {"ibv_reg_mr_iova2", "1.8"}, {"ibv_reg_dmabuf_mr", "1.12"},
    };
    """
    const char* aiote_verbs_names[29][2]

cdef enum:
    OPTIONAL = 2  # functions at the end of the table, which an old library may lack

cdef Symbols verbs
cdef void* handle = NULL


cdef Symbols* symbols() except NULL:
    if handle == NULL:
        raise RuntimeError("libibverbs is not loaded: call load() first")
    return &verbs


cdef int failed(str operation, int code=0) except -1:
    """Raise the StatusError of a call that failed with `code`, or with errno if `code` is 0."""
    return check(-(code if code > 0 else errno if errno else EIO), operation)


def load(str path="libibverbs.so.1") -> None:
    """Open the library for the life of the process, unless it is open. Raises ImportError with the linker's reason."""
    global handle
    cdef void** function = <void**> &verbs
    cdef bytes version
    cdef int i
    if handle != NULL:
        return
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    for i in range(FUNCTIONS):
        version = b"IBVERBS_" + aiote_verbs_names[i][1]
        function[i] = dlvsym(library, aiote_verbs_names[i][0], version)
        if function[i] == NULL and i < FUNCTIONS - OPTIONAL:
            dlclose(library)
            raise ImportError(f"{path} has no {aiote_verbs_names[i][0].decode()}@{version.decode()}: not a libibverbs "
                              "of rdma-core")
    handle = library


def event_name(int event) -> str:
    """Return the library's name of an asynchronous event."""
    return symbols().event_type_str(event).decode()


def completion_status(int status) -> str:
    """Return the library's name of the status of a work completion."""
    return symbols().wc_status_str(status).decode()
