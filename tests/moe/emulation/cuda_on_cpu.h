// Runs a CUDA kernel on a CPU: what aiote/moe/kernels.cuh uses of CUDA, over fibres, one for each CUDA thread, or, with
// CUDA_ON_CPU_THREADS, over threads of the system, for ThreadSanitizer.
//
// All blocks live at once, so a block may wait for another, or for the host. A fibre runs until it has to wait. With
// `order` 0 the lowest that can run is next, so that the first warp gets as far ahead as it can; with 1 the highest; with
// others all have a turn, in an order drawn by lot. Memory that no barrier orders is then read too early or too late.
// ThreadSanitizer sees no more order than a GPU promises: __match_any_sync and __shfl_up_sync exchange values alone.
//
// `without` is a line of the kernels whose barrier, acquire or release is left out: a test must notice.
// Not emulated: divergence within a warp, the GPU's own reordering, occupancy. Addresses are checked by UBSan.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#ifdef CUDA_ON_CPU_THREADS
#include <condition_variable>
#include <mutex>
#include <sched.h>
#include <thread>
#else
#include <ucontext.h>
#endif
#define CUDA_ON_CPU

struct alignas(16) uint4 { uint32_t x, y, z, w; };

namespace cpu {
struct Dim { uint32_t x; };
inline int without = 0;
inline bool kept(int line) { return line != without; }

#ifdef CUDA_ON_CPU_THREADS
inline void pause() { sched_yield(); }

// Orders the memory of those that meet.
struct Barrier {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned need = 0, come = 0, turn = 0;
    void wait()
    {
        std::unique_lock<std::mutex> lock(mutex);
        unsigned mine = turn;
        if (++come == need) {
            come = 0;
            ++turn;
            changed.notify_all();
        } else {
            changed.wait(lock, [&] { return turn != mine; });
        }
    }
};

// Does not, for ThreadSanitizer: it takes relaxed operations and fences for no order.
struct Meeting {
    std::atomic<unsigned> need{0}, come{0}, turn{0};
    void wait()
    {
        unsigned mine = turn.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (come.fetch_add(1, std::memory_order_relaxed) + 1 == need.load(std::memory_order_relaxed)) {
            come.store(0, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            turn.fetch_add(1, std::memory_order_relaxed);
        } else {
            while (turn.load(std::memory_order_relaxed) == mine)
                pause();
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
};
#else
struct Barrier {
    unsigned need = 0, come = 0, turn = 0;
    void wait();
};
typedef Barrier Meeting;
#endif

struct Warp {
    Barrier barrier;
    Meeting meeting;
    std::atomic<uint32_t> values[32];
};

struct Block {
    Dim id;
    Barrier barrier;
    std::unique_ptr<Warp[]> warps;
    std::vector<uint32_t> votes;
    std::vector<uint4> shared;
};

struct Thread {
    Dim id;
    Block *block;
    Warp *warp;
#ifndef CUDA_ON_CPU_THREADS
    ucontext_t context;
    Barrier *waits;
    unsigned turn;
    bool ended, paused;
#endif
};

inline Dim block_size, grid_size;
typedef std::function<void()> Body;
typedef std::function<bool()> Host;  // called again and again until it returns true

#ifdef CUDA_ON_CPU_THREADS
inline thread_local Thread *current;

inline bool run(std::vector<Thread> &threads, unsigned, const Body &body, const Host &host)
{
    std::vector<std::thread> running;
    for (Thread &one : threads)
        running.emplace_back([&body, &one] { current = &one; body(); });
    while (host && !host())
        pause();
    for (std::thread &one : running)
        one.join();
    return true;
}
#else
inline Thread *current;
inline ucontext_t scheduler;
inline const Body *body_now;
inline uint64_t progress;
constexpr size_t STACK = 64 << 10;
constexpr int IDLE_TURNS = 1000;

inline void leave() { swapcontext(&current->context, &scheduler); }

inline void pause()
{
    current->paused = true;
    leave();
}

inline void Barrier::wait()
{
    if (++come == need) {
        come = 0;
        ++turn;
        ++progress;
        return;
    }
    current->waits = this;
    current->turn = turn;
    leave();
}

inline void entry()
{
    (*body_now)();
    current->ended = true;
    ++progress;
    leave();
}

// Returns false where nobody gets any further.
inline bool run(std::vector<Thread> &threads, unsigned order, const Body &body, const Host &host)
{
    static std::vector<std::unique_ptr<char[]>> stacks;
    std::vector<Thread *> alive;
    std::mt19937 lot(order);
    while (stacks.size() < threads.size())
        stacks.emplace_back(new char[STACK]);
    body_now = &body;
    for (Thread &one : threads) {
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = stacks[alive.size()].get();
        one.context.uc_stack.ss_size = STACK;
        makecontext(&one.context, entry, 0);
        alive.push_back(&one);
    }
    if (order == 1)
        std::reverse(alive.begin(), alive.end());
    bool hosted = !host;
    for (int idle = 0; !alive.empty() || !hosted; ++idle) {
        uint64_t before = progress;
        if (order > 1)
            std::shuffle(alive.begin(), alive.end(), lot);
        for (size_t i = 0; i < alive.size();) {
            Thread *one = alive[i++];
            if (one->ended || one->paused || (one->waits && one->waits->turn == one->turn))
                continue;
            one->waits = nullptr;
            current = one;
            swapcontext(&scheduler, &one->context);
            hosted = hosted || host();
            if (order <= 1)
                i = 0;
        }
        hosted = hosted || host();
        alive.erase(std::remove_if(alive.begin(), alive.end(), [](Thread *one) { return one->ended; }), alive.end());
        for (Thread *one : alive)
            one->paused = false;
        if (progress != before)
            idle = 0;
        if (idle == IDLE_TURNS)
            return false;
    }
    return true;
}
#endif

inline bool launch(unsigned blocks, unsigned threads, size_t shared, unsigned order, const Body &body,
                   const Host &host = nullptr)
{
    std::vector<std::unique_ptr<Block>> made;
    std::vector<Thread> all(size_t(blocks) * threads);
    block_size.x = threads;
    grid_size.x = blocks;
    for (unsigned b = 0; b < blocks; ++b) {
        made.emplace_back(new Block{});
        Block *block = made.back().get();
        block->id.x = b;
        block->barrier.need = threads;
        block->votes.resize(threads);
        block->shared.resize(shared / sizeof(uint4) + 1);
        memset(static_cast<void *>(block->shared.data()), 0xCD, shared);
        block->warps.reset(new Warp[threads / 32]);
        for (unsigned t = 0; t < threads; ++t) {
            Warp *warp = &block->warps[t / 32];
            warp->barrier.need = 32;
            warp->meeting.need = 32;
            Thread *one = &all[size_t(b) * threads + t];
            one->id.x = t;
            one->block = block;
            one->warp = warp;
        }
    }
    return run(all, order, body, host);
}

inline void sync_block(int line)
{
    if (kept(line))
        current->block->barrier.wait();
}

inline void sync_warp(int line)
{
    if (kept(line))
        current->warp->barrier.wait();
}

inline int sync_block_or(int mine, int line)
{
    Block *block = current->block;
    if (!kept(line))
        return mine;
    block->votes[current->id.x] = mine;
    block->barrier.wait();
    int any = 0;
    for (uint32_t vote : block->votes)
        any |= vote;
    block->barrier.wait();
    return any;
}

template <class Result> uint32_t exchange(uint32_t mine, Result result)
{
    Warp *warp = current->warp;
    uint32_t values[32];
    warp->values[current->id.x % 32].store(mine, std::memory_order_relaxed);
    warp->meeting.wait();
    for (int i = 0; i < 32; ++i)
        values[i] = warp->values[i].load(std::memory_order_relaxed);
    warp->meeting.wait();
    return result(values);
}

inline uint32_t load(const uint32_t *word, bool acquire)
{
    return acquire ? __atomic_load_n(word, __ATOMIC_ACQUIRE) : __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void store(uint32_t *word, uint32_t value, bool release)
{
    release ? __atomic_store_n(word, value, __ATOMIC_RELEASE) : __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

inline uint32_t add(uint32_t *word, uint32_t value, bool ordered)
{
    return ordered ? __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL) : __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
} // namespace cpu

#define __global__
#define __device__
#define SHARED(name) u8 *name = reinterpret_cast<u8 *>(cpu::current->block->shared.data())
#define threadIdx (cpu::current->id)
#define blockIdx (cpu::current->block->id)
#define blockDim (cpu::block_size)
#define gridDim (cpu::grid_size)
#define __syncthreads() cpu::sync_block(__LINE__)
#define __syncthreads_or(mine) cpu::sync_block_or(mine, __LINE__)
#define __syncwarp() cpu::sync_warp(__LINE__)
#define load_relaxed(word) cpu::load(word, false)
#define load_acquire(word) cpu::load(word, cpu::kept(__LINE__))
#define store_release(word, value) cpu::store(word, value, cpu::kept(__LINE__))
#define add_acq_rel(word, value) cpu::add(word, value, cpu::kept(__LINE__))

inline uint32_t __match_any_sync(uint32_t, uint32_t mine)
{
    return cpu::exchange(mine, [mine](const uint32_t *values) {
        uint32_t same = 0;
        for (int i = 0; i < 32; ++i)
            same |= uint32_t(values[i] == mine) << i;
        return same;
    });
}

inline uint32_t __shfl_up_sync(uint32_t, uint32_t mine, unsigned distance)
{
    unsigned lane = cpu::current->id.x % 32;
    return cpu::exchange(mine, [=](const uint32_t *values) { return lane >= distance ? values[lane - distance] : mine; });
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline void __nanosleep(unsigned) { cpu::pause(); }
inline float added(float a, float b) { return a + b; }
inline float subtracted(float a, float b) { return a - b; }
inline float multiplied(float a, float b) { return a * b; }
inline float __uint_as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
inline uint32_t __float_as_uint(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
