/* Memory between processes, in the stand-in for the driver (cuda.c, which includes this): CUDA IPC.

   A handle names process, descriptor and allocation, and is opened through /proc. Handles are of whole allocations, are
   refused in the process that made them, and for what was imported. Opening takes a while. Behind an allocation's pages
   lies one more, which all who have it mapped share: who frees what others have open is noted there as a violation, for
   on a GPU that is undefined. */

typedef struct {
    char magic[8];
    int pid, fd, device;
    uint64_t id, size, mapped;
} Handle;

typedef struct {
    uint32_t opens;
    int device;
    char mark[8];
    uint64_t size, id;
} Trailer;

typedef struct { char reserved[64]; } AnyHandle;

enum { ALREADY_THERE = 201, MAP_FAILED_CODE = 205, ALREADY_MAPPED = 208, NO_PEER_ACCESS = 217 };
static uint64_t violations, opened_count, open_count;
static int isolated, unshareable, open_us = 200;

static Trailer* trailer_of(const Memory* memory) { return (Trailer*)(memory->alias + memory->mapped); }

static void note_freed(const Memory* memory) {
    if (!memory->host && !memory->imported && !memory->adopted && __atomic_load_n(&trailer_of(memory)->opens, __ATOMIC_ACQUIRE)) violations++;
}

int cuMemGetAddressRange_v2(address_t* base, size_t* size, address_t address) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory* memory = find(address);
    if (memory) {
        if (base) *base = memory->base;
        if (size) *size = memory->size;
    }
    pthread_mutex_unlock(&mutex);
    return memory ? OK : INVALID;
}

int cuIpcGetMemHandle(AnyHandle* out, address_t address) {
    CALL_IN_CONTEXT
    Handle handle = {.magic = "standin", .pid = getpid()};
    pthread_mutex_lock(&mutex);
    Memory* memory = find(address);
    int good = memory && !memory->host && !memory->adopted && !memory->imported && !memory->segment && memory->base == address && !unshareable;
    if (good) {
        handle.fd = memory->fd;
        handle.device = memory->device;
        handle.id = memory->id;
        handle.size = memory->size;
        handle.mapped = memory->mapped;
    }
    pthread_mutex_unlock(&mutex);
    if (!good) return INVALID;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return OK;
}

static int open_handle(address_t* out, const Handle* handle) {
    char path[64];
    if (memcmp(handle->magic, "standin", 8)) return BAD_HANDLE;
    if (handle->pid == getpid()) return ALREADY_THERE;
    if (isolated && handle->device != current()) return NO_PEER_ACCESS;
    pthread_mutex_lock(&mutex);
    Memory* memory = memories;
    while (memory && !(memory->imported && memory->pid == handle->pid && memory->id == handle->id)) memory = memory->next;
    if (memory) {
        memory->imported++;
        *out = memory->base;
    }
    pthread_mutex_unlock(&mutex);
    if (memory) return OK;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return MAP_FAILED_CODE;
    memory = calloc(1, sizeof *memory);
    memory->size = handle->size;
    memory->mapped = handle->mapped;
    if (place(memory, fd)) return MAP_FAILED_CODE;
    memory->imported = 1;
    memory->pid = handle->pid;
    memory->id = handle->id;
    __atomic_add_fetch(&trailer_of(memory)->opens, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&mutex);
    enter(memory);
    open_count++;
    pthread_mutex_unlock(&mutex);
    *out = memory->base;
    return OK;
}

int cuIpcOpenMemHandle_v2(address_t* out, AnyHandle any, unsigned flags) {
    CALL_IN_CONTEXT
    Handle handle;
    memcpy(&handle, &any, sizeof handle);
    nap((uint64_t)open_us);
    if (flags != 1) return INVALID;
    __atomic_add_fetch(&opened_count, 1, __ATOMIC_RELAXED);
    return open_handle(out, &handle);
}

/* Unlike the real one it waits for nothing: a copy that is under way from what is closed ends the process. */
int cuIpcCloseMemHandle(address_t base) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory* memory = find(base);
    int last = memory && memory->imported == 1;
    if (last) {
        __atomic_sub_fetch(&trailer_of(memory)->opens, 1, __ATOMIC_ACQ_REL);
        open_count--;
    } else if (memory && memory->imported) {
        memory->imported--;
    }
    pthread_mutex_unlock(&mutex);
    if (last) return drop(base, 0);
    return memory && memory->imported ? OK : INVALID;
}

/* A descriptor of whole pages, within one allocation, of the device whose context is current. */
int cuMemGetHandleForAddressRange(int* out, address_t address, size_t length, int kind, unsigned long long flags) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory* memory = find(address);
    int good = memory && !memory->host && memory->device == current() && kind == 1 && flags == 0 && length
        && address % PAGE == 0 && length % PAGE == 0 && length <= memory->mapped - (address - memory->base);
    int fd = good ? fcntl(memory->fd, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&mutex);
    *out = fd;
    return fd < 0 ? INVALID : OK;
}

/* Devices reach memory of their own alone. */
void standin_isolate(int on) { isolated = on; }

/* No handle is given of anything, as of memory of a pool that was made without. */
void standin_unshareable(int on) { unshareable = on; }

/* How long it takes to open a handle. */
void standin_open_pace(int us) { open_us = us; }

/* Count anew what is counted, and share and reach everything. */
void standin_reset(void) {
    violations = opened_count = 0;
    isolated = unshareable = 0;
}

/* How often memory was freed that another process had open. */
uint64_t standin_violations(void) { return violations; }

/* How many handles were opened by now, and what is open of them. */
uint64_t standin_opened(void) { return opened_count; }
uint64_t standin_open(void) { return open_count; }
