# Passing file descriptors of GPU memory between processes, over a Unix socket with an abstract name. This needs neither
# rights to the other process nor a common PID namespace. The receiver asks for one batch at a time, so that few
# descriptors are in flight: the kernel counts those against the sender's limit of open files.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef enum:
    BATCH = 64
    SOCKET_NAME = 32

cdef extern from *:
    """
    #include <errno.h>
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/socket.h>
    #include <sys/time.h>
    #include <sys/un.h>
    #include <unistd.h>
    enum { AIOTE_BATCH = 64, AIOTE_NAME = 32 };
    typedef struct {
        int32_t code; /* not 0: the driver's code or -errno, and no more descriptors follow */
        uint32_t count;
        uint64_t sizes[AIOTE_BATCH];
    } AioteBatch;
    typedef struct {
        uint8_t token[16];
        uint64_t first;
    } AioteRequest;
    /* Limit each wait to 5 seconds, because the other process may be stopped. */
    static void aiote_patience(int fd) {
        struct timeval time = {.tv_sec = 5};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
    }
    static inline int aiote_named_socket(void) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); }
    static socklen_t aiote_socket_name(struct sockaddr_un* to, const uint8_t* name) {
        memset(to, 0, sizeof(*to));
        to->sun_family = AF_UNIX;
        memcpy(to->sun_path + 1, name, AIOTE_NAME);
        return offsetof(struct sockaddr_un, sun_path) + 1 + AIOTE_NAME;
    }
    static inline int aiote_offer(int fd, const uint8_t* name) {
        struct sockaddr_un own;
        socklen_t length = aiote_socket_name(&own, name);
        return bind(fd, (struct sockaddr*)&own, length) || listen(fd, 64) ? -errno : 0;
    }
    static inline int aiote_meet(int fd, const uint8_t* name) {
        struct sockaddr_un theirs;
        socklen_t length = aiote_socket_name(&theirs, name);
        aiote_patience(fd);
        return connect(fd, (struct sockaddr*)&theirs, length) ? -errno : 0;
    }
    /* Accept the next connection from a process of this user; -1: another user's, or the socket was shut. */
    static inline int aiote_next(int fd) {
        struct ucred who = {0};
        socklen_t length = sizeof(who);
        int asking = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        if (asking < 0) return -1;
        if (getsockopt(asking, SOL_SOCKET, SO_PEERCRED, &who, &length) || who.uid != geteuid()) {
            close(asking);
            return -1;
        }
        aiote_patience(asking);
        return asking;
    }
    static inline int aiote_hear(int fd, AioteRequest* request) {
        return recv(fd, request, sizeof(*request), 0) == (ssize_t)sizeof(*request);
    }
    static inline int aiote_answer(int fd, const AioteBatch* batch, const int* descriptors) {
        union { char bytes[CMSG_SPACE(AIOTE_BATCH * sizeof(int))]; struct cmsghdr head; } control;
        struct iovec data = {(void*)batch, sizeof(*batch)};
        struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
        memset(&control, 0, sizeof(control));
        if (batch->count) {
            message.msg_control = &control;
            message.msg_controllen = CMSG_SPACE(batch->count * sizeof(int));
            struct cmsghdr* head = CMSG_FIRSTHDR(&message);
            head->cmsg_level = SOL_SOCKET;
            head->cmsg_type = SCM_RIGHTS;
            head->cmsg_len = CMSG_LEN(batch->count * sizeof(int));
            memcpy(CMSG_DATA(head), descriptors, batch->count * sizeof(int));
        }
        return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(*batch);
    }
    /* Ask for descriptors and return how many came; the caller owns them. Return -errno if the request failed. */
    static inline int aiote_ask(int fd, const AioteRequest* request, AioteBatch* batch, int* descriptors) {
        union { char bytes[CMSG_SPACE(AIOTE_BATCH * sizeof(int))]; struct cmsghdr head; } control;
        struct iovec data = {batch, sizeof(*batch)};
        struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
                                 .msg_controllen = sizeof(control)};
        int count = 0;
        if (send(fd, request, sizeof(*request), MSG_NOSIGNAL) < 0) return -errno;
        ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (got < 0) return -errno;
        for (struct cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head))
            if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && !count) {
                count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
                memcpy(descriptors, CMSG_DATA(head), (size_t)count * sizeof(int));
            }
        if (got == (ssize_t)sizeof(*batch) && !(message.msg_flags & MSG_CTRUNC) && (uint32_t)count == batch->count)
            return count;
        while (count) close(descriptors[--count]);
        return message.msg_flags & MSG_CTRUNC ? -EMFILE : got == 0 ? -ECONNRESET : -EPROTO;
    }
    """
    ctypedef struct AioteBatch:
        int32_t code
        uint32_t count
        uint64_t[64] sizes
    ctypedef struct AioteRequest:
        uint8_t[16] token
        uint64_t first
    int aiote_named_socket() noexcept nogil
    int aiote_offer(int fd, const uint8_t* name) noexcept nogil
    int aiote_meet(int fd, const uint8_t* name) noexcept nogil
    int aiote_next(int fd) noexcept nogil
    int aiote_hear(int fd, AioteRequest* request) noexcept nogil
    int aiote_answer(int fd, const AioteBatch* batch, const int* descriptors) noexcept nogil
    int aiote_ask(int fd, const AioteRequest* request, AioteBatch* batch, int* descriptors) noexcept nogil
