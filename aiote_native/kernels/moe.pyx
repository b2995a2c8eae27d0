"""The row operations of `aiote.moe` on a CPU: number, plan, pack and sum rows, and copy runs of them.

Rows are lines of two-dimensional arrays of bytes, whatever the bytes mean; places are numbers of lines, -1 for none.
The caller has checked all numbers except those that come from peers, which `unfold` checks. Sums are in float32, term
after term in the order of k, with each product rounded by itself; every NaN is written as one and the same pattern.
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
    """Sum with AVX2 where the processor has it, or in plain C, with the same results; return whether AVX2 is used."""
    global wide
    wide = wanted and moe_has_avx2()
    return wide


def route(const int64_t[:, :] ids, int64_t experts, int64_t local, *, bint by_rank, int32_t[:, :] out,
          int32_t[::1] rows, int32_t[::1] copies):
    """Number the experts that tokens ask for, `ids` (tokens, k): rows in the order of the experts, or, `by_rank`,
    copies in the order of the ranks.

    Fills `out` (tokens, k) with the number of the row, or of the copy; -1 where an id is no expert. A copy that serves
    several k has one number. Fills `rows` with the number of rows for each expert, and `copies` with the number of
    copies for each rank.
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


def lay_out(const int64_t[:, ::1] experts, const int64_t[:, ::1] copies, *, int64_t rows, int64_t align,
            bint grouped, bint whole, int64_t[:, :, :, ::1] tables, int64_t[:, :, ::1] places,
            int64_t[:, :, ::1] pairs) -> tuple:
    """Lay out a round as the reference, `aiote.moe.plan.RoundPlan`, does, from the rows for each expert (ranks,
    experts), and the copies for each rank (ranks, ranks) or None. Return the demand and whether rows overflow.

    Fills `tables` (4, ranks, ranks, experts of a rank): by_rank, first, before, kept; `places` (2, ranks, experts of a
    rank): base, taken; `pairs` (4, ranks, ranks): rows, start, answer with a reply for each row, kept_rows.
    """
    cdef Py_ssize_t ranks = tables.shape[1], local = tables.shape[3], known = experts.shape[1], s, t, j
    cdef int64_t count, sum_before, row, copy, end, room, demand = 0
    cdef bint overflows = False
    with nogil:
        for t in range(ranks):
            end = 0
            for j in range(local):
                sum_before = 0
                for s in range(ranks):
                    count = experts[s, t * local + j] if t * local + j < known else 0
                    tables[0, s, t, j] = count
                    tables[2, s, t, j] = sum_before
                    sum_before += count
                room = rows if grouped else rows - end
                places[0, t, j] = j * rows if grouped else 0 if whole else min(end, rows)
                places[1, t, j] = sum_before if whole else min(max(room, 0), sum_before)
                overflows = overflows or places[1, t, j] < sum_before
                demand = max(demand, sum_before if grouped else end + sum_before if sum_before else 0)
                end += (sum_before + align - 1) // align * align
        for s in range(ranks):
            row = copy = 0
            for t in range(ranks):
                pairs[1, s, t] = row if copies is None else copy
                pairs[2, s, t] = row
                pairs[0, s, t] = -row
                pairs[3, s, t] = 0
                for j in range(local):
                    tables[1, s, t, j] = row
                    row += tables[0, s, t, j]
                    count = min(max(places[1, t, j] - tables[2, s, t, j], 0), tables[0, s, t, j])
                    tables[3, s, t, j] = count
                    pairs[3, s, t] += count
                pairs[0, s, t] += row
                if copies is not None:
                    copy += copies[s, t]
    return demand, overflows


def find_runs(const int64_t[:, :, :, ::1] tables, const int64_t[:, :, ::1] places, Py_ssize_t source,
              Py_ssize_t target, int64_t[:, ::1] out, int64_t[::1] ends) -> None:
    """Find the runs of a source's rows at each rank, or, where `source` is -1, of each rank's rows at a target.

    Fills `out` (runs, 3), which has room for a run of each expert of all ranks, and `ends` with the end of each rank's
    runs in it.
    """
    cdef Py_ssize_t ranks = tables.shape[1], i, j, s, t, found = 0
    with nogil:
        for i in range(ranks):
            s = i if source < 0 else source
            t = i if source >= 0 else target
            for j in range(tables.shape[3]):
                if tables[3, s, t, j] > 0:
                    out[found, 0] = places[0, t, j] + tables[2, s, t, j]
                    out[found, 1] = tables[1, s, t, j] - tables[1, s, t, 0]
                    out[found, 2] = tables[3, s, t, j]
                    found += 1
            ends[i] = found


def pack(uint8_t[:, :] sent, uint8_t[:, :] own, int64_t first, int64_t last, const int32_t[:, :] at,
         const uint8_t[:, :] x, *, const uint8_t[:, :] scales, const uint8_t[:, :] tail, int64_t scales_at=0,
         int64_t tail_at=0):
    """Make rows of tokens: copy token t to each row that `at` (tokens, k) names, with its scales and tail behind it.

    Rows from `first` to `last` are the rank's own and go to `own`, from its line 0 on; the others go to `sent`. Other
    bytes of a row stay as they are.
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
                # memmove, because tokens may lie in these very rows.
                if x.shape[1]:
                    memmove(row, &x[0, 0] + t * x.strides[0], x.shape[1])
                if scales.shape[1]:
                    memmove(row + scales_at, &scales[0, 0] + t * scales.strides[0], scales.shape[1])
                if tail.shape[1]:
                    memcpy(row + tail_at, &tail[0, 0] + t * tail.strides[0], tail.shape[1])


def copy_runs(uint8_t[:, :] to, const uint8_t[:, :] source, const int64_t[:, :] runs, int64_t nbytes):
    """Copy the first `nbytes` of each row, for each run (row there, row here, count)."""
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


def copy_rows(uint8_t[:, :] to, const uint8_t[:, :] source, const int64_t[::1] there, const int64_t[::1] here,
              int64_t nbytes):
    """Copy the first `nbytes` of row `here[i]` to row `there[i]`, for each i. All stores are done when this returns.

    Raises IndexError, before the first copy, for a row that does not exist or is shorter: `to` may be memory of another
    process.
    """
    cdef Py_ssize_t i
    cdef bint inside = there.shape[0] == here.shape[0] and 0 <= nbytes <= min(to.shape[1], source.shape[1])
    with nogil:
        for i in range(there.shape[0] if inside else 0):
            inside = inside and 0 <= there[i] < to.shape[0] and 0 <= here[i] < source.shape[0]
        if inside:
            for i in range(there.shape[0]):
                memcpy(&to[0, 0] + there[i] * to.strides[0], &source[0, 0] + here[i] * source.strides[0], nbytes)
    if not inside:
        raise IndexError("copy_rows: a row lies outside of its memory")


def unfold(uint8_t[:, :] to, const uint8_t[:, :] source, int64_t nbytes, const int32_t[:, :] ids, int64_t first,
           const int64_t[:] base, *, const int64_t[:] room, int32_t[:, :] places, int64_t[::1] seen):
    """Copy each line of `source` to the places of the experts that it is for: `ids` (copies, k), among all ranks'
    experts.

    The experts of this rank begin at `first`. The rows of each lie from `base` on, with `room` for that many. Fills
    `places` (copies, k), -1 where there is none, and `seen` with how many rows each expert had, dropped ones included.
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
            str dtype not None, bint accumulate, *, const uint8_t[:, :] own=None):
    """Sum rows: line i of `out` becomes the sum over k of `weights[i, k]` times row `places[i, k]`, skipping -1.

    Without weights the rows are summed as they are. `accumulate` adds the old values of `out`, last. With `own`, a
    place of -2 is its row 0, -3 its row 1, and so on.
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
