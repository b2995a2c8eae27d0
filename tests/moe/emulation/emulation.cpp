// The kernels of aiote.moe on a CPU: a library that launches them by name, and the same scenarios in it and, under
// ThreadSanitizer, as a program. KERNELS is the file of the kernels, which also lies here byte by byte.
#include "cuda_on_cpu.h"
#include KERNELS

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

asm(".section .rodata\n.global kernels_source, kernels_end\n"
    "kernels_source: .incbin \"" KERNELS "\"\nkernels_end: .byte 0\n.previous");
extern "C" const char kernels_source[], kernels_end[];

namespace {
typedef std::function<void(const i64 *)> Call;

template <class... Parameters, size_t... I>
Call call(void (*kernel)(Parameters...), std::index_sequence<I...>)
{
    return [=](const i64 *arguments) { kernel((Parameters)(arguments[I])...); };
}

template <class... Parameters> Call call(void (*kernel)(Parameters...))
{
    return call(kernel, std::index_sequence_for<Parameters...>());
}

#define NAMED(kernel) {#kernel, call(kernel)}
const std::map<std::string, Call> KERNELS_BY_NAME = {
    NAMED(moe_route),     NAMED(moe_places),           NAMED(moe_pack),            NAMED(moe_copy_runs),
    NAMED(moe_describe),
    NAMED(moe_combine_bfloat16), NAMED(moe_combine_float16), NAMED(moe_combine_float32),
};

// The scenarios: each kernel works with a host that gives it what it waits for, and looks once it has raised its flag.

constexpr u32 ROUND = 7;
constexpr unsigned THREADS = 64;
enum { GIVEN = 1, RAISED = 2 };

struct Scene {
    unsigned order;
    u64 digest = 14695981039346656037u;
    bool ended = true;
    u32 words[3] = {}, state[3] = {ROUND, 0, 0};
    std::mt19937 lot{1};

    template <class Number> std::vector<Number> drawn(size_t length, int least, int most)
    {
        std::vector<Number> numbers(length);
        for (Number &one : numbers)
            one = Number(least + int(lot() % unsigned(most - least + 1)));
        return numbers;
    }

    template <class Number> void look(const std::vector<Number> &numbers)
    {
        for (Number number : numbers)
            digest = (digest ^ u64(i64(number))) * 1099511628211u;
    }

    // `give` is what the host does first; `seen` what it does once the kernel has raised its flag.
    void play(unsigned blocks, size_t shared, cpu::Body body, std::function<void()> give, std::function<void()> seen)
    {
        bool given = false;
        words[GIVEN] = words[RAISED] = 0;
        auto host = [&] {
            if (!given) {
                give();
                cpu::store(&words[GIVEN], ROUND, true);
                given = true;
            }
            if (seen && cpu::load(&words[RAISED], true) != ROUND)
                return false;
            if (seen)
                seen();
            return true;
        };
        // The host waits until the kernel runs, so that what does not wait for it reads what is not there yet.
        int turns = 40;
        auto late = [&] { return turns-- <= 0 && host(); };
        ended = cpu::launch(blocks, THREADS, shared, order, body, late) && ended;
    }
};

void routes(Scene &scene)
{
    const i64 tokens = 40, top_k = 5, experts = 100, ranks = 3;
    const size_t shared = 4 * (THREADS / 32) * (1 + experts + ranks);
    auto ids = scene.drawn<i32>(tokens * top_k, -1, 101);
    for (i64 by_rank : {0, 1}) {
        std::vector<i32> out(tokens * top_k), rows(experts), copies(ranks);
        scene.play(
            1, shared,
            [&] {
                moe_route((const u8 *)ids.data(), 4, tokens, top_k, experts, 34, ranks, by_rank, out.data(), rows.data(),
                          copies.data(), nullptr, scene.words, scene.state, 0, RAISED);
            },
            [] {}, [&] { scene.look(out), scene.look(rows), scene.look(copies); });
        if (by_rank)
            continue;
        std::vector<u8> tail(tokens * (4 + 8 * top_k));
        std::vector<float> weights(tokens * top_k, 0.5f), kept(tokens * top_k);
        std::vector<i32> mirror(tokens * top_k), copy_mirror(tokens * top_k);
        std::vector<u32> route(1 + experts + ranks);
        std::vector<i64> lengths(ranks - 1), here(ranks - 1), routed(ranks - 1);
        scene.play(
            2, 0,
            [&] {
                moe_describe((const u8 *)ids.data(), 4, weights.data(), out.data(), out.data(), rows.data(),
                             copies.data(), tokens, top_k, experts, 34, ranks, 1, 1, 50, 16, 64, tokens, tokens * top_k,
                             128, tail.data(), 4 + 8 * top_k, kept.data(), mirror.data(), copy_mirror.data(),
                             route.data(), lengths.data(), here.data(), routed.data(), scene.words, scene.state, RAISED);
            },
            [] {},
            [&] {
                scene.look(route), scene.look(lengths), scene.look(here), scene.look(routed), scene.look(mirror);
                scene.look(copy_mirror);
            });
        scene.look(tail);
    }
}

void places(Scene &scene)
{
    const i64 items = 200, held = 5;
    const size_t shared = 4 * (THREADS / 32) * (1 + held);
    std::vector<i32> ids(items), drawn = scene.drawn<i32>(items, 0, 9), places(items);
    auto base = scene.drawn<i64>(held, 0, 99), room = scene.drawn<i64>(held, 0, 30), seen = scene.drawn<i64>(held, 0, 3);
    scene.play(
        1, shared,
        [&] {
            moe_places(ids.data(), items, 2, held, base.data(), room.data(), places.data(), seen.data(), nullptr,
                       scene.words, scene.state, GIVEN);
        },
        [&] { ids = drawn; }, nullptr);
    scene.look(places), scene.look(seen);
}

void rows(Scene &scene)
{
    const i64 tokens = 6, bytes = 100, lines = 2 * tokens;
    std::vector<u8> x(tokens * bytes), drawn = scene.drawn<u8>(tokens * bytes, 0, 255), sent(lines * bytes);
    std::vector<u8> placed(lines * bytes), sums(tokens * bytes);
    std::vector<i32> at(lines);
    for (i64 i = 0; i < lines; ++i)
        at[i] = i32(i * 5 % lines);
    const std::vector<i64> runs = {0, 6, 5, 5, 11, 1, 6, 0, 6};
    const auto weights = scene.drawn<float>(lines, -3, 3);
    u32 *words = scene.words, *state = scene.state;
    scene.play(
        2, 0,
        [&] {
            moe_pack(sent.data(), bytes, nullptr, 0, 0, 0, at.data(), tokens, 2, x.data(), bytes, bytes, nullptr, 0, 0, 0,
                     nullptr, 0, 0, 0, words, state, GIVEN, RAISED);
        },
        [&] { x = drawn; }, [&] { scene.look(sent); });
    scene.play(
        2, 0,
        [&] {
            moe_copy_runs(placed.data(), bytes, sent.data(), bytes, runs.data(), 3, bytes, words, state, GIVEN, RAISED);
        },
        [] {}, [&] { scene.look(placed); });
    scene.play(
        2, 0,
        [&] {
            moe_combine_bfloat16(sums.data(), bytes, placed.data(), bytes, at.data(), weights.data(), tokens, 2, bytes / 2,
                                 0, words, state, GIVEN, RAISED);
        },
        [] {}, [&] { scene.look(sums); });
}

// Returns false where the kernels hang.
bool scenarios(int without, unsigned order, u64 *digest)
{
    Scene scene{order};
    cpu::without = without;
    routes(scene), places(scene), rows(scene);
    cpu::without = 0;
    *digest = scene.digest;
    return scene.ended;
}
} // namespace

#ifdef CUDA_ON_CPU_THREADS
int main(int, char **arguments)
{
    u64 digest;
    scenarios(atoi(arguments[1]), 0, &digest);
    printf("%llu\n", digest);
}
#else
extern "C" int play(int without, unsigned order, u64 *digest) { return scenarios(without, order, digest); }

// Returns 0, 1 where the kernel hangs, or -1 where there is none of that name.
extern "C" int launch(const char *name, unsigned blocks, unsigned threads, size_t shared, unsigned order,
                      const i64 *arguments)
{
    auto found = KERNELS_BY_NAME.find(name);
    if (found == KERNELS_BY_NAME.end())
        return -1;
    return cpu::launch(blocks, threads, shared, order, [&] { found->second(arguments); }) ? 0 : 1;
}

extern "C" size_t source(const char **begin)
{
    *begin = kernels_source;
    return kernels_end - kernels_source;
}
#endif
