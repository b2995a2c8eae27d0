"""What `aiote.moe` does with rows on a CPU: number them, pack them, copy runs of them, and sum them.

Rows are lines of two-dimensional arrays of bytes, whatever they hold; places are numbers of lines, -1 for none. The
caller has checked all numbers, but those that come from peers, which `unfold` checks. Sums are of float32, term after
term in the order of k, each product rounded by itself; a NaN is written as one and the same pattern.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

cdef extern from "moe_sums.h" nogil:
    const int MOE_BFLOAT16, MOE_FLOAT16, MOE_FLOAT32
    int moe_has_avx2()
    void moe_sum(uint8_t*, const uint8_t**, const float*, int, int64_t, int, int, int)

cdef int wide = moe_has_avx2()
cdef dict TYPES = {"bfloat16": MOE_BFLOAT16, "float16": MOE_FLOAT16, "float32": MOE_FLOAT32}


def use_avx2(bint wanted) -> bool:
    """Sum with AVX2 where the processor has it, or in plain C, which gives the same; return whether AVX2 is used."""
    global wide
    wide = wanted and moe_has_avx2()
    return wide


def route(const int64_t[:, :] ids, int64_t experts, int64_t local, bint by_rank, int32_t[:, :] out,
          int32_t[::1] rows, int32_t[::1] copies):
    """Number what tokens ask for, ids (tokens, k), in the order of the experts, or of ranks with copies by rank.

    Fills `out` (tokens, k) with the number of the row, or of the copy, -1 where an id is no expert; a copy that serves
    several k has one number. Fills the rows for each expert and the copies for each rank.
    """
    cdef Py_ssize_t tokens = ids.shape[0], top_k = ids.shape[1], ranks = copies.shape[0], t, k
    cdef int32_t *next_row
    cdef int32_t *seen
    cdef int64_t expert, rank
    cdef Py_ssize_t kinds = ranks if by_rank else experts
    next_row = <int32_t*> calloc(kinds + ranks, sizeof(int32_t))
    if next_row == NULL:
        raise MemoryError()
    seen = next_row + kinds
    with nogil:
        memset(&rows[0], 0, experts * sizeof(int32_t))
        memset(&copies[0], 0, ranks * sizeof(int32_t))
        for t in range(tokens):
            for k in range(top_k):
                expert = ids[t, k]
                if 0 <= expert < experts:
                    rank = expert // local
                    rows[expert] += 1
                    if seen[rank] <= t:
                        seen[rank] = <int32_t> t + 1
                        copies[rank] += 1
        for k in range(1, kinds):
            next_row[k] = next_row[k - 1] + (copies[k - 1] if by_rank else rows[k - 1])
        memset(seen, 0, ranks * sizeof(int32_t))
        for t in range(tokens):
            for k in range(top_k):
                expert = ids[t, k]
                if not 0 <= expert < experts:
                    out[t, k] = -1
                elif by_rank:
                    rank = expert // local
                    if seen[rank] <= t:
                        seen[rank] = <int32_t> t + 1
                        next_row[rank] += 1
                    out[t, k] = next_row[rank] - 1
                else:
                    out[t, k] = next_row[expert]
                    next_row[expert] += 1
        free(next_row)


def pack(uint8_t[:, :] sent, uint8_t[:, :] own, int64_t first, int64_t last, const int32_t[:, :] at,
         const uint8_t[:, :] x, const uint8_t[:, :] scales, const uint8_t[:, :] tail, int64_t scales_at,
         int64_t tail_at):
    """Make rows of tokens: token t goes to each row that `at` (tokens, k) names, its scales and tail behind it.

    Rows from `first` to `last` are the rank's own and go to `own`, from its line 0 on; others to `sent`. What a row has
    besides is left as it is.
    """
    cdef Py_ssize_t t, k, j
    cdef int32_t place
    cdef uint8_t *row
    cdef bint done
    with nogil:
        for t in range(at.shape[0]):
            for k in range(at.shape[1]):
                place = at[t, k]
                if place < 0:
                    continue
                done = False
                for j in range(k):
                    done = done or at[t, j] == place
                if done:
                    continue
                if first <= place < last:
                    row = &own[0, 0] + (place - first) * own.strides[0]
                else:
                    row = &sent[0, 0] + place * sent.strides[0]
                # Tokens may lie in these very rows.
                if x.shape[1]:
                    memmove(row, &x[0, 0] + t * x.strides[0], x.shape[1])
                if scales.shape[1]:
                    memmove(row + scales_at, &scales[0, 0] + t * scales.strides[0], scales.shape[1])
                if tail.shape[1]:
                    memcpy(row + tail_at, &tail[0, 0] + t * tail.strides[0], tail.shape[1])


def copy_runs(uint8_t[:, :] to, const uint8_t[:, :] source, const int64_t[:, :] runs, int64_t nbytes):
    """Copy the first bytes of rows, for each run (row there, row here, count)."""
    cdef Py_ssize_t i
    cdef int64_t line, there, here
    with nogil:
        for i in range(runs.shape[0]):
            there, here = runs[i, 0], runs[i, 1]
            if nbytes == to.strides[0] == source.strides[0]:
                memcpy(&to[0, 0] + there * nbytes, &source[0, 0] + here * nbytes, runs[i, 2] * nbytes)
                continue
            for line in range(runs[i, 2]):
                memcpy(&to[0, 0] + (there + line) * to.strides[0], &source[0, 0] + (here + line) * source.strides[0],
                       nbytes)


def unfold(uint8_t[:, :] to, const uint8_t[:, :] source, int64_t nbytes, const int32_t[:, :] ids, int64_t first,
           const int64_t[:] base, const int64_t[:] room, int32_t[:, :] places, int64_t[::1] seen):
    """Copy each copy of `source` to the place of every expert that it is for: ids (copies, k), of all ranks' experts.

    Those of this rank begin at `first`; the rows of each lie from `base` on, and there is `room` for so many. Fills
    `places` (copies, k), -1 where there is none, and `seen` with how many rows each expert had, dropped ones too.
    """
    cdef Py_ssize_t line, k, held = base.shape[0]
    cdef int64_t expert
    with nogil:
        for line in range(ids.shape[0]):
            for k in range(ids.shape[1]):
                places[line, k] = -1
                expert = <int64_t> ids[line, k] - first
                if not 0 <= expert < held:
                    continue
                if seen[expert] < room[expert]:
                    places[line, k] = <int32_t> (base[expert] + seen[expert])
                    memcpy(&to[0, 0] + places[line, k] * to.strides[0], &source[0, 0] + line * source.strides[0],
                           nbytes)
                seen[expert] += 1


def combine(uint8_t[:, :] out, const uint8_t[:, :] rows, const int32_t[:, :] places, const float[:, :] weights,
            str dtype not None, bint accumulate, const uint8_t[:, :] own=None):
    """Sum rows: line i of `out` becomes the sum over k of `weights[i, k]` times row `places[i, k]`, skipping -1.

    Without weights rows are summed as they are. `accumulate` adds what is there already, last. With `own` a place of -2
    is its row 0, -3 its row 1, and so on.
    """
    cdef Py_ssize_t i, k, top_k = places.shape[1]
    cdef bint has_own = own is not None
    cdef int kind = TYPES[dtype], count
    cdef bint weighted = weights is not None
    cdef int64_t width = out.shape[1] // (4 if kind == MOE_FLOAT32 else 2)
    cdef const uint8_t **found = <const uint8_t**> malloc((top_k + 1) * sizeof(void*))
    cdef float *factors = <float*> malloc((top_k + 1) * sizeof(float))
    if found == NULL or factors == NULL:
        free(found)
        free(factors)
        raise MemoryError()
    with nogil:
        for i in range(places.shape[0]):
            count = 0
            for k in range(top_k):
                if places[i, k] >= 0 or (has_own and places[i, k] < -1):
                    if places[i, k] >= 0:
                        found[count] = &rows[0, 0] + places[i, k] * rows.strides[0]
                    else:
                        found[count] = &own[0, 0] - (<int64_t> places[i, k] + 2) * own.strides[0]
                    if weighted:
                        factors[count] = weights[i, k]
                    count += 1
            moe_sum(&out[0, 0] + i * out.strides[0], found, factors if weighted else NULL, count, width, kind,
                    accumulate, wide)
        free(found)
        free(factors)
