from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aiote_native.engine.provider cimport NativeEndpoint
from aiote_native.engine.structs cimport Completion, Post, WorkRequest
from aiote_native.libfabric.device cimport FabricMemory, LibfabricDevice
from aiote_native.libfabric.fabric cimport fi_addr_t, fid_av, fid_cq, fid_ep, fid_fabric

cdef enum:
    MAX_WAITING = 1024   # receives of messages, and messages that come in pieces
    HEADER = 16

# The header of each piece of a message on the wire.
cdef struct PieceHeader:
    uint32_t number
    uint32_t offset
    uint32_t total
    uint32_t length

# A receive of the NIC.
cdef struct Buffer:
    void* context[8]
    Srd* home
    uint8_t* memory
    Buffer* next

# A send of the NIC, for one piece.
cdef struct PieceSend:
    void* context[8]
    uint8_t* memory
    WorkRequest* wr
    PieceSend* next

cdef struct Wanted:
    WorkRequest* wr
    uint8_t* memory
    uint64_t length
    uint64_t got
    uint32_t number
    uint32_t total

cdef struct Outgoing:
    WorkRequest* wr
    uint32_t pieces
    int status
    int provider_errno

cdef struct Srd:
    fid_ep* ep           # NULL once it is shut
    fi_addr_t peer
    uint8_t* memory
    void* desc
    uint32_t buffers
    uint32_t sends
    uint64_t mtu
    Buffer* posted
    Buffer* spare
    Buffer* held         # pieces of messages that have no receive yet
    PieceSend* pieces
    PieceSend* spare_sends
    PieceSend* unsent    # pieces that the NIC had no room for
    uint32_t numbered
    Wanted wanted[MAX_WAITING]
    uint32_t wanted_count
    Outgoing outgoing[MAX_WAITING]

cdef size_t srd_bytes(uint32_t buffers, uint32_t sends, uint64_t mtu) noexcept nogil
cdef Srd* srd_new(fid_ep* ep, uint8_t* memory, void* desc, uint32_t buffers, uint32_t sends,
                  uint64_t mtu) except NULL
cdef void srd_shut(Srd* self) noexcept nogil
cdef void srd_free(Srd* self) noexcept nogil
cdef int srd_repost(Srd* self) noexcept nogil
cdef int srd_want(Srd* self, const Post* args, WorkRequest* wr) noexcept nogil
cdef int srd_send(Srd* self, const Post* args, WorkRequest* wr) noexcept nogil
cdef int srd_poll(Srd* self, fid_cq* cq, Completion* out, int capacity) noexcept nogil

cdef enum:
    NAME_BYTES = 256

ctypedef char bytes_of_name[NAME_BYTES]

cdef struct FabricEndpoint:
    fid_ep* ep
    fid_av* av
    fid_cq* cq
    fid_fabric* fabric
    fi_addr_t peer
    bint inserted
    bint shared_av
    Srd* srd
    uint64_t write_flags
    uint64_t read_flags
    uint64_t send_flags
    bint waits
    bint disconnects
    bint counts  # the data of an immediate has room for the number of parts that it counts for
    bytes_of_name name
    size_t name_length
    bytes_of_name peer_name
    size_t peer_name_length
    FabricEndpoint* twin
    bint severed
    FabricEndpoint* next
    FabricEndpoint* prev

cdef class LibfabricEndpoint(NativeEndpoint):
    cdef LibfabricDevice device
    cdef FabricEndpoint* impl
    cdef bytes mark
    cdef bytes peer_address
    cdef bint tcp
    cdef FabricMemory pool
    cdef object pool_memory
    cdef int open_srd(self) except -1
    cdef void close_pool(self) noexcept
    cdef int open_endpoint(self, bint waits) except -1
    cdef int open(self, bint waits, size_t queue) except -1
