/* A CUDA driver over host memory, for tests: it behaves worse than a GPU does.

   Device memory is a memfd that is mapped twice: the address that is handed out is PROT_NONE, so a load by the host dies
   with SIGSEGV and a system call fails with EFAULT; copies go by the second mapping. Each stream is a thread with a
   queue. A copy is done in eight pieces in a random order with random delays, all drawn from a seed. The legacy stream
   waits for all blocking streams, and they for it. To pageable memory a copy returns when it is done, from it when the
   source has been read. A broken device fails every call and completes nothing any more. After a fork every call
   returns 3. While a stream is captured, what is given to it is left out, and a call that asks what is done breaks the
   capture, unless its thread relaxes that. A call that gives a full stream more to do blocks until something is done. `standin_...` functions are the tests' own. */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t address_t;

enum {
    OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, BAD_DEVICE = 101, BAD_CONTEXT = 201, BAD_HANDLE = 400,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, UNSUPPORTED_IN_CAPTURE = 900, INVALIDATED = 901, CAPTURED_IMPLICITLY = 906
};
enum { DEVICES = 2, PIECES = 8, GRAIN = 2 << 20, PAGE = 4096, DEPTH = 16, ROOM = 256 };
enum { COPY, RECORD, WAIT_EVENT, WAIT_STREAM, WRITE, KERNEL };
enum { SHORT = 1, EARLY = 2 };

typedef struct Memory {
    address_t base;
    size_t size, mapped;
    char* alias;
    int device, host, adopted, fd, pid, imported;
    int accessible; /* of a segment: by which devices, a bit each */
    uint64_t id;
    struct Segment* segment;
    struct Reservation* reservation;
    struct Memory* next;
} Memory;

typedef struct Event {
    uint64_t recorded, done;
    int device;
} Event;

typedef struct Item {
    int kind;
    address_t to, from;
    size_t length;
    Event* event;
    uint64_t number;
    struct Stream* stream;
    uint32_t value;
    int delay_us, owned;
    struct Item* next;
} Item;

typedef struct Stream {
    Item *head, *tail;
    uint64_t queued, done, random;
    int device, blocking, quit, legacy, capture; /* 1: being captured, 2: that was broken */
    pthread_t thread;
    struct Stream* next;
} Stream;

/* The name of the threads of default streams, which stay for good. */
#define KEPT "standin-default"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Memory* memories;
static Stream* streams;
static Stream* legacy[DEVICES];
static int process, retained[DEVICES], sticky[DEVICES], held, delay_us = 20, stream_count, version = 13000;
static uint64_t seed = 1, calls, copies, synchronizations, events, blocked;
static char failing[64];
static int failing_after, failing_code;
static int damage; /* what is wrong with copies, so that a test sees whether that is found */
static __thread int contexts[DEPTH], depth, capture_mode;
static __thread Stream* per_thread[DEVICES];

/* -- what every call checks */

static int begins(const char* name, int needs_context) {
    int code = OK;
    if (!process || process != getpid()) return NOT_INITIALIZED;
    pthread_mutex_lock(&mutex);
    calls++;
    if (!strcmp(failing, name) && failing_after-- <= 0) {
        failing[0] = 0;
        code = failing_code;
    } else if (needs_context && !depth) {
        code = BAD_CONTEXT;
    } else if (needs_context && sticky[contexts[depth - 1]]) {
        code = sticky[contexts[depth - 1]];
    }
    pthread_mutex_unlock(&mutex);
    return code;
}
#define CALL { int code_ = begins(__func__, 0); if (code_) return code_; }
#define CALL_IN_CONTEXT { int code_ = begins(__func__, 1); if (code_) return code_; }

static int current(void) { return contexts[depth - 1]; }
static void* context_of(int device) { return (void*)(uintptr_t)(0x1000 + device); }

/* -- memory */

static Memory* find(address_t address) {
    Memory* memory = memories;
    while (memory && !(address >= memory->base && address - memory->base < memory->size)) memory = memory->next;
    return memory;
}

/* Where the engines of a device reach memory; pageable memory at its own address. NULL: a range that ends outside. Over
   segments that lie side by side it goes on. */
static char* reach(address_t address, size_t length) {
    Memory* memory = find(address);
    Memory* last = memory;
    if (!memory) return (char*)address;
    if (memory->segment && !memory->accessible) return NULL;
    for (size_t here = memory->size - (address - memory->base); length > here; here += last->size) {
        last = last->segment ? find(last->base + last->size) : NULL;
        if (!last || last->reservation != memory->reservation || !last->accessible) return NULL;
    }
    return memory->host ? (char*)address : memory->alias + (address - memory->base);
}

static void enter(Memory* memory) {
    memory->device = current();
    memory->next = memories;
    memories = memory;
}

/* Map a memfd that has room for the memory and a page more: once for the engines, and once where nobody can touch it. */
static int place(Memory* memory, int fd) {
    memory->fd = fd;
    memory->alias = mmap(NULL, memory->mapped + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char* room = mmap(NULL, memory->mapped + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory->alias == MAP_FAILED || room == MAP_FAILED) return OUT_OF_MEMORY;
    memory->base = ((address_t)room + GRAIN - 1) / GRAIN * GRAIN;
    munmap(room, memory->base - (address_t)room);
    munmap((char*)memory->base + memory->mapped, GRAIN - (memory->base - (address_t)room));
    return OK;
}

int cuMemAlloc_v2(address_t* out, size_t length) {
    static uint64_t numbers;
    CALL_IN_CONTEXT
    if (!length) return INVALID;
    Memory* memory = calloc(1, sizeof *memory);
    memory->size = length;
    memory->mapped = (length + GRAIN - 1) / GRAIN * GRAIN;
    memory->id = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    int fd = memfd_create("gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)memory->mapped + PAGE) || place(memory, fd)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    enter(memory);
    pthread_mutex_unlock(&mutex);
    *out = memory->base;
    return OK;
}

/* Memory of the test's own as a device's: the address that is handed out cannot be touched, the test sees the bytes. */
int standin_adopt(address_t* out, void* bytes, size_t length) {
    CALL_IN_CONTEXT
    Memory* memory = calloc(1, sizeof *memory);
    memory->size = length;
    memory->mapped = (length + 4095) / 4096 * 4096;
    memory->alias = bytes;
    memory->adopted = 1;
    memory->fd = -1;
    void* room = mmap(NULL, memory->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return OUT_OF_MEMORY;
    memory->base = (address_t)room;
    pthread_mutex_lock(&mutex);
    enter(memory);
    pthread_mutex_unlock(&mutex);
    *out = memory->base;
    return OK;
}
static void note_freed(const Memory* memory);

static int drop(address_t base, int host) {
    pthread_mutex_lock(&mutex);
    Memory** link = &memories;
    while (*link && !((*link)->base == base && (*link)->host == host && !(*link)->segment)) link = &(*link)->next;
    Memory* memory = *link;
    if (memory) *link = memory->next;
    pthread_mutex_unlock(&mutex);
    if (!memory) return INVALID;
    note_freed(memory);
    munmap((void*)memory->base, memory->mapped);
    if (!host && !memory->adopted) {
        munmap(memory->alias, memory->mapped + PAGE);
        close(memory->fd);
    }
    free(memory);
    return OK;
}

/* Unlike the real one it waits for nothing: what is still being copied from or to this memory is an error of the user. */
int cuMemFree_v2(address_t base) {
    CALL_IN_CONTEXT
    return drop(base, 0);
}

int cuMemHostAlloc(void** out, size_t length, unsigned flags) {
    CALL_IN_CONTEXT
    (void)flags;
    void* pages = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    Memory* memory = calloc(1, sizeof *memory);
    memory->base = (address_t)pages;
    memory->size = memory->mapped = length;
    memory->host = 1;
    pthread_mutex_lock(&mutex);
    enter(memory);
    pthread_mutex_unlock(&mutex);
    *out = pages;
    return OK;
}

int cuMemFreeHost(void* pages) {
    CALL_IN_CONTEXT
    return drop((address_t)pages, 1);
}

int cuMemHostGetDevicePointer_v2(address_t* out, void* pages, unsigned flags) {
    CALL_IN_CONTEXT
    (void)flags;
    *out = (address_t)pages;
    return OK;
}

static uint64_t handle_types(const Memory* memory);

int cuPointerGetAttribute(void* out, int attribute, address_t address) {
    CALL
    pthread_mutex_lock(&mutex);
    Memory* memory = find(address);
    int device = memory ? memory->device : -1;
    uint64_t id = memory ? memory->id : 0, types = memory ? handle_types(memory) : 0;
    pthread_mutex_unlock(&mutex);
    if (device < 0) return INVALID;
    if (attribute == 7) *(uint64_t*)out = id;
    else if (attribute == 1) *(void**)out = context_of(device);
    else if (attribute == 9) *(int*)out = device;
    else if (attribute == 14) *(uint64_t*)out = types;
    else return INVALID;
    return OK;
}

/* -- streams */

static uint64_t draw(Stream* stream) {
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    return stream->random;
}

static void nap(uint64_t us) {
    struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    if (us) nanosleep(&time, NULL);
}

/* Without the lock: other streams go on meanwhile. */
static void carry(Stream* stream, char* to, const char* from, size_t length) {
    size_t piece = length / PIECES + 1, count = (length + piece - 1) / piece, order[PIECES];
    for (size_t i = 0; i < count; i++) order[i] = i;
    for (size_t i = count; i > 1; i--) {
        size_t other = draw(stream) % i, kept = order[i - 1];
        order[i - 1] = order[other];
        order[other] = kept;
    }
    for (size_t i = 0; i < count; i++) {
        size_t at = order[i] * piece;
        nap(delay_us ? draw(stream) % ((uint64_t)delay_us + 1) : 0);
        memcpy(to + at, from + at, length - at < piece ? length - at : piece);
    }
}

/* A damaged driver: what is written behind a copy is written before its bytes are there. The lock is held. Memory that is
   freed meanwhile stays as it is. */
static void carry_late(Stream* stream, const Item* item) {
    int had_to = find(item->to) != NULL, had_from = find(item->from) != NULL;
    pthread_mutex_unlock(&mutex);
    nap(300);
    pthread_mutex_lock(&mutex);
    for (const Item* next = item->next; next && next->kind != COPY; next = next->next)
        if (next->kind == WRITE) __atomic_store_n((uint32_t*)reach(next->to, 4), next->value, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&mutex);
    nap(3000);
    pthread_mutex_lock(&mutex);
    if (had_to != (find(item->to) != NULL) || had_from != (find(item->from) != NULL)) return;
    carry(stream, reach(item->to, item->length), reach(item->from, item->length), item->length);
}

static void execute(Stream* stream, Item* item) {
    char* to = item->kind == COPY || item->kind == KERNEL || item->kind == WRITE ? reach(item->to, item->length) : NULL;
    char* from = item->kind == COPY ? reach(item->from, item->length) : NULL;
    if (sticky[stream->device]) return;
    if ((item->kind == COPY && (!to || !from)) || (item->kind == KERNEL && !to)) {
        sticky[stream->device] = ILLEGAL_ADDRESS;
        return;
    }
    if (item->kind == COPY && damage == EARLY) {
        carry_late(stream, item);
        return;
    }
    pthread_mutex_unlock(&mutex);
    if (item->kind == KERNEL) {
        nap((uint64_t)item->delay_us);
        memset(to, (int)item->value, item->length);
    } else if (item->kind == COPY) {
        carry(stream, to, from, item->length - (damage == SHORT));
    }
    pthread_mutex_lock(&mutex);
    copies += item->kind == COPY;
    if (sticky[stream->device]) return;
    if (item->kind == WRITE) __atomic_store_n((uint32_t*)to, item->value, __ATOMIC_RELEASE);
    if (item->kind == RECORD && item->event->done < item->number) item->event->done = item->number;
}

static int must_wait(const Stream* stream, const Item* item) {
    if (sticky[stream->device]) return 0;
    if ((held & 1 && item->kind == COPY) || (held & 2 && item->kind == KERNEL)) return 1;
    if (item->kind == WAIT_EVENT) return item->event->done < item->number;
    return item->kind == WAIT_STREAM && item->stream->done < item->number;
}

static void* run(void* argument) {
    Stream* stream = argument;
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!stream->head && !stream->quit) pthread_cond_wait(&changed, &mutex);
        if (!stream->head) break;
        Item* item = stream->head;
        while (must_wait(stream, item)) pthread_cond_wait(&changed, &mutex);
        execute(stream, item);
        stream->head = item->next;
        if (!stream->head) stream->tail = NULL;
        stream->done++;
        if (item->owned) free((void*)item->from);
        free(item);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

static Stream* new_stream(int device, int blocking) {
    Stream* stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->blocking = blocking;
    stream->random = seed * 0x9E3779B97F4A7C15u ^ (uint64_t)(++stream_count) * 0xD1342543DE82EF95u;
    if (!stream->random) stream->random = 1;
    stream->next = streams;
    streams = stream;
    pthread_create(&stream->thread, NULL, run, stream);
    return stream;
}

/* NULL: there is no such stream of this context, or no more. */
static Stream* named(void* handle) {
    int device = current();
    if (handle > (void*)2) {
        Stream* stream = streams;
        while (stream && (stream != handle || stream->device != device)) stream = stream->next;
        return stream;
    }
    if (handle == (void*)2) {
        if (!per_thread[device]) {
            per_thread[device] = new_stream(device, 1);
            pthread_setname_np(per_thread[device]->thread, KEPT);
        }
        return per_thread[device];
    }
    if (!legacy[device]) {
        legacy[device] = new_stream(device, 1);
        legacy[device]->legacy = 1;
        pthread_setname_np(legacy[device]->thread, KEPT);
    }
    return legacy[device];
}

static void append(Stream* stream, Item content) {
    Item* item = malloc(sizeof *item);
    *item = content;
    item->next = NULL;
    if (stream->tail) stream->tail->next = item;
    else stream->head = item;
    stream->tail = item;
    stream->queued++;
}

static void await_stream(Stream* stream, Stream* other) {
    Item wait = {.kind = WAIT_STREAM, .stream = other, .number = other->queued};
    if (other->done < other->queued) append(stream, wait);
}

/* The lock is held, but not while the stream is full. */
static void push(Stream* stream, Item item) {
    blocked += stream->queued - stream->done >= ROOM;
    while (stream->queued - stream->done >= ROOM && !sticky[stream->device]) pthread_cond_wait(&changed, &mutex);
    if (stream->legacy) {
        for (Stream* other = streams; other; other = other->next)
            if (other != stream && other->device == stream->device && other->blocking) await_stream(stream, other);
    } else if (stream->blocking && legacy[stream->device]) {
        await_stream(stream, legacy[stream->device]);
    }
    append(stream, item);
    pthread_cond_broadcast(&changed);
}

/* What is wrong with giving a stream more to do; with `asks`, with asking what is done. The lock is held. */
static int refused(Stream* stream, int asks) {
    if (!stream) return BAD_HANDLE;
    if (asks && capture_mode != 2) {
        int broken = 0;
        for (Stream* other = streams; other; other = other->next)
            if (other->capture) broken = other->capture = 2;
        if (broken) return UNSUPPORTED_IN_CAPTURE;
    }
    for (Stream* other = streams; stream->legacy && other; other = other->next)
        if (other->device == stream->device && other->blocking && other->capture) {
            if (!asks) other->capture = 2;
            return CAPTURED_IMPLICITLY;
        }
    return stream->capture == 2 ? INVALIDATED : OK;
}

static int finish(Stream* stream) {
    uint64_t number = stream->queued;
    while (stream->done < number && !sticky[stream->device]) pthread_cond_wait(&changed, &mutex);
    return sticky[stream->device];
}

int cuStreamCreate(void** out, unsigned flags) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    *out = new_stream(current(), !(flags & 1));
    pthread_mutex_unlock(&mutex);
    return OK;
}

int cuStreamDestroy_v2(void* handle) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Stream* stream = handle;
    Stream** link = &streams;
    while (*link && *link != stream) link = &(*link)->next;
    if (*link) *link = stream->next;
    stream->quit = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(stream->thread, NULL);
    free(stream);
    return OK;
}

int cuStreamQuery(void* handle) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Stream* stream = named(handle);
    int code = refused(stream, 1);
    if (!code && stream->done < stream->queued) code = NOT_READY;
    pthread_mutex_unlock(&mutex);
    return code;
}

int cuStreamIsCapturing(void* handle, int* status) {
    CALL_IN_CONTEXT
    int code = OK;
    pthread_mutex_lock(&mutex);
    Stream* stream = named(handle);
    for (Stream* other = streams; stream && stream->legacy && other; other = other->next)
        if (other->device == stream->device && other->blocking && other->capture) code = CAPTURED_IMPLICITLY;
    if (!stream) code = BAD_HANDLE;
    else *status = stream->capture;
    pthread_mutex_unlock(&mutex);
    return code;
}

int cuStreamSynchronize(void* handle) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    synchronizations++;
    Stream* stream = named(handle);
    int code = stream ? finish(stream) : BAD_HANDLE;
    pthread_mutex_unlock(&mutex);
    return code;
}

int cuStreamWriteValue32_v2(void* handle, address_t address, uint32_t value, unsigned flags) {
    CALL_IN_CONTEXT
    (void)flags;
    Item item = {.kind = WRITE, .to = address, .length = 4, .value = value};
    pthread_mutex_lock(&mutex);
    int known = find(address) != NULL;
    if (known) push(named(handle), item);
    pthread_mutex_unlock(&mutex);
    return known ? OK : INVALID;
}

int cuMemcpyAsync(address_t to, address_t from, size_t length, void* handle) {
    CALL_IN_CONTEXT
    Item item = {.kind = COPY, .to = to, .from = from, .length = length};
    int code = OK;
    pthread_mutex_lock(&mutex);
    int pageable_target = !find(to);
    if (!find(from)) {
        item.from = (address_t)malloc(length);
        item.owned = 1;
        memcpy((void*)item.from, (const void*)from, length);
    }
    push(named(handle), item);
    if (pageable_target) code = finish(named(handle));
    pthread_mutex_unlock(&mutex);
    return code;
}

/* -- events */

int cuEventCreate(void** out, unsigned flags) {
    CALL_IN_CONTEXT
    (void)flags;
    Event* event = calloc(1, sizeof *event);
    event->device = current();
    *out = event;
    __atomic_add_fetch(&events, 1, __ATOMIC_RELAXED);
    return OK;
}

int cuEventDestroy_v2(void* handle) {
    CALL
    (void)handle; /* kept: a stream may still have it */
    __atomic_sub_fetch(&events, 1, __ATOMIC_RELAXED);
    return OK;
}

int cuEventRecord(void* handle, void* stream_handle) {
    CALL_IN_CONTEXT
    Event* event = handle;
    int code = OK;
    pthread_mutex_lock(&mutex);
    Stream* stream = named(stream_handle);
    code = stream && stream->device != event->device ? BAD_HANDLE : refused(stream, 0);
    if (!code) {
        Item item = {.kind = RECORD, .event = event, .number = ++event->recorded};
        push(stream, item);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

int cuEventQuery(void* handle) {
    CALL_IN_CONTEXT
    Event* event = handle;
    pthread_mutex_lock(&mutex);
    int code = refused(named(NULL), 1);
    if (code == CAPTURED_IMPLICITLY) code = OK;
    if (!code && event->done < event->recorded) code = NOT_READY;
    pthread_mutex_unlock(&mutex);
    return code;
}

/* -- NICs */

static int attribute_of(int attribute);
static int ordering = 100, flush_options;
static uint64_t flushes, synchronous;

int cuDeviceGetAttribute(int* out, int attribute, int device) {
    CALL
    if (device < 0 || device >= DEVICES) return INVALID;
    *out = attribute == 118 ? ordering : attribute == 117 ? flush_options : attribute_of(attribute);
    return OK;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    CALL_IN_CONTEXT
    __atomic_add_fetch(&flushes, 1, __ATOMIC_RELAXED);
    return target || scope != 100 ? INVALID : OK;
}

/* That copies to memory end before the call does. Segments cannot have it. */
int cuPointerSetAttribute(const void* value, int attribute, address_t address) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory* memory = find(address);
    int good = memory && !memory->segment && attribute == 6 && *(const unsigned*)value;
    pthread_mutex_unlock(&mutex);
    synchronous += (uint64_t)good;
    return good ? OK : INVALID;
}

/* How far writes of NICs are in order (0, 100, 200), and whether the driver flushes them when it is asked (1). */
void standin_ordering(int how, int options) {
    ordering = how;
    flush_options = options;
}

uint64_t standin_flushes(void) { return flushes; }
uint64_t standin_synchronous(void) { return synchronous; }

/* -- other processes */

#include "cuda_sharing.h"
#include "cuda_segments.h"

static uint64_t handle_types(const Memory* memory) {
    return memory->segment && !memory->segment->imported && !unshareable ? (uint64_t)memory->segment->types : 0;
}

/* -- devices and contexts */

int cuInit(unsigned flags) {
    (void)flags;
    if (process && process != getpid()) return NOT_INITIALIZED;
    int kept = process;
    process = getpid();
    int code = begins(__func__, 0);
    if (code) process = kept;
    return code;
}

/* Before cuInit, too. */
int cuDriverGetVersion(int* out) {
    int code = process ? begins(__func__, 0) : OK;
    *out = version;
    return code;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    CALL
    if (device < 0 || device >= DEVICES) return BAD_DEVICE;
    *flags = 0;
    *active = retained[device] > 0;
    return OK;
}

int cuDevicePrimaryCtxRetain(void** out, int device) {
    CALL
    if (device < 0 || device >= DEVICES) return BAD_DEVICE;
    retained[device]++;
    *out = context_of(device);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    CALL
    if (!retained[device]) return BAD_CONTEXT;
    retained[device]--;
    return OK;
}

int cuCtxPushCurrent_v2(void* context) {
    CALL
    if (depth == DEPTH) return INVALID;
    contexts[depth++] = (int)((uintptr_t)context - 0x1000);
    return OK;
}

int cuCtxPopCurrent_v2(void** out) {
    CALL
    if (!depth) return BAD_CONTEXT;
    *out = context_of(contexts[--depth]);
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
    CALL
    int kept = capture_mode;
    capture_mode = *mode;
    *mode = kept;
    return OK;
}

static const struct { int code; const char *name, *text; } errors[] = {
    {INVALID, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {BAD_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {BAD_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
};

static int describe(const char* function, int code, const char** out, int text) {
    *out = NULL;
    if (!strcmp(failing, function) && failing_after-- <= 0) {
        failing[0] = 0;
        return failing_code;
    }
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *out = text ? errors[i].text : errors[i].name;
            return OK;
        }
    return INVALID;
}

int cuGetErrorName(int code, const char** out) { return describe(__func__, code, out, 0); }
int cuGetErrorString(int code, const char** out) { return describe(__func__, code, out, 1); }

/* -- array libraries */

#include "cuda_libraries.h"

/* -- the tests' own */

/* The call of that name fails once, after so many that do not. */
void standin_fail(const char* name, int after, int code) {
    pthread_mutex_lock(&mutex);
    snprintf(failing, sizeof failing, "%s", name);
    failing_after = after;
    failing_code = code;
    pthread_mutex_unlock(&mutex);
}

/* Whether a failure that was asked for has not come yet. */
int standin_fails(void) { return failing[0] != 0; }

/* From here on every call in this device's context fails, and nothing that is queued is done. 0 mends it. */
void standin_break(int device, int code) {
    pthread_mutex_lock(&mutex);
    sticky[device] = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

/* Copies (1), kernels (2) stay where they are until this is taken back. */
void standin_hold(int on) {
    pthread_mutex_lock(&mutex);
    held = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

void standin_pace(int us, uint64_t with_seed) {
    delay_us = us;
    seed = with_seed;
}

/* From here on the last byte of each copy is left out (1), or copies are called done before they are (2). */
void standin_damage(int kind) { damage = kind; }

void standin_version(int number) { version = number; }

uint64_t standin_calls(void) { return calls; }
uint64_t standin_copies(void) { return copies; }
uint64_t standin_synchronizations(void) { return synchronizations; }
uint64_t standin_events(void) { return events; }

/* How many calls had to wait because their stream was full. */
uint64_t standin_blocked(void) { return blocked; }

/* How many allocations there are, of devices and pinned. */
uint64_t standin_memories(void) {
    uint64_t count = 0;
    pthread_mutex_lock(&mutex);
    for (Memory* memory = memories; memory; memory = memory->next) count++;
    pthread_mutex_unlock(&mutex);
    return count;
}

/* How many bytes of the host's memory are pinned. */
uint64_t standin_pinned(void) {
    uint64_t bytes = 0;
    pthread_mutex_lock(&mutex);
    for (Memory* memory = memories; memory; memory = memory->next) bytes += memory->host ? memory->size : 0;
    pthread_mutex_unlock(&mutex);
    return bytes;
}

/* How often contexts are retained. */
uint64_t standin_contexts(void) { return (uint64_t)(retained[0] + retained[1]); }

/* How deep the contexts of this thread are, and its capture mode. */
int standin_depth(void) { return depth; }
int standin_capture_mode(void) { return capture_mode; }

int standin_known(address_t address) {
    pthread_mutex_lock(&mutex);
    int known = find(address) != NULL;
    pthread_mutex_unlock(&mutex);
    return known;
}

/* Begin (1) or end (0) the capture of a stream; whether it was broken. */
int standin_capture(void* handle, int on) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Stream* stream = named(handle);
    int broken = stream->capture == 2;
    stream->capture = on;
    pthread_mutex_unlock(&mutex);
    return broken;
}

/* Copies that were queued and are not done. */
uint64_t standin_pending(void) {
    uint64_t count = 0;
    pthread_mutex_lock(&mutex);
    for (Stream* stream = streams; stream; stream = stream->next)
        for (Item* item = stream->head; item; item = item->next) count += item->kind == COPY;
    pthread_mutex_unlock(&mutex);
    return count;
}

int standin_kernel(void* stream, address_t to, size_t length, int value, int us) {
    CALL_IN_CONTEXT
    Item item = {.kind = KERNEL, .to = to, .length = length, .value = (uint32_t)value, .delay_us = us};
    pthread_mutex_lock(&mutex);
    int code = refused(named(stream), 0);
    if (!code && !named(stream)->capture) push(named(stream), item);
    pthread_mutex_unlock(&mutex);
    return code;
}

/* The second mapping of device memory: its bytes now, in no order with any stream. */
void* standin_alias(address_t address) {
    pthread_mutex_lock(&mutex);
    char* seen = reach(address, 1);
    pthread_mutex_unlock(&mutex);
    return seen;
}
