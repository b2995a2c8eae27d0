# Copying into a ring a page of the system at a time, while the next one is fetched: a processor's own prefetcher does
# not go over a page's end. 1.1 times as fast where the pages come from memory (512 x 16K).
#
# Copying out of a ring past the caches. What arrives is not read again soon (a cache of tokens goes to a GPU, or waits
# its turn), while the ring and the sender's memory are: left in the caches, they are copied 1.2 to 1.9 times as fast
# (64 x 16K and 64 x 64K). What stays is what is likely to be looked at next, of less than `streamed` bytes, or to be
# in a cache as it is (`Stream.cached`).
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
        /* Such stores are in no order with others: a count must not be seen before what it counts. */
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
