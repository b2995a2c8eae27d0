/* Memory in segments, in the stand-in for the driver (cuda.c, which includes this): cuMemCreate, mapped side by side.

   A segment is a memfd with one page more, which says what it is and who has it open in another process. A reservation
   has two ranges of addresses: the one that is handed out, which nobody can touch, and the engines' own, into which
   segments are mapped. What was not given access is not reached. A descriptor of anything else is refused. */

typedef struct Reservation {
    address_t base;
    size_t size;
    char* alias;
    struct Reservation* next;
} Reservation;

typedef struct Segment {
    int fd, uses, types, device, imported;
    size_t size;
    uint64_t id;
    Trailer* trailer;
} Segment;

static const char SEGMENT[8] = "segment";
static Reservation* reservations;
static uint64_t segment_count;

static Reservation* reservation_of(address_t address, size_t size) {
    Reservation* found = reservations;
    while (found && !(address >= found->base && address + size <= found->base + found->size)) found = found->next;
    return found;
}

static Segment* new_segment(int fd, size_t size) {
    Segment* segment = calloc(1, sizeof *segment);
    __atomic_add_fetch(&segment_count, 1, __ATOMIC_RELAXED);
    segment->fd = fd;
    segment->size = size;
    segment->uses = 1;
    segment->trailer = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)size);
    return segment;
}

static void leave_segment(Segment* segment) {
    if (--segment->uses) return;
    munmap(segment->trailer, PAGE);
    close(segment->fd);
    free(segment);
    __atomic_sub_fetch(&segment_count, 1, __ATOMIC_RELAXED);
}

/* How many segments have a handle or a mapping in this process. */
uint64_t standin_segments(void) { return segment_count; }

typedef struct { int type, types, location, device; } Properties;

int cuMemCreate(uint64_t* out, size_t size, const Properties* of, unsigned long long flags) {
    static uint64_t numbers = 1 << 20;
    CALL_IN_CONTEXT
    if (!size || size % GRAIN || of->type != 1 || of->location != 1 || flags) return INVALID;
    int fd = memfd_create("gpu-segment", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size + PAGE)) return OUT_OF_MEMORY;
    Segment* segment = new_segment(fd, size);
    segment->types = of->types;
    segment->device = segment->trailer->device = of->device;
    segment->id = segment->trailer->id = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    segment->trailer->size = size;
    memcpy(segment->trailer->mark, SEGMENT, 8);
    *out = (uint64_t)(uintptr_t)segment;
    return OK;
}

int cuMemRelease(uint64_t handle) {
    CALL
    pthread_mutex_lock(&mutex);
    leave_segment((Segment*)(uintptr_t)handle);
    pthread_mutex_unlock(&mutex);
    return OK;
}

int cuMemRetainAllocationHandle(uint64_t* out, void* address) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory* memory = find((address_t)(uintptr_t)address);
    Segment* segment = memory ? memory->segment : NULL;
    if (segment) segment->uses++;
    pthread_mutex_unlock(&mutex);
    *out = (uint64_t)(uintptr_t)segment;
    return segment ? OK : INVALID;
}

int cuMemExportToShareableHandle(void* out, uint64_t handle, int type, unsigned long long flags) {
    CALL_IN_CONTEXT
    Segment* segment = (Segment*)(uintptr_t)handle;
    if (type != 1 || flags || !(segment->types & 1) || segment->imported) return INVALID;
    int fd = fcntl(segment->fd, F_DUPFD_CLOEXEC, 0);
    *(int*)out = fd;
    return fd < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(uint64_t* out, void* descriptor, int type) {
    CALL_IN_CONTEXT
    off_t end = lseek((int)(intptr_t)descriptor, 0, SEEK_END);
    if (type != 1 || end <= PAGE || (end - PAGE) % GRAIN) return INVALID;
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return OUT_OF_MEMORY;
    Segment* segment = new_segment(fd, (size_t)end - PAGE);
    if (segment->trailer == MAP_FAILED || memcmp(segment->trailer->mark, SEGMENT, 8)) {
        leave_segment(segment);
        return INVALID;
    }
    segment->imported = 1;
    segment->device = segment->trailer->device;
    segment->id = segment->trailer->id;
    __atomic_add_fetch(&opened_count, 1, __ATOMIC_RELAXED);
    *out = (uint64_t)(uintptr_t)segment;
    return OK;
}

int cuMemAddressReserve(address_t* out, size_t size, size_t alignment, address_t near, unsigned long long flags) {
    CALL_IN_CONTEXT
    if (!size || size % GRAIN || flags) return INVALID;
    (void)alignment, (void)near;
    Reservation* made = calloc(1, sizeof *made);
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* room = mmap(NULL, size + GRAIN, PROT_NONE, kind, -1, 0);
    made->alias = mmap(NULL, size, PROT_NONE, kind, -1, 0);
    if (room == MAP_FAILED || made->alias == MAP_FAILED) return OUT_OF_MEMORY;
    made->size = size;
    made->base = ((address_t)room + GRAIN - 1) / GRAIN * GRAIN;
    munmap(room, made->base - (address_t)room);
    munmap((char*)made->base + size, GRAIN - (made->base - (address_t)room));
    pthread_mutex_lock(&mutex);
    made->next = reservations;
    reservations = made;
    pthread_mutex_unlock(&mutex);
    *out = made->base;
    return OK;
}

/* Whole reservations alone, in which nothing is mapped. */
int cuMemAddressFree(address_t base, size_t size) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Reservation** link = &reservations;
    while (*link && (*link)->base != base) link = &(*link)->next;
    Reservation* found = *link;
    int used = 0;
    for (Memory* memory = memories; found && memory; memory = memory->next)
        used |= memory->segment && memory->base >= base && memory->base < base + size;
    if (found && found->size == size && !used) *link = found->next;
    else found = NULL;
    pthread_mutex_unlock(&mutex);
    if (!found) return INVALID;
    munmap((void*)found->base, size);
    munmap(found->alias, size);
    free(found);
    return OK;
}

int cuMemMap(address_t base, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    CALL_IN_CONTEXT
    Segment* segment = (Segment*)(uintptr_t)handle;
    if (!size || size % GRAIN || offset || flags || size > segment->size) return INVALID;
    pthread_mutex_lock(&mutex);
    Reservation* in = reservation_of(base, size);
    int good = in && !find(base);
    if (good) {
        Memory* memory = calloc(1, sizeof *memory);
        memory->base = base;
        memory->size = memory->mapped = size;
        memory->alias = mmap(in->alias + (base - in->base), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, segment->fd, 0);
        memory->fd = -1;
        memory->id = segment->id;
        memory->segment = segment;
        memory->reservation = in;
        segment->uses++;
        enter(memory);
        memory->device = segment->device;
        if (segment->imported) {
            __atomic_add_fetch(&segment->trailer->opens, 1, __ATOMIC_ACQ_REL);
            open_count++;
        }
    }
    pthread_mutex_unlock(&mutex);
    return good ? OK : INVALID;
}

typedef struct { int location, device, flags; } Access;

int cuMemSetAccess(address_t base, size_t size, const Access* access, size_t count) {
    CALL_IN_CONTEXT
    int code = count == 1 && access->location == 1 && access->flags == 3 ? OK : INVALID;
    pthread_mutex_lock(&mutex);
    for (address_t at = base; code == OK && at < base + size;) {
        Memory* memory = find(at);
        if (!memory || !memory->segment || memory->base != at || at + memory->size > base + size) code = INVALID;
        else if (isolated && memory->device != access->device) code = NO_PEER_ACCESS;
        else memory->accessible |= 1 << access->device, at += memory->size;
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

/* One segment, whole. What another process has open is noted, as with other memory. */
int cuMemUnmap(address_t base, size_t size) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    Memory** link = &memories;
    while (*link && !((*link)->segment && (*link)->base == base && (*link)->size == size)) link = &(*link)->next;
    Memory* memory = *link;
    if (memory) {
        Segment* segment = memory->segment;
        *link = memory->next;
        mmap(memory->alias, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (segment->imported) {
            __atomic_sub_fetch(&segment->trailer->opens, 1, __ATOMIC_ACQ_REL);
            open_count--;
        } else if (__atomic_load_n(&segment->trailer->opens, __ATOMIC_ACQUIRE)) {
            violations++;
        }
        leave_segment(segment);
        free(memory);
    }
    pthread_mutex_unlock(&mutex);
    return memory ? OK : INVALID;
}
