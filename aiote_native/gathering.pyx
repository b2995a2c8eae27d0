"""Gather several parts of a transfer in one work request, on rails whose provider takes a list of SGEs for each.

A page that is a message of its own costs a header, an acknowledgement and a completion over tcp, and a system call over
shm. Gathered pages share these: a work request takes up to `max_sge` SGEs, and parts that are neighbours in both
memories share one. An immediate carries, beside its value, the number of parts that it counts for, so gathering never
changes a count.

Only whole parts of one transfer are gathered, in order, and no part waits for others to come.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memset

from array import array

from aiote_native.structs cimport MAX_SGE, OP_WRITE, Sge


cdef inline uint64_t index_of(const int64_t* index, uint64_t part) noexcept nogil:
    return part if index == NULL else <uint64_t> index[part]


cdef inline bint gathers(const Op* op) noexcept nogil:
    """Return whether each part is one stripe of bytes that lie somewhere. Reads are not gathered, because streams ask
    for one range each.
    """
    return (op.opcode == OP_WRITE and op.parts > 1 and op.split.head_count + op.split.tail_count == 1
            and op.part_bytes > 0 and op.local_address != 0 and op.remote_base != NULL)


cdef void gather(const Op* op, const Channel* channel, uint64_t most, uint64_t bytes_most, Post* args) noexcept nogil:
    """Add the parts that follow the described one, up to `most` parts or `bytes_most` bytes in all."""
    cdef uint64_t size = op.part_bytes
    cdef uint64_t local, remote
    cdef uint64_t at = op.part + 1
    cdef int max_sge = channel.max_sge if size >= channel.gathers_from else 1
    cdef Sge last
    if not gathers(op):
        return
    last.local = <uint8_t*> args.local
    last.remote = args.remote
    last.length = args.length
    while at < op.parts and args.parts < most and args.payload + size <= bytes_most:
        local = op.local_address + index_of(op.local_index, at) * op.local_stride
        remote = (op.remote_base[channel.remote_rail] + op.remote_offset
                  + index_of(op.remote_index, at) * op.remote_stride)
        if <uint64_t> last.local + last.length == local and last.remote + last.length == remote:
            last.length += size
        elif args.more_sge + 1 < max_sge:
            args.more_sge += 1
            last.local = <uint8_t*> local
            last.remote = remote
            last.length = size
        else:
            return
        if args.more_sge:
            args.more[args.more_sge - 1] = last
        else:
            args.length = last.length
        args.parts += 1
        args.payload += size
        at += 1


cdef uint64_t room_of(const Channel* channel, const Post* args) noexcept nogil:
    """Return how many bytes may be in flight on a channel where the request is to be posted."""
    cdef uint64_t room = 0
    if args.opcode == OP_WRITE and channel.ops.room != NULL:
        room = channel.ops.room(channel.impl, args.desc, args.key)
    return room if room else channel.window


def plan(uint64_t page, list local, list remote, int max_sge, uint64_t most, uint64_t bytes_most) -> list[list[tuple]]:
    """Return the SGEs (local, remote, length) of each work request for pages at these offsets, as `gather` makes them.

    Offsets are in bytes. A request takes up to `most` pages, and more than one only up to `bytes_most` bytes in all.
    Raises ValueError for lists of different lengths, and for more SGEs than there may be.
    """
    cdef uint64_t count = len(local)
    local_index = array("q", local)
    remote_index = array("q", remote)
    cdef uint64_t base = 0
    cdef Channel channel
    cdef Post args
    cdef Op op
    cdef int i
    if len(remote) != count or not 1 <= max_sge <= MAX_SGE:
        raise ValueError(
            f"{count} local and {len(remote)} remote offsets, max_sge={max_sge}: expected as many of each and "
            f"max_sge from 1 to {MAX_SGE}")
    memset(&channel, 0, sizeof(channel))
    memset(&op, 0, sizeof(op))
    channel.max_sge = max_sge
    op.parts, op.part_bytes, op.split.tail_count = count, page, 1
    # The local memory begins at address 1, because 0 means that there is none.
    op.local_address = op.local_stride = op.remote_stride = 1
    op.local_index = <const int64_t*> <uint64_t> local_index.buffer_info()[0]
    op.remote_index = <const int64_t*> <uint64_t> remote_index.buffer_info()[0]
    op.remote_base = &base
    out = []
    while op.part < count:
        args.local, args.remote = <void*> <uint64_t> (1 + local[op.part]), remote[op.part]
        args.length = args.payload = page
        args.parts, args.more_sge = 1, 0
        gather(&op, &channel, most, bytes_most, &args)
        request = [(<uint64_t> args.local - 1, args.remote, args.length)]
        for i in range(args.more_sge):
            request.append((<uint64_t> args.more[i].local - 1, args.more[i].remote, args.more[i].length))
        out.append(request)
        op.part += args.parts
    return out
