/* One transfer at a time between two processes of a host, in plain C: the floor of `make bench-lone`.
 *
 *     lone ring|tcp BYTES REPEATS hot|cold PAUSE_US
 *
 * ring: a header and the bytes go through a ring in shared memory, copied in and out in pieces, by both processes at
 * once; whoever has nothing to do sleeps on an eventfd. tcp: the same over a connection on loopback. Each transfer ends
 * when the other side has said that all is in its memory. hot: the same memory each time; cold: the next of REGION bytes.
 * Prints the times in microseconds, and what the source has spent, as a line of JSON. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REGION = 256 << 20, RING = 2 << 20, PIECE = 64 << 10, WARM = 5 };

struct header {
    uint64_t length, offset;
    char rest[88]; /* 104 bytes in all, as a header of aiote's streams (aiote_native/streams/stream.pxd) */
};

struct line {
    _Alignas(64) _Atomic uint64_t value;
};

struct ring {
    struct line head, tail, done;                    /* bytes put in, bytes taken out, transfers that are over */
    struct line source_sleeps, target_sleeps;
    _Alignas(4096) uint8_t data[RING];
};

static struct ring *ring;
static int wake_source, wake_target, wire;
static uint8_t *memory;

static void die(const char *what) {
    perror(what);
    _exit(1);
}

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void wake(struct line *sleeps, int fd) {
    uint64_t one = 1;
    if (atomic_exchange(&sleeps->value, 0) && write(fd, &one, sizeof(one)) != sizeof(one)) die("write(eventfd)");
}

/* Sleep until woken, unless what is waited for is there by now. */
static void sleep_unless(int ready, struct line *sleeps, int fd) {
    struct pollfd watched = {fd, POLLIN, 0};
    uint64_t value;
    if (!ready) {
        if (poll(&watched, 1, -1) < 0) die("poll");
        if (read(fd, &value, sizeof(value)) < 0 && errno != EAGAIN) die("read(eventfd)");
    }
    atomic_store(&sleeps->value, 0);
}

static void put(const uint8_t *from, uint64_t bytes) {
    while (bytes) {
        uint64_t head = atomic_load(&ring->head.value), room = RING - (head - atomic_load(&ring->tail.value));
        uint64_t part = bytes < PIECE ? bytes : PIECE, at = head % RING;
        if (room == 0) {
            atomic_store(&ring->source_sleeps.value, 1);
            sleep_unless(atomic_load(&ring->tail.value) + RING != head, &ring->source_sleeps, wake_source);
            continue;
        }
        if (part > room) part = room;
        if (part > RING - at) part = RING - at;
        memcpy(ring->data + at, from, part);
        atomic_store(&ring->head.value, head + part);
        wake(&ring->target_sleeps, wake_target);
        from += part;
        bytes -= part;
    }
}

static void take(uint8_t *to, uint64_t bytes) {
    while (bytes) {
        uint64_t tail = atomic_load(&ring->tail.value), here = atomic_load(&ring->head.value) - tail;
        uint64_t part = bytes < PIECE ? bytes : PIECE, at = tail % RING;
        if (here == 0) {
            atomic_store(&ring->target_sleeps.value, 1);
            sleep_unless(atomic_load(&ring->head.value) != tail, &ring->target_sleeps, wake_target);
            continue;
        }
        if (part > here) part = here;
        if (part > RING - at) part = RING - at;
        memcpy(to, ring->data + at, part);
        atomic_store(&ring->tail.value, tail + part);
        if (here - part <= RING / 2) wake(&ring->source_sleeps, wake_source);
        to += part;
        bytes -= part;
    }
}

static void all(int writes, void *at, size_t bytes) {
    while (bytes) {
        ssize_t moved = writes ? send(wire, at, bytes, MSG_NOSIGNAL) : recv(wire, at, bytes, MSG_WAITALL);
        if (moved <= 0) die(writes ? "send" : "recv");
        at = (uint8_t *)at + moved;
        bytes -= moved;
    }
}

static void target(int over_tcp) {
    struct header header;
    for (;;) {
        if (over_tcp) {
            all(0, &header, sizeof(header));
            all(0, memory + header.offset, header.length);
            if (header.length == 0) _exit(0);
            all(1, &header, 1);
        } else {
            take((uint8_t *)&header, sizeof(header));
            if (header.length == 0) _exit(0);
            take(memory + header.offset, header.length);
            atomic_fetch_add(&ring->done.value, 1);
            wake(&ring->source_sleeps, wake_source);
        }
    }
}

static void transfer(int over_tcp, uint64_t number, uint64_t offset, uint64_t bytes) {
    struct header header = {.length = bytes, .offset = offset};
    if (over_tcp) {
        struct iovec parts[2] = {{&header, sizeof(header)}, {memory + offset, bytes}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        size_t sent = 0;
        char answer;
        ssize_t moved = sendmsg(wire, &message, MSG_NOSIGNAL);
        if (moved < 0) die("sendmsg");
        sent = moved;
        if (sent < sizeof(header)) die("a header in pieces");
        all(1, memory + offset + (sent - sizeof(header)), bytes - (sent - sizeof(header)));
        if (bytes) all(0, &answer, 1);
        return;
    }
    put((const uint8_t *)&header, sizeof(header));
    put(memory + offset, bytes);
    while (bytes && atomic_load(&ring->done.value) < number) {
        atomic_store(&ring->source_sleeps.value, 1);
        sleep_unless(atomic_load(&ring->done.value) >= number, &ring->source_sleeps, wake_source);
    }
}

/* Both ends have the option that aiote's `socket` rails set, and the system's congestion control. */
static void connect_tcp(int *ends) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int yes = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, length) || listen(listener, 1)) die("listen");
    if (getsockname(listener, (void *)&address, &length)) die("getsockname");
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ends[0], (void *)&address, length)) die("connect");
    ends[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int i = 0; i < 2; i++)
        if (setsockopt(ends[i], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes))) die("TCP_NODELAY");
}

static double seconds(struct timeval time) {
    return time.tv_sec + time.tv_usec * 1e-6;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: lone ring|tcp BYTES REPEATS hot|cold PAUSE_US\n");
        return 2;
    }
    int over_tcp = strcmp(argv[1], "tcp") == 0, cold = strcmp(argv[4], "cold") == 0, ends[2] = {-1, -1};
    uint64_t bytes = strtoull(argv[2], NULL, 10), slots = bytes < REGION ? REGION / bytes : 1;
    long repeats = strtol(argv[3], NULL, 10), pause = strtol(argv[5], NULL, 10);
    struct timespec rest = {pause / 1000000, pause % 1000000 * 1000};
    ring = mmap(NULL, sizeof(*ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    wake_source = eventfd(0, EFD_NONBLOCK);
    wake_target = eventfd(0, EFD_NONBLOCK);
    if (over_tcp) connect_tcp(ends);
    pid_t child = fork();
    if (child < 0) die("fork");
    /* Small pages, as memory that a program has got by malloc. */
    memory = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, REGION, MADV_NOHUGEPAGE);
    memset(memory, 1, REGION);
    wire = ends[child == 0];
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        target(over_tcp);
    }
    struct rusage before, after;
    printf("{\"us\": [");
    for (long i = 0; i < WARM + repeats; i++) {
        if (i == WARM) getrusage(RUSAGE_SELF, &before);
        double start = now_us();
        transfer(over_tcp, i + 1, cold ? i % slots * bytes : 0, bytes);
        if (i >= WARM) printf("%s%.2f", i == WARM ? "" : ", ", now_us() - start);
        if (pause) nanosleep(&rest, NULL);
    }
    getrusage(RUSAGE_SELF, &after);
    transfer(over_tcp, 0, 0, 0);
    if (waitpid(child, NULL, 0) != child) die("waitpid");
    printf("], \"source_s\": %.6f, \"switches\": %ld}\n",
           seconds(after.ru_utime) + seconds(after.ru_stime) - seconds(before.ru_utime) - seconds(before.ru_stime),
           after.ru_nvcsw - before.ru_nvcsw);
    return 0;
}
