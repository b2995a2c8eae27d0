// The kernels of aiote.moe for rows on a GPU: they number, pack, copy and sum rows, with the same results, bit for bit,
// as aiote_native/kernels/moe.pyx on a CPU. NVRTC compiles this file unchanged. g++ compiles it over an emulation of CUDA
// (tests/moe/emulation), without the few lines that CUDA_ON_CPU leaves out. It needs no header of the toolkit.
//
// Every parameter has 8 bytes, a pointer or an i64, so that a launch is a list of numbers. Rows are lines of bytes at
// any stride. Places are numbers of lines; -1 is no place. Small arrays of numbers are contiguous.
//
// A kernel may wait for a flag and raise another. Flags are words of pinned host memory that only grow: the host sets
// `words[0]` to abort; `words[n]` is the last round in which flag n was raised. `state` is in the GPU's memory:
// `state[0]` is the round, `state[n]` counts the blocks that have ended. Kernels read the round from memory, and no
// word needs a reset between rounds, so a captured graph can be replayed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

#ifndef CUDA_ON_CPU
#define SHARED(name) extern __shared__ __align__(16) u8 name[]

__device__ u32 load_relaxed(const u32 *word)
{
    u32 value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ u32 load_acquire(const u32 *word)
{
    u32 value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ void store_release(u32 *word, u32 value)
{
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ u32 add_acq_rel(u32 *word, u32 value)
{
    u32 before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

// These round to nearest and keep denormals. Intrinsics would not, because cupy compiles with -ftz=true, which makes
// them flush denormals to zero.
__device__ inline float added(float a, float b)
{
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ inline float subtracted(float a, float b)
{
    float difference;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
    return difference;
}

__device__ inline float multiplied(float a, float b)
{
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
#endif

#define KERNEL extern "C" __global__ void
constexpr u32 NONE = 0xffffffffu;
constexpr u32 ALL = 0xffffffffu;

__device__ inline u32 lane() { return threadIdx.x % 32; }
__device__ inline u32 warp() { return threadIdx.x / 32; }
__device__ inline u32 warps() { return blockDim.x / 32; }

// Flags.

// Waits until the host has raised a flag. Returns false in every thread of the block if the host has aborted the round.
__device__ inline bool waited(const u32 *words, const u32 *state, i64 flag)
{
    bool stopped = false;
    if (!flag)
        return true;
    if (threadIdx.x == 0) {
        // Compare by the difference, because rounds wrap.
        while (!stopped && (i32)(load_acquire(&words[flag]) - state[0]) < 0) {
            stopped = load_relaxed(&words[0]) != 0;
            __nanosleep(100);
        }
    }
    return !__syncthreads_or(stopped);
}

// Raises a flag in the last block that ends, once the host can see the writes of all blocks.
__device__ inline void raise(u32 *words, u32 *state, i64 flag)
{
    if (!flag)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (add_acq_rel(&state[flag], 1) == gridDim.x - 1) {
            state[flag] = 0;
            store_release(&words[flag], state[0]);
        }
    }
}

// Numbering: each item gets a number within its kind, in the order of the items. One block does all of it. Each warp
// has a contiguous part of the items, and a line of counters, one for each kind; `stride` is the distance between
// lines.

struct Part {
    i64 first, last;
    __device__ explicit Part(i64 items)
    {
        i64 each = (items + blockDim.x - 1) / blockDim.x * 32;
        first = each * warp() < items ? each * warp() : items;
        last = first + each < items ? first + each : items;
    }
};

template <class Kind> __device__ void count(u32 *counts, i64 items, Kind kind)
{
    const Part part(items);
    for (i64 base = part.first; base < part.last; base += 32) {
        u32 mine = base + lane() < part.last ? kind(base + lane()) : NONE;
        u32 same = __match_any_sync(ALL, mine);
        if (mine != NONE && __popc(same & ((1u << lane()) - 1)) == 0)
            counts[mine] += __popc(same);
        __syncwarp();
    }
}

// Replaces a kind's counters of all warps by the first number of each warp; returns the number after the last one.
__device__ inline u32 begin(u32 *counts, i64 stride, u32 number)
{
    for (u32 w = 0; w < warps(); ++w) {
        u32 here = counts[w * stride];
        counts[w * stride] = number;
        number += here;
    }
    return number;
}

// Lets the numbers of each kind begin after those of the kind before; `sums` has a word for each warp.
__device__ inline void begin_in_order(u32 *counts, i64 stride, i64 kinds, u32 *sums, i32 *totals)
{
    u32 carry = 0;
    for (i64 base = 0; base < kinds; base += blockDim.x) {
        i64 kind = base + threadIdx.x;
        u32 total = 0;
        for (u32 w = 0; kind < kinds && w < warps(); ++w)
            total += counts[w * stride + kind];
        u32 upto = total;
        for (u32 distance = 1; distance < 32; distance *= 2) {
            u32 below = __shfl_up_sync(ALL, upto, distance);
            upto += lane() >= distance ? below : 0;
        }
        if (lane() == 31)
            sums[warp()] = upto;
        __syncthreads();
        u32 number = carry + upto - total;
        for (u32 w = 0; w < warps(); ++w) {
            number += w < warp() ? sums[w] : 0;
            carry += sums[w];
        }
        if (kind < kinds) {
            totals[kind] = (i32)total;
            begin(counts + kind, stride, number);
        }
        __syncthreads();
    }
}

// Calls `take` with each item and its number, which is NONE if the item has no kind.
template <class Kind, class Take> __device__ void number(u32 *counts, i64 items, Kind kind, Take take)
{
    const Part part(items);
    for (i64 base = part.first; base < part.last; base += 32) {
        i64 item = base + lane();
        u32 mine = item < part.last ? kind(item) : NONE;
        u32 same = __match_any_sync(ALL, mine), before = __popc(same & ((1u << lane()) - 1));
        u32 at = mine == NONE ? 0 : counts[mine];
        __syncwarp();
        if (mine != NONE && before == 0)
            counts[mine] = at + __popc(same);
        if (item < part.last)
            take(item, mine == NONE ? NONE : at + before);
        __syncwarp();
    }
}

__device__ inline void clear(u32 *counts, i64 length)
{
    for (i64 i = threadIdx.x; i < length; i += blockDim.x)
        counts[i] = 0;
}

// From ids (tokens, k) of 4 or 8 bytes, computes the rows for each expert, the copies for each rank, and in `out` the
// number of each row in the order (expert, token, k), or, if `by_rank`, of each copy in the order (rank, token). Begins
// a round if `begins`. Shared memory: a word for each warp, and, unless `work` is given, (experts + ranks) words for
// each warp.
KERNEL moe_route(const u8 *ids, i64 id_bytes, i64 tokens, i64 top_k, i64 experts, i64 local, i64 ranks, i64 by_rank,
                 i32 *out, i32 *rows, i32 *copies, u32 *work, u32 *words, u32 *state, i64 begins, i64 raises)
{
    SHARED(memory);
    const i64 kinds = experts + ranks, items = tokens * top_k;
    u32 *sums = (u32 *)memory, *counts = work ? work : sums + warps(), *mine = counts + warp() * kinds;
    auto expert_of = [=](i64 item) {
        i64 id = id_bytes == 8 ? ((const i64 *)ids)[item] : ((const i32 *)ids)[item];
        return 0 <= id && id < experts ? (u32)id : NONE;
    };
    // Returns the first item of the same token that is for the same rank.
    auto first_of = [=](i64 item) {
        u32 expert = expert_of(item);
        for (i64 other = item - item % top_k; other < item; ++other) {
            u32 earlier = expert_of(other);
            if (earlier != NONE && earlier / local == expert / local)
                return other;
        }
        return item;
    };
    auto rank_of = [=](i64 item) {
        u32 expert = expert_of(item);
        return expert != NONE && first_of(item) == item ? (u32)(expert / local) : NONE;
    };
    auto take = [=](i64 item, u32 place) { out[item] = (i32)place; };
    if (begins && threadIdx.x == 0)
        ++state[0];
    clear(counts, warps() * kinds);
    __syncthreads();
    count(mine, items, expert_of);
    count(mine + experts, items, rank_of);
    __syncthreads();
    begin_in_order(counts, kinds, experts, sums, rows);
    begin_in_order(counts + experts, kinds, ranks, sums, copies);
    if (!by_rank) {
        number(mine, items, expert_of, take);
    } else {
        number(mine + experts, items, rank_of, take);
        __syncthreads();
        for (i64 item = threadIdx.x; item < items; item += blockDim.x)
            if (expert_of(item) != NONE && first_of(item) != item)
                out[item] = out[first_of(item)];
    }
    raise(words, state, raises);
}

// Writes the numbers of a round that the host needs, and the tail that travels behind each token. Runs after
// `moe_route` for the same ids. `mirror` gets the numbers of rows, and `copy_mirror`, if given, those of copies by
// rank. `route` gets the total of rows, the rows for each expert, and the copies for each rank; `kept` the weights;
// `tail` for each token its number, ids and weights. For each rank but `me`, from the next higher one on: `lengths`
// gets the bytes to write to it, of at most `most` rows (copies if `by_rank`), `here` where they begin, counted from
// `at`, and `routed` the bytes of the route. All lengths are 0 if an expert has more rows than `of_expert`, or a rank
// more than `of_rank`.
KERNEL moe_describe(const u8 *ids, i64 id_bytes, const float *weights, const i32 *position, const i32 *copy_position,
                    const i32 *rows, const i32 *copies, i64 tokens, i64 top_k, i64 experts, i64 local, i64 ranks,
                    i64 by_rank, i64 me, i64 most, i64 row_bytes, i64 at, i64 of_expert, i64 of_rank, i64 route_bytes,
                    u8 *tail, i64 tail_stride, float *kept, i32 *mirror, i32 *copy_mirror, u32 *route, i64 *lengths,
                    i64 *here, i64 *routed, u32 *words, u32 *state, i64 raises)
{
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, step = gridDim.x * (i64)blockDim.x;
    for (i64 item = first; item < tokens * top_k; item += step) {
        i64 token = item / top_k, slot = item % top_k;
        i64 id = id_bytes == 8 ? ((const i64 *)ids)[item] : ((const i32 *)ids)[item];
        u32 *words_of = (u32 *)(tail + token * tail_stride);
        if (slot == 0)
            words_of[0] = (u32)token;
        words_of[1 + slot] = 0 <= id && id < experts ? (u32)id : NONE;
        words_of[1 + top_k + slot] = __float_as_uint(weights[item]);
        kept[item] = weights[item];
        mirror[item] = position[item];
        if (copy_mirror)
            copy_mirror[item] = copy_position[item];
    }
    for (i64 expert = first; expert < experts; expert += step)
        route[1 + expert] = (u32)rows[expert];
    // The iteration after the last rank's writes the total.
    for (i64 rank = first; rank <= ranks; rank += step) {
        i64 before = 0, count = 0, all = 0;
        bool fits = true;
        for (i64 other = 0; other < ranks; ++other) {
            i64 sum = 0;
            for (i64 expert = other * local; expert < (other + 1) * local && expert < experts; ++expert) {
                sum += rows[expert];
                fits = fits && rows[expert] <= of_expert;
            }
            fits = fits && sum <= of_rank;
            all += sum;
            if (by_rank)
                sum = copies[other];
            before += other < rank ? sum : 0;
            count = other == rank ? sum : count;
        }
        if (rank == ranks) {
            route[0] = (u32)all;
        } else {
            route[1 + experts + rank] = (u32)copies[rank];
            if (rank != me) {
                i64 place = (rank > me ? rank : rank + ranks) - me - 1;
                lengths[place] = fits ? (count < most ? count : most) * row_bytes : 0;
                here[place] = at + before * row_bytes;
                routed[place] = fits ? route_bytes : 0;
            }
        }
    }
    raise(words, state, raises);
}

// From ids (copies, k) of all ranks' experts, computes the place of a row for each id of this rank's `held` experts,
// which begin with `first`; -1 for other ids. An expert's rows begin at `base`, with room for `room` rows. `seen` grows
// by the number of ids of each expert. Shared memory as for `moe_route`, with `held` in place of experts + ranks.
KERNEL moe_places(const i32 *ids, i64 items, i64 first, i64 held, const i64 *base, const i64 *room, i32 *places,
                  i64 *seen, u32 *work, u32 *words, u32 *state, i64 waits)
{
    SHARED(memory);
    u32 *counts = work ? work : (u32 *)memory + warps(), *mine = counts + warp() * held;
    auto expert_of = [=](i64 item) {
        i64 expert = ids[item] - first;
        return 0 <= expert && expert < held ? (u32)expert : NONE;
    };
    if (!waited(words, state, waits))
        return;
    clear(counts, warps() * held);
    __syncthreads();
    count(mine, items, expert_of);
    __syncthreads();
    for (i64 expert = threadIdx.x; expert < held; expert += blockDim.x)
        seen[expert] = begin(counts + expert, held, (u32)seen[expert]);
    __syncthreads();
    number(mine, items, expert_of, [=](i64 item, u32 place) {
        u32 expert = expert_of(item);
        places[item] = expert != NONE && place < room[expert] ? (i32)(base[expert] + place) : -1;
    });
}

// Rows.

template <class Unit> __device__ void copy_as(u8 *to, const u8 *from, i64 units)
{
    for (i64 i = threadIdx.x; i < units; i += blockDim.x)
        ((Unit *)to)[i] = ((const Unit *)from)[i];
}

// Copies bytes with a whole block, in the largest unit that the addresses and the length allow.
__device__ inline void copy(u8 *to, const u8 *from, i64 bytes)
{
    u64 bits = (u64)to | (u64)from | (u64)bytes;
    if (bits % 16 == 0)
        copy_as<uint4>(to, from, bytes / 16);
    else if (bits % 4 == 0)
        copy_as<u32>(to, from, bytes / 4);
    else
        copy_as<u8>(to, from, bytes);
}

// Copies token t, its scales and its tail, to each row that `at` (tokens, k) names. Rows from `first` to `last` are the
// rank's own and go to `own`, from its line 0 on; all others go to `sent`. A token may be in its row already.
KERNEL moe_pack(u8 *sent, i64 sent_stride, u8 *own, i64 own_stride, i64 first, i64 last, const i32 *at, i64 tokens,
                i64 top_k, const u8 *x, i64 x_stride, i64 x_bytes, const u8 *scales, i64 scales_stride,
                i64 scales_bytes, i64 scales_at, const u8 *tail, i64 tail_stride, i64 tail_bytes, i64 tail_at,
                u32 *words, u32 *state, i64 waits, i64 raises)
{
    if (!waited(words, state, waits))
        return;
    for (i64 item = blockIdx.x; item < tokens * top_k; item += gridDim.x) {
        i64 token = item / top_k, place = at[item];
        bool done = place < 0;
        for (i64 other = token * top_k; other < item; ++other)
            done = done || at[other] == place;
        if (done)
            continue;
        u8 *row = first <= place && place < last ? own + (place - first) * own_stride : sent + place * sent_stride;
        copy(row, x + token * x_stride, x_bytes);
        copy(row + scales_at, scales + token * scales_stride, scales_bytes);
        copy(row + tail_at, tail + token * tail_stride, tail_bytes);
    }
    raise(words, state, raises);
}

// Copies the first `bytes` of rows, for each run (row in `to`, row in `source`, count).
KERNEL moe_copy_runs(u8 *to, i64 to_stride, const u8 *source, i64 source_stride, const i64 *runs, i64 length, i64 bytes,
                     u32 *words, u32 *state, i64 waits, i64 raises)
{
    if (!waited(words, state, waits))
        return;
    // Blocks take rows in turn, as if all runs were one.
    i64 next = blockIdx.x;
    for (const i64 *run = runs; run < runs + 3 * length; run += 3) {
        for (; next < run[2]; next += gridDim.x)
            copy(to + (run[0] + next) * to_stride, source + (run[1] + next) * source_stride, bytes);
        next -= run[2];
    }
    raise(words, state, raises);
}

// Sums in float32. The conversions, and the single bit pattern of a NaN, are those of aiote_native/kernels/moe_sums.h.

struct BFloat16 {
    typedef u16 Raw;
    static __device__ float read(u16 raw) { return __uint_as_float((u32)raw << 16); }
    static __device__ u16 round(u32 bits) { return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); }
};

struct Float16 {
    typedef u16 Raw;
    static __device__ float read(u16 raw)
    {
        u32 bits = (u32)(raw & 0x7fff) << 13, exponent = bits & 0x0f800000;
        bits += 112u << 23;
        if (exponent == 0x0f800000)
            bits += 112u << 23;
        else if (exponent == 0)
            bits = __float_as_uint(subtracted(__uint_as_float(bits + (1u << 23)), __uint_as_float(113u << 23)));
        return __uint_as_float(bits | (u32)(raw & 0x8000) << 16);
    }
    static __device__ u16 round(u32 bits)
    {
        u32 sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000)
            return (u16)(sign | 0x7e00);
        if (rest >= 0x47800000)
            return (u16)(sign | 0x7c00);
        if (rest < 0x38800000)
            return (u16)(sign | (__float_as_uint(added(__uint_as_float(rest), 0.5f)) - 0x3f000000));
        return (u16)(sign | ((rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13));
    }
};

struct Float32 {
    typedef u32 Raw;
    static __device__ float read(u32 raw) { return __uint_as_float(raw); }
    static __device__ u32 round(u32 bits) { return bits; }
};

template <class Type, int N> struct alignas(N * sizeof(typename Type::Raw)) Group {
    typename Type::Raw raw[N];
};

// One element at any address.
template <class Type> struct Bytes {
    typedef typename Type::Raw Raw;
    struct {
        u8 bytes[sizeof(Raw)];
        __device__ operator Raw() const
        {
            Raw value = 0;
            for (int i = 0; i < (int)sizeof(Raw); ++i)
                value = (Raw)(value | (Raw)bytes[i] << 8 * i);
            return value;
        }
        __device__ void operator=(Raw value)
        {
            for (int i = 0; i < (int)sizeof(Raw); ++i)
                bytes[i] = (u8)(value >> 8 * i);
        }
    } raw[1];
};

// Each thread sums N adjacent elements of a token. No product is fused with a sum: each operation is rounded by itself.
template <class Type, int N, class Elements>
__device__ void combine_as(u8 *out, i64 out_stride, const u8 *rows, i64 rows_stride, i64 width, const i32 *places,
                           const float *weights, i64 tokens, i64 top_k, i64 accumulate)
{
    const i64 groups = width / N, pieces = (groups + blockDim.x - 1) / blockDim.x;
    for (i64 item = blockIdx.x; item < tokens * pieces; item += gridDim.x) {
        i64 token = item / pieces, group = item % pieces * blockDim.x + threadIdx.x;
        if (group >= groups)
            continue;
        float total[N] = {};
        for (i64 slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
            if (places[slot] < 0)
                continue;
            Elements found = ((const Elements *)(rows + places[slot] * rows_stride))[group];
            float weight = weights ? weights[slot] : 0;
            for (int i = 0; i < N; ++i) {
                float value = Type::read(found.raw[i]);
                total[i] = added(total[i], weights ? multiplied(weight, value) : value);
            }
        }
        Elements *to = (Elements *)(out + token * out_stride) + group;
        Elements sums = {};
        if (accumulate)
            sums = *to;
        for (int i = 0; i < N; ++i) {
            float sum = accumulate ? added(total[i], Type::read(sums.raw[i])) : total[i];
            sums.raw[i] = Type::round(sum != sum ? 0x7fc00000u : __float_as_uint(sum));
        }
        *to = sums;
    }
}

// Sets line i of `out` to the sum over k, in order, of `weights[i, k]` times row `places[i, k]`, skipping -1. Without
// weights it sums the rows unchanged. If `accumulate`, it adds the previous content last. `width` is in elements.
template <class Type, class... Rest>
__device__ void combine(u8 *out, i64 out_stride, const u8 *rows, i64 rows_stride, i64 width, Rest... rest)
{
    constexpr int size = sizeof(typename Type::Raw), wide = 16 / size;
    const u64 bits = (u64)out | (u64)out_stride | (u64)rows | (u64)rows_stride;
    if (bits % 16 == 0 && width % wide == 0)
        combine_as<Type, wide, Group<Type, wide>>(out, out_stride, rows, rows_stride, width, rest...);
    else if (bits % size == 0)
        combine_as<Type, 1, Group<Type, 1>>(out, out_stride, rows, rows_stride, width, rest...);
    else
        combine_as<Type, 1, Bytes<Type>>(out, out_stride, rows, rows_stride, width, rest...);
}

#define COMBINE(name, Type)                                                                                            \
    KERNEL name(u8 *out, i64 out_stride, const u8 *rows, i64 rows_stride, const i32 *places, const float *weights,     \
                i64 tokens, i64 top_k, i64 width, i64 accumulate, u32 *words, u32 *state, i64 waits, i64 raises)       \
    {                                                                                                                  \
        if (!waited(words, state, waits))                                                                              \
            return;                                                                                                    \
        combine<Type>(out, out_stride, rows, rows_stride, width, places, weights, tokens, top_k, accumulate);          \
        raise(words, state, raises);                                                                                   \
    }
COMBINE(moe_combine_bfloat16, BFloat16)
COMBINE(moe_combine_float16, Float16)
COMBINE(moe_combine_float32, Float32)
