# `aiote_copy_in` copies into a ring, one page of the system at a time, and prefetches the next page meanwhile, because
# a processor's own prefetcher stops at the end of a page. It is 1.1 times as fast if the bytes come from memory (512 x
# 16K).
#
# `aiote_copy_out` copies out of a ring past the caches. The copied bytes are not read again soon (a cache of tokens
# goes to a GPU, or waits its turn), while the ring and the sender's memory are. With these left in the caches, copying
# is 1.2 to 1.9 times as fast (64 x 16K and 64 x 64K). Bytes go through the caches if they are fewer than `streamed`,
# because they are likely to be read next, or if their memory is likely to be in a cache already (`Stream.cached`).
cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static void aiote_copy_in(void* to, const void* from, size_t length, const void* next) {
        const size_t page = 4096;
        char* target = to;
        const char* source = from;
        while (length) {
            size_t part = length < page ? length : page;
            const char* ahead = length > page ? source + page : (const char*)next;
            if (ahead != NULL && part == page)
                for (size_t line = 0; line < page; line += 64) __builtin_prefetch(ahead + line);
            memcpy(target, source, part);
            target += part;
            source += part;
            length -= part;
        }
    }
    #if defined(__SSE2__)
    #include <emmintrin.h>
    static void aiote_copy_past(void* to, const void* from, size_t length) {
        __m128i* line = (__m128i*)to;
        const __m128i* source = (const __m128i*)from;
        size_t lines = length / 64;
        while (lines--) {
            __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(line, a);
            _mm_stream_si128(line + 1, b);
            _mm_stream_si128(line + 2, c);
            _mm_stream_si128(line + 3, d);
            source += 4;
            line += 4;
        }
        /* These stores are not ordered with others, and a count must not be visible before the bytes that it counts. */
        _mm_sfence();
        memcpy(line, source, length % 64);
    }
    static void aiote_copy_out(void* to, const void* from, size_t length, size_t streamed) {
        if (length >= streamed && !((uintptr_t)to & 15)) aiote_copy_past(to, from, length);
        else memcpy(to, from, length);
    }
    #else
    #define aiote_copy_out(to, from, length, streamed) memcpy((to), (from), (length))
    #endif
    """
    void aiote_copy_in(void*, const void*, size_t, const void*) noexcept nogil
    void aiote_copy_out(void*, const void*, size_t, size_t) noexcept nogil
