"""libcuda.so.1, opened with dlopen at the first use of GPU memory; a process without GPU memory never loads it.

No call depends on the context that is current in the calling thread. Each group of calls pushes the memory's context,
sets the thread's capture mode to relaxed, and restores both at its end. Without the context, a call from a thread of
aiote's own ends with error 3 or 201. Without the relaxed mode, querying a stream invalidates a CUDA graph that another
thread is capturing.
"""

from libc.errno cimport EIO, ENOSYS
from libc.stdint cimport uint64_t
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen, dlsym

from aiote_native.status import StatusError

cdef enum:
    FUNCTIONS = 26
    OLDEST = 12000  # the driver of CUDA 12.0 (R525)
    RELAXED = 2     # CU_STREAM_CAPTURE_MODE_RELAXED
    POINTER_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT
    POINTER_DEVICE = 9   # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

cdef extern from * nogil:
    """
    /* In the order of the members of Symbols (driver.pxd), which `load` fills as an array. */
    static const char* const aiote_cuda_names[] = {
        "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuPointerGetAttribute",
        "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuMemHostAlloc",
        "cuMemFreeHost", "cuMemHostGetDevicePointer_v2", "cuMemcpyAsync", "cuStreamCreate", "cuStreamDestroy_v2",
        "cuStreamQuery", "cuStreamWriteValue32_v2", "cuStreamIsCapturing", "cuEventCreate", "cuEventDestroy_v2",
        "cuEventRecord", "cuEventQuery", "cuMemAlloc_v2", "cuMemFree_v2",
    };
    """
    const char* aiote_cuda_names[26]

cdef Symbols cuda
cdef bint loaded = False
cdef void* opened = NULL


def load(str path="libcuda.so.1") -> None:
    """Open the driver until the process ends; idempotent. Raises StatusError that says what is missing."""
    global cuda, loaded, opened
    cdef Symbols table
    cdef void** function = <void**> &table
    cdef int version = 0
    cdef int i
    if loaded:
        return
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise StatusError(ENOSYS, "open the CUDA driver", (<bytes> dlerror()).decode("utf-8", "replace"))
    for i in range(FUNCTIONS):
        function[i] = dlsym(library, aiote_cuda_names[i])
        if function[i] == NULL:
            dlclose(library)
            raise too_old(f"{path} has no {aiote_cuda_names[i].decode()}")
    if table.version(&version) or version < OLDEST:
        raise too_old(f"{path} is the driver of CUDA {version // 1000}.{version % 1000 // 10}")
    cuda = table
    opened = library
    checked(cuda.init(0), "cuInit")
    loaded = True


cdef object too_old(str what):
    return StatusError(ENOSYS, "open the CUDA driver", f"{what}; install the driver of CUDA 12.0 (R525) or later")


cdef void* symbol(const char* name) noexcept:
    """Return a function that not every driver has, or NULL if this driver lacks it or is not open."""
    return NULL if opened == NULL else dlsym(opened, name)


def is_loaded() -> bool:
    """Return whether the driver is open."""
    return loaded


cdef str described(int code):
    cdef const char* name = NULL
    cdef const char* text = NULL
    cuda.error_name(code, &name)
    cuda.error_text(code, &text)
    if name == NULL or text == NULL:
        return f"CUDA error {code}"
    return f"{name.decode()}: {text.decode()}"


cdef int checked(int code, str operation) except -1:
    """Raise StatusError with the driver's name of the error, if `code` is not 0."""
    if code:
        raise StatusError(EIO, operation, described(code))
    return 0


cdef int enter(void* context, int* mode) noexcept nogil:
    """Begin a group of calls in a context; return 0, or the driver's code without beginning a group."""
    cdef int code = cuda.push_context(context)
    if code == 0:
        mode[0] = RELAXED
        code = cuda.exchange_capture_mode(mode)
        if code:
            cuda.pop_context(&context)
    return code


cdef void leave(int mode) noexcept nogil:
    """End a group of calls that `enter` began. A failed call is repeated, because the failure may be transient."""
    cdef void* context = NULL
    if cuda.exchange_capture_mode(&mode):
        cuda.exchange_capture_mode(&mode)
    if cuda.pop_context(&context):
        cuda.pop_context(&context)


def error_of(int code) -> str:
    """Describe one of the driver's codes."""
    return described(code)


def device_of(uint64_t address) -> int:
    """Return the ordinal of the device whose memory is at an address. Raises StatusError if it is no GPU memory."""
    cdef int device = -1
    checked(cuda.pointer_attribute(&device, POINTER_DEVICE, address), "cuPointerGetAttribute(DEVICE_ORDINAL)")
    return device


cdef void* retain(int device, uint64_t address, bint* primary) except NULL:
    """Return the context for GPU memory: its device's primary context if that is active, else the memory's own.

    `primary` says whether it is the primary one, which is then retained until the caller releases it. An inactive
    primary context is not created, because it would take hundreds of megabytes of that GPU. Raises StatusError.
    """
    cdef void* context = NULL
    cdef unsigned int flags = 0
    cdef int active = 0
    checked(cuda.primary_state(device, &flags, &active), "cuDevicePrimaryCtxGetState")
    primary[0] = active != 0
    if active:
        checked(cuda.primary_retain(&context, device), "cuDevicePrimaryCtxRetain")
    else:
        checked(cuda.pointer_attribute(&context, POINTER_CONTEXT, address), "cuPointerGetAttribute(CONTEXT)")
    if context == NULL:
        raise StatusError(EIO, "find the context of GPU memory", "its device has no active context")
    return context
