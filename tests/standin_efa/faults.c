/* What tests ask for and count, by ctypes: all of it is of this process. */
#include "standin.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#define EXPORTED __attribute__((visibility("default")))

static atomic_long faults[NICS][FAULTS];
static atomic_long counts[COUNTED];
static struct device *devices;
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

long fault_of(const struct device *device, enum fault fault) { return faults[device->nic % NICS][fault]; }

bool strikes(struct device *device, enum fault fault) {
    long of_1000 = fault_of(device, fault);
    return of_1000 && draw(device, 1000) < (uint64_t)of_1000;
}

enum damage damage;
static int lenient = -1;
static const char *const strictnesses[STRICTNESSES] = {"order", "receives", "overflow", "discard", "writes",
                                                      "wait", "qkey", "reuse", "messages", "rights", "late", "inject"};

bool strict(enum strictness which) { return (int)which != lenient; }

/* What a process has from its start on. */
__attribute__((constructor)) static void begin(void) {
    static const char *const names[] = {"", "short", "twice", "early"};
    const char *asked = getenv("EFA_STANDIN_DAMAGE");
    for (int kind = SHORT; asked != NULL && kind <= EARLY; kind++)
        if (!strcmp(asked, names[kind])) damage = kind;
    asked = getenv("EFA_STANDIN_LENIENT");
    for (int which = 0; asked != NULL && which < STRICTNESSES; which++)
        if (!strcmp(asked, strictnesses[which])) lenient = which;
    if (asked != NULL && *asked && lenient < 0) abort(); /* a name that is wrong must not pass for strict */
    for (int nic = 0; nic < NICS; nic++) faults[nic][DUPLICATE] = setting("EFA_STANDIN_DUPLICATE", 0);
}

void count(enum counted what) { counts[what]++; }

void devices_add(struct device *device) {
    pthread_mutex_lock(&devices_lock);
    device->next = devices;
    devices = device;
    pthread_mutex_unlock(&devices_lock);
}

void devices_remove(struct device *device) {
    struct device **at = &devices;
    pthread_mutex_lock(&devices_lock);
    while (*at != device) at = &(*at)->next;
    *at = device->next;
    pthread_mutex_unlock(&devices_lock);
}

/* What a closed device sent is on its way still: another one of this process brings it, if there is one. */
void leave_to_network(struct device *device) {
    struct out **end;
    pthread_mutex_lock(&devices_lock);
    if (devices != NULL) {
        pthread_mutex_lock(&devices->lock);
        for (end = &devices->out; *end != NULL;) end = &(*end)->next;
        *end = device->out;
        devices->waiting += device->waiting;
        device->out = NULL;
        pthread_mutex_unlock(&devices->lock);
        wake(devices);
    }
    pthread_mutex_unlock(&devices_lock);
}

/* Each queue is looked at again, for what was hidden may be to be read now. */
static void announce(struct device *device) {
    pthread_mutex_lock(&device->lock);
    for (struct endpoint *self = device->endpoints; self != NULL; self = self->next) announce_queue(self->queue);
    pthread_mutex_unlock(&device->lock);
    wake(device);
}

EXPORTED void efa_standin_fault(int nic, int fault, long value) {
    for (int i = 0; i < NICS; i++)
        if (nic < 0 || nic == i) faults[i][fault] = value;
    pthread_mutex_lock(&devices_lock);
    for (struct device *device = devices; device != NULL; device = device->next)
        if (nic < 0 || nic == device->nic) announce(device);
    pthread_mutex_unlock(&devices_lock);
}

/* Put every pair of a NIC into the state of errors: what is under way ends flushed, and nothing comes or goes. */
EXPORTED void efa_standin_break(int nic) {
    pthread_mutex_lock(&devices_lock);
    for (struct device *device = devices; device != NULL; device = device->next) {
        if (nic >= 0 && nic != device->nic) continue;
        pthread_mutex_lock(&device->lock);
        for (struct endpoint *self = device->endpoints; self != NULL; self = self->next) break_pair(self);
        pthread_mutex_unlock(&device->lock);
    }
    pthread_mutex_unlock(&devices_lock);
}

EXPORTED long efa_standin_count(int what) { return counts[what]; }

static long unread(const struct endpoint *self) {
    int bytes = 0;
    return ioctl(self->socket, FIONREAD, &bytes) == 0 ? bytes : 0;
}

/* What is open: endpoints (0), registrations (1), entries of address vectors (2), packets that wait (3), work that is not
 * over (4), bytes that came and were not looked at (5). */
EXPORTED long efa_standin_open(int what) {
    long found = 0;
    pthread_mutex_lock(&devices_lock);
    for (struct device *device = devices; device != NULL; device = device->next) {
        pthread_mutex_lock(&device->lock);
        for (struct endpoint *self = device->endpoints; self != NULL; self = self->next)
            found += what == 0 ? 1 : what == 4 ? (long)self->posted : what == 5 ? unread(self) : 0;
        for (struct memory *self = device->memories; what == 1 && self != NULL; self = self->next) found++;
        for (struct vector *self = device->vectors; what == 2 && self != NULL; self = self->next)
            for (size_t i = 0; i < self->top; i++) found += self->used[i];
        if (what == 3) found += (long)device->waiting;
        pthread_mutex_unlock(&device->lock);
    }
    pthread_mutex_unlock(&devices_lock);
    return found;
}
