/* Sockets: the batches received and sent in one call. */
#ifndef SKYMEMORY_UDP_H
#define SKYMEMORY_UDP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fast.h"

#ifndef __linux__
#error "recvmmsg, UDP_SEGMENT and UDP_GRO are Linux's; elsewhere the Python twin serves"
#endif

#include <arpa/inet.h>
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
};

/* A host and a port, of IPv4 or IPv6. Family and port lie at the same place in both. */
typedef union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} Endpoint;

typedef union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
} Control;

/* What one recvmmsg brought: message i lies at i * SLOT_BYTES of the scratch buffer. Free it, whatever came. */
typedef struct {
    struct mmsghdr *messages;
    struct iovec *parts;
    Endpoint *from;
    Control *controls;
    int count;
} Inbox;

/* What is to be sent: segment i is headers[i * width] followed, where there are payloads, by payloads[i]. */
typedef struct {
    const char *headers;
    size_t headers_bytes, width;
    const Py_buffer *payloads;
    size_t count;
} Outgoing;

/* A run that lies end to end in memory, where it goes (family 0: nowhere), and how many of its packets the kernel took. */
typedef struct {
    const char *data;
    size_t size, segment;
    Endpoint to;
    size_t sent;
} Whole;

static inline socklen_t sky_endpoint_bytes(const Endpoint *endpoint)
{
    return endpoint->any.sa_family == AF_INET6 ? sizeof endpoint->v6 : sizeof endpoint->v4;
}

static inline int sky_port(const Endpoint *endpoint)
{
    return ntohs(endpoint->v4.sin_port);
}

static inline int sky_same_host(const Endpoint *one, const Endpoint *other)
{
    if (one->any.sa_family != other->any.sa_family)
        return 0;
    return one->any.sa_family == AF_INET6 ? !memcmp(&one->v6.sin6_addr, &other->v6.sin6_addr, sizeof one->v6.sin6_addr)
                                          : one->v4.sin_addr.s_addr == other->v4.sin_addr.s_addr;
}

static inline size_t sky_whole_packets(const Whole *run)
{
    return (run->size + run->segment - 1) / run->segment;
}

/* Parse a host's address: 0 if it is none, and *endpoint is then undefined. */
int sky_parse_host(const char *host, int port, Endpoint *endpoint);
/* The same, with an exception for a host or a port that cannot be. */
int sky_parse_endpoint(const char *host, int port, Endpoint *endpoint);
/* Buffers are full or a signal came: not an error. */
int sky_try_later(int error);
/* All that waits, never waiting itself; -1 with an exception. */
int sky_receive(int fd, const Py_buffer *scratch, Py_ssize_t slots, Inbox *inbox);
void sky_inbox_free(Inbox *inbox);
/* The segment length the kernel names, or the whole when it names none; at least 1. */
Py_ssize_t sky_segment_of(struct msghdr *header, Py_ssize_t size);
Py_ssize_t sky_segment_bytes(const Inbox *inbox, int i);
/* All messages as recv_batch returns them. */
PyObject *sky_arrivals(Inbox *inbox);
/* Send all; the number of segments taken. *error is what stopped it, 0 if nothing did. Runs without the lock. */
size_t sky_send_all(int fd, Endpoint *to, const Outgoing *out, int *error);
/* Send each, in as few calls as can be; what full buffers stop stays unsent. Returns how many of them the network refused,
 * which are lost. Runs without the lock. */
int sky_send_wholes(int fd, Whole *runs, size_t count);
/* The same with the lock held: the number as send_batch returns it, or an exception. */
PyObject *sky_send_held(int fd, Endpoint *to, const Outgoing *out);

#endif
