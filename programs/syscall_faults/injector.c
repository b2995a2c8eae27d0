/* Preloaded: the n-th call of one function fails, if it is made by aiote's own code, or by what it asks of Python or of
 * libfabric.
 *
 * Calls are told apart by where they return to: extension modules of aiote, those of Python that stand for system calls,
 * and the library. What the interpreter allocates for itself is left alone. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>

#define FUNCTIONS(X) \
    X(malloc) X(calloc) X(realloc) X(mmap) X(epoll_create1) X(epoll_ctl) X(eventfd) X(timerfd_create) \
    X(memfd_create) X(ftruncate) X(posix_fallocate) X(socket) X(bind) X(listen) X(accept4) \
    X(connect) X(setsockopt) X(getsockopt) X(send) X(sendmsg) X(recv) X(recvmsg) X(pthread_create) X(fcntl)
#define INDEX(name) I_##name,
#define NAME(name) #name,
enum { FUNCTIONS(INDEX) COUNT };
static const char* const names[COUNT] = {FUNCTIONS(NAME)};
static long calls[COUNT];
static int chosen = -1, with = 0, armed = 0;
static long nth = 0, hits = 0;

const char* injector_name(int which) { return which < COUNT ? names[which] : NULL; }
long injector_calls(int which) { return calls[which]; }
long injector_hits(void) { return hits; }
void injector_disarm(void) { armed = 0; }
/* Count calls from now on; with a function's number have its n-th one fail, and only that. */
void injector_arm(int which, long n, int error) {
    memset(calls, 0, sizeof(calls));
    chosen = which; nth = n; with = error; hits = 0;
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

static int ours(const void* caller, int which) {
    Dl_info info;
    const char* file;
    if (!dladdr(caller, &info) || info.dli_fname == NULL) return 0;
    if (strstr(info.dli_fname, "aiote_native") != NULL) return 1;
    /* Of others' memory nothing: how they do without it is theirs. */
    if (which == I_malloc || which == I_calloc || which == I_realloc || which == I_mmap) return 0;
    if (strstr(info.dli_fname, "libfabric") != NULL) return 1;
    file = strrchr(info.dli_fname, '/');
    file = file ? file + 1 : info.dli_fname;
    return strncmp(file, "_socket.", 8) == 0 || strncmp(file, "select.", 7) == 0 || strncmp(file, "fcntl.", 6) == 0;
}

static int due(int which, const void* caller) {
    if (!__atomic_load_n(&armed, __ATOMIC_RELAXED) || !ours(caller, which)) return 0;
    if (__atomic_add_fetch(&calls[which], 1, __ATOMIC_RELAXED) != nth || which != chosen) return 0;
    hits++;
    errno = with;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define DUE(name) due(I_##name, __builtin_return_address(0))

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
void* malloc(size_t size) { return DUE(malloc) ? NULL : __libc_malloc(size); }
void* calloc(size_t n, size_t size) { return DUE(calloc) ? NULL : __libc_calloc(n, size); }
void* realloc(void* old, size_t size) { return DUE(realloc) ? NULL : __libc_realloc(old, size); }

#define FAILS(result, name, parameters, arguments) \
    result name parameters { \
        static result (*real) parameters; \
        if (DUE(name)) return (result)-1; \
        if (real == NULL) real = (result (*) parameters)dlsym(RTLD_NEXT, #name); \
        return real arguments; \
    }
FAILS(void*, mmap, (void* a, size_t l, int p, int f, int d, off_t o), (a, l, p, f, d, o))
FAILS(int, epoll_create1, (int f), (f))
FAILS(int, eventfd, (unsigned int n, int f), (n, f))
FAILS(int, timerfd_create, (int c, int f), (c, f))
FAILS(int, memfd_create, (const char* n, unsigned int f), (n, f))
FAILS(int, ftruncate, (int d, off_t l), (d, l))
FAILS(int, socket, (int d, int t, int p), (d, t, p))
FAILS(int, bind, (int d, const struct sockaddr* a, socklen_t l), (d, a, l))
FAILS(int, listen, (int d, int b), (d, b))
FAILS(int, accept4, (int d, struct sockaddr* a, socklen_t* l, int f), (d, a, l, f))
FAILS(int, connect, (int d, const struct sockaddr* a, socklen_t l), (d, a, l))
FAILS(int, setsockopt, (int d, int l, int n, const void* v, socklen_t s), (d, l, n, v, s))
FAILS(int, getsockopt, (int d, int l, int n, void* v, socklen_t* s), (d, l, n, v, s))
FAILS(ssize_t, send, (int d, const void* b, size_t l, int f), (d, b, l, f))
FAILS(ssize_t, sendmsg, (int d, const struct msghdr* m, int f), (d, m, f))
FAILS(ssize_t, recv, (int d, void* b, size_t l, int f), (d, b, l, f))
FAILS(ssize_t, recvmsg, (int d, struct msghdr* m, int f), (d, m, f))

/* The names that are called where files may be large. */
void* mmap64(void* a, size_t l, int p, int f, int d, off_t o) __attribute__((alias("mmap")));
int ftruncate64(int d, off_t l) __attribute__((alias("ftruncate")));
int posix_fallocate64(int d, off_t at, off_t l) __attribute__((alias("posix_fallocate")));
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

int epoll_ctl(int set, int operation, int fd, struct epoll_event* event) {
    /* To take a descriptor out needs nothing, and cannot fail for want of it. */
    if (operation != EPOLL_CTL_DEL && DUE(epoll_ctl)) return -1;
    return REAL(epoll_ctl)(set, operation, fd, event);
}
int posix_fallocate(int fd, off_t at, off_t length) {
    if (DUE(posix_fallocate)) return with;
    return REAL(posix_fallocate)(fd, at, length);
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
    if (DUE(pthread_create)) return with;
    return REAL(pthread_create)(thread, attributes, run, argument);
}
int fcntl(int fd, int command, ...) {
    va_list more;
    void* argument;
    va_start(more, command);
    argument = va_arg(more, void*);
    va_end(more);
    /* Reading a descriptor's flags cannot fail; sealing can. */
    if (command == 1033 /* F_ADD_SEALS */ && DUE(fcntl)) return -1;
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl"))(fd, command, argument);
}
