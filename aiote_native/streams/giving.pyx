"""A thread that gives peers the file descriptors of exported GPU memory (cuda/segments.pyx).

The thread sleeps until a process connects. That process must be of the same user and must know an export's token, which
only peers are told, over their channels. A device starts the thread with its first export of such memory, and ends it
when the device is closed.
"""

from libc.errno cimport EACCES, EAGAIN, errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close, usleep

import os

from aiote_native.cuda.descriptors cimport (
    AioteBatch, AioteRequest, BATCH, SOCKET_NAME, aiote_answer, aiote_hear, aiote_named_socket, aiote_next, aiote_offer)
from aiote_native.cuda.segments cimport export_batch
from aiote_native.cuda.sharing cimport Export, TOKEN_BYTES
from aiote_native.status cimport check
from aiote_native.streams.lending cimport leave_export
from aiote_native.streams.stream cimport pthread_mutex_lock, pthread_mutex_unlock

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <sys/socket.h>
    """
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int shutdown(int, int)
    const int SHUT_RDWR

cdef enum:
    PAUSE_US = 10_000


cdef Export* take_export(Giver* self, const AioteRequest* request) noexcept nogil:
    """Return the export with a request's token, or NULL; its owner does not free it before `leave_export`."""
    cdef Export* made
    pthread_mutex_lock(&self.registry.lock)
    made = self.registry.exports
    while made != NULL and memcmp(made.handle.token, request.token, TOKEN_BYTES):
        made = made.next
    if made != NULL and (made.uses == 0 or request.first >= made.handle.segments):
        made = NULL
    if made != NULL:
        made.known += 1
    pthread_mutex_unlock(&self.registry.lock)
    return made


cdef void serve(Giver* self, int asking) noexcept nogil:
    """Answer the requests of one connection until it ends."""
    cdef int[BATCH] descriptors
    cdef AioteRequest request
    cdef AioteBatch batch
    cdef Export* made
    cdef uint64_t i
    cdef bint sent = True
    while sent and aiote_hear(asking, &request):
        made = take_export(self, &request)
        if made == NULL:
            batch.code, batch.count = -EACCES, 0
        else:
            export_batch(made, request.first, &batch, descriptors)
        sent = aiote_answer(asking, &batch, descriptors)
        for i in range(batch.count):
            close(descriptors[i])
        if made != NULL:
            pthread_mutex_lock(&self.registry.lock)
            leave_export(self.registry, made)
            pthread_mutex_unlock(&self.registry.lock)


cdef bint attend(Giver* self, int asking) noexcept nogil:
    """Record the connection being served, so that `stop_giving` can shut it; return False if the thread has to end."""
    cdef bint goes_on
    pthread_mutex_lock(&self.registry.lock)
    self.asking = asking
    goes_on = not self.ended
    pthread_mutex_unlock(&self.registry.lock)
    return goes_on


cdef void* run(void* argument) noexcept nogil:
    cdef Giver* self = <Giver*> argument
    cdef int asking
    while True:
        asking = aiote_next(self.listener)
        if asking >= 0 and attend(self, asking):
            serve(self, asking)
        if not attend(self, -1):
            break
        if asking >= 0:
            close(asking)
        else:
            usleep(PAUSE_US)
    if asking >= 0:
        close(asking)
    return NULL


cdef Giver* start_giving(Registry* registry) except NULL:
    """Start the thread. Raises StatusError and MemoryError."""
    cdef bytes name = os.urandom(SOCKET_NAME // 2).hex().encode()
    cdef Giver* self = <Giver*> calloc(1, sizeof(Giver))
    cdef int code
    if self == NULL:
        raise MemoryError
    self.registry = registry
    self.asking = -1
    memcpy(self.name, <const char*> name, SOCKET_NAME)
    self.listener = aiote_named_socket()
    code = -errno if self.listener < 0 else aiote_offer(self.listener, self.name)
    if code == 0 and pthread_create(&self.thread, NULL, run, self):
        code = -EAGAIN
    if code:
        if self.listener >= 0:
            close(self.listener)
        free(self)
        check(code, "offer descriptors of GPU memory")
    return self


cdef void stop_giving(Giver* self) noexcept:
    """End the thread, even while it waits for a connection or a request, and free it."""
    with nogil:
        pthread_mutex_lock(&self.registry.lock)
        self.ended = True
        shutdown(self.listener, SHUT_RDWR)
        if self.asking >= 0:
            shutdown(self.asking, SHUT_RDWR)
        pthread_mutex_unlock(&self.registry.lock)
    with nogil:
        pthread_join(self.thread, NULL)
    close(self.listener)
    free(self)
