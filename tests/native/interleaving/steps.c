/* Preloaded: makes each of these calls of the progress loop a place where the other side may run.
 * The timer is never set, so that it covers up no wake-up that was lost. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

void (*aiote_step)(void) = NULL;

static void step(void) {
    if (aiote_step != NULL) aiote_step();
}

ssize_t read(int fd, void* buffer, size_t length) {
    step();
    ssize_t got = syscall(SYS_read, fd, buffer, length);
    step();
    return got;
}

ssize_t write(int fd, const void* buffer, size_t length) {
    step();
    ssize_t put = syscall(SYS_write, fd, buffer, length);
    step();
    return put;
}

ssize_t recv(int fd, void* buffer, size_t length, int flags) {
    step();
    ssize_t got = syscall(SYS_recvfrom, fd, buffer, length, flags, NULL, NULL);
    step();
    return got;
}

ssize_t send(int fd, const void* buffer, size_t length, int flags) {
    step();
    ssize_t put = syscall(SYS_sendto, fd, buffer, length, flags, NULL, 0);
    step();
    return put;
}

int timerfd_settime(int fd, int flags, const struct itimerspec* value, struct itimerspec* old) {
    if (aiote_step == NULL) return syscall(SYS_timerfd_settime, fd, flags, value, old);
    step();
    return 0;
}
