/* A C library whose recvmsg changes the first byte of large data, to be preloaded: what a damaged NIC may do. Small data
   stays whole, so that frames can be read. */
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/types.h>

enum { LARGE = 4096 };

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
    static ssize_t (*receive)(int, struct msghdr*, int);
    if (!receive) receive = (ssize_t(*)(int, struct msghdr*, int))dlsym(RTLD_NEXT, "recvmsg");
    ssize_t got = receive(fd, message, flags);
    const struct iovec* first = message->msg_iov;
    if (got >= LARGE && first->iov_len >= LARGE) *(unsigned char*)first->iov_base ^= 0x80;
    return got;
}
