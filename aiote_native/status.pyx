"""The one function that checks return codes of C.

Every call into a provider or the kernel that can fail goes through `check`: a negative code is -errno. Numbers from 256
on (FI_ERRNO_OFFSET) are libfabric's own, and its library names them; the C library names the others.
"""

from libc.string cimport strerror


cdef strerror_function provider_strerror = NULL


cdef void name_errors_with(strerror_function function):
    """Let the provider's library name the numbers from 256 on."""
    global provider_strerror
    provider_strerror = function


class StatusError(OSError):
    """A call failed: `errno` is positive, `operation` names the call."""

    def __init__(self, errnum: int, operation: str, text: str = ""):
        super().__init__(errnum, text or describe(errnum))
        self.operation = operation

    def __str__(self):
        return f"{self.operation}: {self.strerror} (errno {self.errno})"


cdef str describe(int errnum):
    cdef const char* text = NULL
    if errnum >= 256 and provider_strerror != NULL:
        text = provider_strerror(errnum)
    elif errnum < 256:
        text = strerror(errnum)
    return text.decode("utf-8", "replace") if text != NULL else f"error {errnum}"


cdef int check(long code, str operation) except -1:
    if code < 0:
        raise StatusError(<int> -code, operation)
    return 0


def error_text(int errnum) -> str:
    """Return the text of a positive error number, libfabric's own ones included."""
    return describe(errnum)
