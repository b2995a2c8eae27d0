"""libfabric.so.1, opened with dlopen.

The headers that this was built against (1.17) define most of the API inline over ops tables, so only six exported
functions have to be found. They are looked up by the symbol versions of that ABI. A later library exports newer
versions of the same names for larger structures, and its default version would read past the end of aiote's structures.
"""

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen

from aiote_native.status cimport name_errors_with, strerror_function


cdef extern from "<dlfcn.h>" nogil:
    """
    #ifndef _GNU_SOURCE
    #error "dlvsym needs _GNU_SOURCE"
    #endif
    """
    ctypedef struct Dl_info:
        const char* dli_fname
    void* dlvsym(void* handle, const char* symbol, const char* version)
    int dladdr(const void* address, Dl_info* info)

cdef extern from "<stdlib.h>" nogil:
    int setenv(const char* name, const char* value, int overwrite)


cdef Symbols table
cdef void* handle = NULL
cdef str loaded_path = ""


cdef void* find(void* library, bytes name, bytes version) except NULL:
    cdef void* symbol = dlvsym(library, name, version)
    if symbol == NULL:
        raise ImportError(f"it has no symbol {name.decode()}@{version.decode()}: not a libfabric 1.x or 2.x")
    return symbol


cdef Symbols* symbols() except NULL:
    if handle == NULL:
        raise RuntimeError("libfabric is not loaded: call load(path) first")
    return &table


cdef void set_defaults(dict defaults):
    """Set environment variables that the user has not set; libraries read them when they are opened."""
    for name, value in defaults.items():
        setenv(name.encode(), value.encode(), 0)


def probe(str path, dict defaults) -> tuple[str, int, int]:
    """Return the file that `path` resolves to and its (major, minor) version, without initialising or keeping it.

    This must not be called after libibverbs was opened: libraries that come with a libfabric register themselves there,
    and libibverbs would call them after they are unloaded. Keeping the library open instead would link the plug-ins of
    another libfabric to it.

    A bare name is searched for as the dynamic linker does; `defaults` are as in `load`. Raises ImportError with the
    linker's reason.
    """
    cdef bytes encoded = path.encode()
    set_defaults(defaults)
    cdef void* library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
    cdef Dl_info where
    cdef void* symbol
    cdef uint32_t number
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    try:
        symbol = find(library, b"fi_version", b"FABRIC_1.0")
        number = (<uint32_t (*)() noexcept nogil> symbol)()
        found = where.dli_fname.decode() if dladdr(symbol, &where) else path
        return found, number >> 16, number & 0xFFFF
    finally:
        dlclose(library)


def load(str path, dict defaults) -> tuple[int, int]:
    """Open the library at `path` for the life of the process and return its (major, minor) version.

    `defaults` are provider parameters (FI_*). They are set in the environment of the process unless the user has set
    them, because providers read them once, when the library initialises. Loading the same path again does nothing.
    Another path raises RuntimeError, because two copies of libfabric in one process share /dev/shm names and signal
    handlers. Raises ImportError with the linker's reason, or for a library that is not libfabric.
    """
    global handle, loaded_path
    if handle != NULL:
        if path != loaded_path:
            raise RuntimeError(f"libfabric is loaded from {loaded_path} already; load {path} in another process")
        return version()
    cdef bytes encoded = path.encode()
    set_defaults(defaults)
    cdef void* library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    try:
        table.getinfo = <getinfo_function> find(library, b"fi_getinfo", b"FABRIC_1.3")
        table.freeinfo = <void (*)(fi_info*) noexcept nogil> find(library, b"fi_freeinfo", b"FABRIC_1.3")
        table.dupinfo = <fi_info* (*)(const fi_info*) noexcept nogil> find(library, b"fi_dupinfo", b"FABRIC_1.3")
        table.fabric = <int (*)(fi_fabric_attr*, fid_fabric**, void*) noexcept nogil> (
            find(library, b"fi_fabric", b"FABRIC_1.1"))
        table.version = <uint32_t (*)() noexcept nogil> find(library, b"fi_version", b"FABRIC_1.0")
        name_errors_with(<strerror_function> find(library, b"fi_strerror", b"FABRIC_1.0"))
    except BaseException:
        dlclose(library)
        raise
    handle = library
    loaded_path = path
    return version()


def version() -> tuple[int, int]:
    """Return the loaded library's (major, minor) version."""
    cdef uint32_t number = symbols().version()
    return number >> 16, number & 0xFFFF


def path() -> str:
    """Return the path that the library was loaded from, or an empty string."""
    return loaded_path
