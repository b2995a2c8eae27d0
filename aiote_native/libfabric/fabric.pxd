# Declarations of libfabric's headers, with upstream's names. The functions that the headers define inline call through
# the ops tables of the objects. The exported functions are found by dlopen (device.pyx) and never linked.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from posix.types cimport off_t  # noqa: F401

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "<rdma/fabric.h>" nogil:
    enum: FI_MSG, FI_RMA, FI_READ, FI_WRITE, FI_RECV, FI_SEND, FI_REMOTE_READ, FI_REMOTE_WRITE
    const uint64_t FI_TRANSMIT
    const uint64_t FI_REMOTE_CQ_DATA
    const uint64_t FI_COMPLETION
    const uint64_t FI_DELIVERY_COMPLETE
    const uint64_t FI_MORE
    const uint64_t FI_SOURCE
    const uint64_t FI_CONTEXT
    const uint64_t FI_CONTEXT2
    const uint64_t FI_RX_CQ_DATA
    const uint64_t FI_NUMERICHOST
    const uint64_t FI_LOCAL_COMM
    const uint64_t FI_REMOTE_COMM
    const int FI_GETWAIT
    const int FI_ENABLE
    uint32_t FI_VERSION(uint32_t major, uint32_t minor)
    uint32_t FI_MAJOR(uint32_t version)
    uint32_t FI_MINOR(uint32_t version)
    uint64_t FI_ADDR_UNSPEC
    ctypedef uint64_t fi_addr_t

    enum fi_ep_type:
        FI_EP_RDM
    enum fi_av_type:
        FI_AV_TABLE
    enum fi_threading:
        FI_THREAD_DOMAIN
        FI_THREAD_SAFE
    enum: FI_ADDR_STR, FI_SOCKADDR_IN
    const int FI_MR_LOCAL
    const int FI_MR_VIRT_ADDR
    const int FI_MR_ALLOCATED
    const int FI_MR_PROV_KEY
    const int FI_MR_ENDPOINT
    const int FI_MR_RMA_EVENT

    struct fid:
        pass
    struct fid_fabric:
        fid fid
    struct fid_domain:
        fid fid
    struct fid_mr:
        fid fid
    struct fid_av:
        fid fid
    struct fid_cq:
        fid fid
    struct fid_ep:
        fid fid

    struct fi_tx_attr:
        uint64_t caps, mode, op_flags, msg_order
        size_t inject_size, size, iov_limit, rma_iov_limit
    struct fi_rx_attr:
        uint64_t caps, mode, op_flags, msg_order
        size_t size, iov_limit
    struct fi_ep_attr:
        fi_ep_type type
        uint32_t protocol, protocol_version
        size_t max_msg_size
    struct fi_domain_attr:
        char* name
        fi_threading threading
        int mr_mode
        size_t mr_key_size, cq_data_size, ep_cnt, cq_cnt
        uint64_t caps, mode
    struct fi_fabric_attr:
        char* name
        char* prov_name
        uint32_t prov_version, api_version

    struct fi_pci_attr:
        uint16_t domain_id
        uint8_t bus_id, device_id, function_id
    union fi_bus_union "":
        fi_pci_attr pci
    enum fi_bus_type:
        FI_BUS_PCI
    struct fi_bus_attr:
        fi_bus_type bus_type
        fi_bus_union attr
    enum fi_link_state:
        FI_LINK_UNKNOWN
        FI_LINK_DOWN
        FI_LINK_UP
    struct fi_link_attr:
        size_t mtu, speed
        fi_link_state state
    struct fid_nic:
        fi_bus_attr* bus_attr
        fi_link_attr* link_attr

    struct fi_info:
        fi_info* next
        uint64_t caps, mode
        uint32_t addr_format
        size_t src_addrlen, dest_addrlen
        void* src_addr
        void* dest_addr
        fi_tx_attr* tx_attr
        fi_rx_attr* rx_attr
        fi_ep_attr* ep_attr
        fi_domain_attr* domain_attr
        fi_fabric_attr* fabric_attr
        fid_nic* nic

    int fi_close(fid* fid)
    int fi_control(fid* fid, int command, void* arg)

cdef extern from "<rdma/fi_errno.h>" nogil:
    enum: FI_EAGAIN, FI_EAVAIL, FI_ENOKEY, FI_ECANCELED, FI_ENODATA

cdef extern from "<rdma/fi_eq.h>" nogil:
    enum fi_wait_obj:
        FI_WAIT_NONE
        FI_WAIT_FD
    enum fi_cq_format:
        FI_CQ_FORMAT_DATA
    struct fi_cq_attr:
        size_t size
        uint64_t flags
        fi_cq_format format
        fi_wait_obj wait_obj
    struct fi_cq_data_entry:
        void* op_context
        uint64_t flags
        size_t len
        void* buf
        uint64_t data
    struct fi_cq_err_entry:
        void* op_context
        uint64_t flags
        size_t len
        void* buf
        uint64_t data
        int err, prov_errno
        void* err_data
        size_t err_data_size
    ssize_t fi_cq_read(fid_cq* cq, void* buf, size_t count)
    ssize_t fi_cq_readerr(fid_cq* cq, fi_cq_err_entry* buf, uint64_t flags)
    int fi_trywait(fid_fabric* fabric, fid** fids, int count)

cdef extern from "<rdma/fi_domain.h>" nogil:
    struct fi_av_attr:
        fi_av_type type
        size_t count
        uint64_t flags
    int fi_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context)
    int fi_cq_open(fid_domain* domain, fi_cq_attr* attr, fid_cq** cq, void* context)
    int fi_av_open(fid_domain* domain, fi_av_attr* attr, fid_av** av, void* context)
    int fi_av_remove(fid_av* av, fi_addr_t* fi_addr, size_t count, uint64_t flags)
    int fi_av_insert(fid_av* av, const void* addr, size_t count, fi_addr_t* fi_addr, uint64_t flags, void* context)
    int fi_mr_reg(fid_domain* domain, const void* buf, size_t length, uint64_t access, uint64_t offset,
                  uint64_t requested_key, uint64_t flags, fid_mr** mr, void* context)
    int fi_mr_bind(fid_mr* mr, fid* bfid, uint64_t flags)
    int fi_mr_enable(fid_mr* mr)
    void* fi_mr_desc(fid_mr* mr)
    uint64_t fi_mr_key(fid_mr* mr)

cdef extern from "<rdma/fi_endpoint.h>" nogil:
    int fi_endpoint(fid_domain* domain, fi_info* info, fid_ep** ep, void* context)
    int fi_ep_bind(fid_ep* ep, fid* bfid, uint64_t flags)
    int fi_enable(fid_ep* ep)
    ssize_t fi_recv(fid_ep* ep, void* buf, size_t length, void* desc, fi_addr_t src_addr, void* context)
    ssize_t fi_send(fid_ep* ep, const void* buf, size_t length, void* desc, fi_addr_t dest_addr, void* context)
    struct fi_msg:
        const iovec* msg_iov
        void** desc
        size_t iov_count
        fi_addr_t addr
        void* context
        uint64_t data
    ssize_t fi_sendmsg(fid_ep* ep, const fi_msg* msg, uint64_t flags)

cdef extern from "<rdma/fi_cm.h>" nogil:
    int fi_getname(fid* fid, void* addr, size_t* addrlen)

cdef extern from "<rdma/fi_rma.h>" nogil:
    struct fi_rma_iov:
        uint64_t addr
        size_t len
        uint64_t key
    struct fi_msg_rma:
        const iovec* msg_iov
        void** desc
        size_t iov_count
        fi_addr_t addr
        const fi_rma_iov* rma_iov
        size_t rma_iov_count
        void* context
        uint64_t data
    ssize_t fi_writemsg(fid_ep* ep, const fi_msg_rma* msg, uint64_t flags)
    ssize_t fi_readmsg(fid_ep* ep, const fi_msg_rma* msg, uint64_t flags)
