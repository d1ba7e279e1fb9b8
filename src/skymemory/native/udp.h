/* What the calls on sockets share (udp.c, landing.c, packets.c, slices.c). Define _GNU_SOURCE before including it. */
#ifndef SKYMEMORY_UDP_H
#define SKYMEMORY_UDP_H

#include "fast.h"

#ifndef __linux__
#error "recvmmsg, UDP_SEGMENT and UDP_GRO are Linux's; elsewhere the Python twin serves"
#endif

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef UDP_GRO /* younger than some C libraries' headers */
#define SOL_UDP 17
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

enum {
    SLOT_BYTES = 65536,
    MAX_RUN_BYTES = 65507,
    MAX_RUN_SEGMENTS = 64,
};

typedef union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
} Control;

/* What is to be sent: segment i is headers[i * width] followed, where there are payloads, by payloads[i]. */
typedef struct {
    const char *headers;
    size_t headers_bytes, width;
    const Py_buffer *payloads;
    size_t count;
} Outgoing;

/* udp.c: the number of segments taken, or an exception. */
PyObject *sky_send_held(int fd, struct sockaddr_in *to, const Outgoing *out);

static inline int sky_try_later(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == EINTR;
}

/* The segment length the kernel names, or the whole when it names none; at least 1. */
static inline Py_ssize_t sky_segment_of(struct msghdr *header, Py_ssize_t size)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO && c->cmsg_len >= CMSG_LEN(sizeof(int))) {
            int segment;
            memcpy(&segment, CMSG_DATA(c), sizeof segment);
            if (segment > 0)
                return segment;
        }
    }
    return size > 0 ? size : 1;
}

#endif
