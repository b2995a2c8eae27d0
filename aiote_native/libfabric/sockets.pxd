# The sockets under a tcp endpoint. libfabric does not expose them, so they are found by the addresses of their ends.
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <arpa/inet.h>
    #include <dirent.h>
    #include <linux/tcp.h>
    #include <stddef.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/socket.h>
    #include <unistd.h>
    static int aiote_same(const struct sockaddr_in* one, const void* name, size_t length) {
        const struct sockaddr_in* other = (const struct sockaddr_in*)name;
        return length >= sizeof(*other) && one->sin_family == AF_INET && one->sin_port == other->sin_port
            && one->sin_addr.s_addr == other->sin_addr.s_addr;
    }
    /* Shut down every connected socket that is connected to `peer` or was accepted at `own`. */
    static void aiote_shutdown_sockets(const void* own, size_t own_length, const void* peer, size_t peer_length) {
        DIR* directory = opendir("/proc/self/fd");
        struct dirent* entry;
        if (directory == NULL) return;
        while ((entry = readdir(directory)) != NULL) {
            struct sockaddr_in here, there;
            socklen_t here_length = sizeof(here), there_length = sizeof(there);
            int fd = atoi(entry->d_name);
            if (entry->d_name[0] == '.' || fd == dirfd(directory)) continue;
            if (getpeername(fd, (struct sockaddr*)&there, &there_length) != 0) continue;
            if (getsockname(fd, (struct sockaddr*)&here, &here_length) != 0) continue;
            if (aiote_same(&there, peer, peer_length) || aiote_same(&here, own, own_length)) shutdown(fd, SHUT_RDWR);
        }
        closedir(directory);
    }
    /* Return how many bytes the sockets connected to `peer` or accepted at `own` have received or seen acknowledged. */
    static uint64_t aiote_moved(const void* own, size_t own_length, const void* peer, size_t peer_length) {
        DIR* directory = opendir("/proc/self/fd");
        struct dirent* entry;
        uint64_t sum = 0;
        if (directory == NULL) return 0;
        while ((entry = readdir(directory)) != NULL) {
            struct sockaddr_in here, there;
            struct tcp_info info;
            socklen_t here_length = sizeof(here), there_length = sizeof(there), length = sizeof(info);
            int fd = atoi(entry->d_name);
            if (entry->d_name[0] == '.' || fd == dirfd(directory)) continue;
            if (getpeername(fd, (struct sockaddr*)&there, &there_length) != 0) continue;
            if (getsockname(fd, (struct sockaddr*)&here, &here_length) != 0) continue;
            if (!aiote_same(&there, peer, peer_length) && !aiote_same(&here, own, own_length)) continue;
            if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
            if (length < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received)) continue;
            sum += info.tcpi_bytes_acked + info.tcpi_bytes_received;
        }
        closedir(directory);
        return sum;
    }
    /* Close the connections that were accepted at `own`, after its listener was closed. */
    static void aiote_close_accepted(const void* own, size_t own_length) {
        DIR* directory = opendir("/proc/self/fd");
        struct dirent* entry;
        if (directory == NULL) return;
        while ((entry = readdir(directory)) != NULL) {
            struct sockaddr_in here;
            socklen_t length = sizeof(here), flag_length = sizeof(int);
            int fd = atoi(entry->d_name), listens = 1;
            if (entry->d_name[0] == '.' || fd == dirfd(directory)) continue;
            if (getsockname(fd, (struct sockaddr*)&here, &length) != 0 || !aiote_same(&here, own, own_length)) continue;
            if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &flag_length) == 0 && !listens) close(fd);
        }
        closedir(directory);
    }
    """
    void aiote_shutdown_sockets(const void*, size_t, const void*, size_t) noexcept nogil
    void aiote_close_accepted(const void*, size_t) noexcept nogil
    uint64_t aiote_moved(const void*, size_t, const void*, size_t) noexcept nogil
