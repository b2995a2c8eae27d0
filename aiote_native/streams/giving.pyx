"""A thread that gives peers the descriptors of GPU memory that they were told of (cuda/segments.pyx).

It sleeps until somebody asks, who has to be of this user and to know an export's token: only peers were told it, over
their channel. A device has one from its first export of such memory until it is closed.
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
    """Find what a token names, and keep it: its owner frees nothing before it is let go."""
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
    """Answer one who asks, until it has hung up."""
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
    """Say whom the thread serves, for who ends it; False where it is to end."""
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
    """Begin to answer. Raises StatusError, and MemoryError."""
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
    """End the thread, whatever it waits for."""
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
