/* What array libraries call of the driver and aiote does not, in the stand-in for it (cuda.c, which includes this).

   numba-cuda and cuda-core find every function through cuGetProcAddress_v2, by a name without its version. A function
   that is not there is told as missing, so a test that needs one more fails by its name. */
#include <dlfcn.h>

enum { NOT_FOUND = 500, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, UNIFIED = 41, POOLS = 115, PRIORITIES = 78 };

int cuGetProcAddress_v2(const char* name, void** out, int at_most, uint64_t flags, int* status) {
    static const char* const versions[] = {"_v3", "_v2", ""};
    static void* self;
    Dl_info info;
    char full[80];
    (void)at_most, (void)flags;
    if (!self && dladdr((void*)(uintptr_t)cuGetProcAddress_v2, &info)) self = dlopen(info.dli_fname, RTLD_NOW);
    *out = NULL;
    for (size_t i = 0; i < 3 && !*out; i++) {
        snprintf(full, sizeof full, "%s%s", name, versions[i]);
        *out = dlsym(self, full);
    }
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}

/* -- devices */

int cuDeviceGetCount(int* out) {
    CALL
    *out = DEVICES;
    return OK;
}

int cuDeviceGet(int* out, int ordinal) {
    CALL
    *out = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? OK : BAD_DEVICE;
}

int cuDeviceGetName(char* out, int length, int device) {
    CALL
    snprintf(out, (size_t)length, "stand-in %d", device);
    return OK;
}

int cuDeviceGetUuid_v2(char* out, int device) {
    CALL
    snprintf(out, 16, "stand-in-%d", device);
    return OK;
}

int cuDeviceTotalMem_v2(size_t* out, int device) {
    CALL
    (void)device;
    *out = (size_t)1 << 34;
    return OK;
}

int cuMemGetInfo_v2(size_t* left, size_t* all) {
    CALL_IN_CONTEXT
    *left = *all = (size_t)1 << 34;
    return OK;
}

static int attribute_of(int attribute) {
    if (attribute == COMPUTE_MAJOR) return 9;
    return attribute == UNIFIED || attribute == PRIORITIES;
}

int cuMemAllocHost_v2(void** out, size_t length) {
    CALL_IN_CONTEXT
    return cuMemHostAlloc(out, length, 0);
}

enum { MEMORY_TYPE = 2, MANAGED = 8, OF_HOST = 1, OF_DEVICE = 2 };

/* Of memory that the driver does not know, each attribute is 0. */
int cuPointerGetAttributes(unsigned count, const int* attributes, void** out, address_t address) {
    CALL
    pthread_mutex_lock(&mutex);
    const Memory* memory = find(address);
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == MEMORY_TYPE) *(unsigned*)out[i] = !memory ? 0 : memory->host ? OF_HOST : OF_DEVICE;
        else if (attributes[i] == MANAGED) *(int*)out[i] = 0;
        else if (attributes[i] == 9) *(int*)out[i] = memory ? memory->device : -2;
        else if (attributes[i] == 1) *(void**)out[i] = memory ? context_of(memory->device) : NULL;
    }
    pthread_mutex_unlock(&mutex);
    return OK;
}

/* -- contexts */

int cuCtxGetCurrent(void** out) {
    CALL
    *out = depth ? context_of(current()) : NULL;
    return OK;
}

int cuCtxSetCurrent(void* context) {
    CALL
    if (depth) depth--;
    if (context) contexts[depth++] = (int)((uintptr_t)context - 0x1000);
    return OK;
}

int cuCtxGetDevice(int* out) {
    CALL_IN_CONTEXT
    *out = current();
    return OK;
}

int cuCtxGetId(void* context, unsigned long long* out) {
    CALL
    *out = context ? (uintptr_t)context : (uintptr_t)context_of(current());
    return OK;
}

int cuCtxSynchronize(void) {
    CALL_IN_CONTEXT
    pthread_mutex_lock(&mutex);
    int code = finish(named(NULL));
    pthread_mutex_unlock(&mutex);
    return code;
}

/* -- copies that end before their calls do */

static int copied_now(address_t to, address_t from, size_t length) {
    int code = cuMemcpyAsync(to, from, length, NULL);
    return code ? code : cuCtxSynchronize();
}

int cuMemcpyHtoD_v2(address_t to, const void* from, size_t length) {
    CALL_IN_CONTEXT
    return copied_now(to, (address_t)from, length);
}

int cuMemcpyDtoH_v2(void* to, address_t from, size_t length) {
    CALL_IN_CONTEXT
    return copied_now((address_t)to, from, length);
}

int cuMemcpyHtoDAsync_v2(address_t to, const void* from, size_t length, void* stream) {
    CALL_IN_CONTEXT
    return cuMemcpyAsync(to, (address_t)from, length, stream);
}

int cuMemcpyDtoHAsync_v2(void* to, address_t from, size_t length, void* stream) {
    CALL_IN_CONTEXT
    return cuMemcpyAsync((address_t)to, from, length, stream);
}

int cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
    CALL_IN_CONTEXT
    (void)priority;
    return cuStreamCreate(out, flags);
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    CALL_IN_CONTEXT
    *least = *greatest = 0;
    return OK;
}
