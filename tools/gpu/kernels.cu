/* Kernels of tools/gpu, compiled by NVRTC. No header is needed. Each that is late waits by the GPU's own clock. */
typedef unsigned char byte;
typedef unsigned int word;
typedef unsigned long long number;

__device__ static void late(number us) {
    number begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < us * 1000);
}

/* Fill bytes; each block is later than the one before, the last one by so many microseconds. */
extern "C" __global__ void fill(byte* to, number length, word value, number us) {
    late(us * (blockIdx.x + 1) / gridDim.x);
    for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < length; i += (number)gridDim.x * blockDim.x)
        to[i] = (byte)value;
}

/* Add 1 to each byte, as late as that. */
extern "C" __global__ void bump_bytes(byte* to, number length, number us) {
    late(us * (blockIdx.x + 1) / gridDim.x);
    for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < length; i += (number)gridDim.x * blockDim.x)
        to[i] += 1;
}

/* Store a number, after so many microseconds. */
extern "C" __global__ void store(number* to, number value, number us) {
    late(us);
    *(volatile number*)to = value;
}

/* Add 1 to a number. */
extern "C" __global__ void bump(number* to) { *(volatile number*)to += 1; }

/* Count the bytes that have another value. */
extern "C" __global__ void differing(const byte* from, number length, word value, word* count) {
    word found = 0;
    for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < length; i += (number)gridDim.x * blockDim.x)
        found += from[i] != (byte)value;
    if (found) atomicAdd(count, found);
}

/* Break the context: by a trap, or by a store to where nothing is. */
extern "C" __global__ void broken(number us, word by_address) {
    late(us);
    if (by_address)
        *(volatile word*)(number)0x10 = 1;
    else
        asm volatile("trap;");
}

/* -- a model whose layers each read a matrix, as a decode step does */

__device__ static word mixed(word x) {
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ x >> 16;
}

/* Make weights between -scale and scale. */
extern "C" __global__ void weights(float* to, number count, word seed, float scale) {
    for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < count; i += (number)gridDim.x * blockDim.x)
        to[i] = ((float)mixed((word)i + seed) / 2147483648.0f - 1.0f) * scale;
}

/* Make a step's input. */
extern "C" __global__ void begin(float* x, word count, word step) {
    word i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = (float)mixed(i + step * 0x9e3779b9u) / 2147483648.0f - 1.0f;
}

/* A matrix by a vector: a warp for each row, always added up in the same order. `in` is a multiple of 128. */
extern "C" __global__ void product(const float4* matrix, const float4* x, float* y, word rows, word in) {
    word row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float4* from = matrix + (number)row * (in / 4);
    float sum = 0;
    for (word i = lane; i < in / 4; i += 32) {
        float4 a = from[i], b = x[i];
        sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (!lane) y[row] = sum;
}

/* Write a layer's part of the cache, and the next layer's input. */
extern "C" __global__ void written(const float* y, word rows, float* x, word in, word* cache, word count) {
    word i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) cache[i] = mixed(__float_as_uint(y[i % rows]) ^ i);
    if (i < in) x[i] = y[i] / (1.0f + fabsf(y[i]));
}
