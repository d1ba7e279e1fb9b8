#define _GNU_SOURCE
#include "udp.h"

#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef UDP_GRO /* younger than some C libraries' headers */
#define SOL_UDP 17
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

enum { RUNS_A_CALL = 16, PARTS = 1024 /* of a message, as many as the kernel takes */ };

typedef union {
    size_t align; /* as a cmsghdr, which ends in an array of no length */
    char bytes[CMSG_SPACE(sizeof(int))];
} control;

/* The receive buffer, one for all sockets, so that it stays small and in the cache. */
static uint8_t scratch[UDP_SLOTS][UDP_SLOT_BYTES];

static bool try_later(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == EINTR;
}

static bool no_offload(int error) {
    return error == EINVAL || error == EIO || error == EOPNOTSUPP || error == EMSGSIZE || error == ENOPROTOOPT;
}

static uint32_t ask_buffer(int fd, int option, int forced) {
    const int wanted = UDP_BUFFER_BYTES;
    int granted = 0;
    socklen_t size = sizeof granted;
    (void)setsockopt(fd, SOL_SOCKET, option, &wanted, sizeof wanted);
    (void)getsockopt(fd, SOL_SOCKET, option, &granted, &size);
    if (granted < 2 * wanted) { /* beyond the system's limit, if permitted */
        (void)setsockopt(fd, SOL_SOCKET, forced, &wanted, sizeof wanted);
        size = sizeof granted;
        (void)getsockopt(fd, SOL_SOCKET, option, &granted, &size);
    }
    return granted > 0 ? (uint32_t)granted : 0U;
}

int udp_open(const udp_endpoint *address, uint32_t *receive_bytes, uint32_t *send_bytes) {
    const int on = 1;
    const int fd = socket(address->any.sa_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    *receive_bytes = ask_buffer(fd, SO_RCVBUF, SO_RCVBUFFORCE);
    *send_bytes = ask_buffer(fd, SO_SNDBUF, SO_SNDBUFFORCE);
    (void)setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on); /* without it, runs come in pieces */
    if (address->any.sa_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(fd, &address->any, udp_endpoint_bytes(address)) < 0) {
        const int error = errno;
        (void)close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static size_t segment_of(struct msghdr *header, size_t bytes) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c != NULL; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO && c->cmsg_len >= CMSG_LEN(sizeof(int))) {
            int segment = 0;
            memcpy(&segment, CMSG_DATA(c), sizeof segment);
            if (segment > 0)
                return (size_t)segment;
        }
    }
    return bytes > 0 ? bytes : 1;
}

unsigned udp_receive(int fd, udp_arrival arrivals[UDP_SLOTS]) {
    static struct mmsghdr messages[UDP_SLOTS];
    static struct iovec parts[UDP_SLOTS];
    static udp_endpoint from[UDP_SLOTS];
    static control controls[UDP_SLOTS];
    for (unsigned i = 0; i < UDP_SLOTS; i++) {
        struct msghdr *header = &messages[i].msg_hdr;
        parts[i] = (struct iovec){scratch[i], UDP_SLOT_BYTES};
        memset(header, 0, sizeof *header);
        header->msg_iov = &parts[i];
        header->msg_iovlen = 1;
        header->msg_name = &from[i];
        header->msg_namelen = sizeof from[i];
        header->msg_control = &controls[i];
        header->msg_controllen = sizeof controls[i];
    }
    const int count = recvmmsg(fd, messages, UDP_SLOTS, MSG_DONTWAIT, NULL);
    for (int i = 0; i < count; i++) {
        udp_arrival *arrival = &arrivals[i];
        arrival->packets = scratch[i];
        arrival->bytes = messages[i].msg_len;
        arrival->segment_bytes = segment_of(&messages[i].msg_hdr, messages[i].msg_len);
        arrival->from = from[i];
    }
    return count > 0 ? (unsigned)count : 0U;
}

bool udp_has_more(int fd) {
    int waiting = 0;
    return ioctl(fd, FIONREAD, &waiting) == 0 && waiting > 0;
}

static size_t header_bytes(const udp_outgoing *out, size_t i) {
    const size_t left = out->headers_bytes - i * out->header_bytes;
    return left < out->header_bytes ? left : out->header_bytes;
}

size_t udp_packet_bytes(const udp_outgoing *out, size_t i) {
    return header_bytes(out, i) + (out->payloads != NULL ? out->payloads[i].bytes : 0U);
}

size_t udp_run_length(const udp_outgoing *out, size_t first) {
    const size_t size = udp_packet_bytes(out, first);
    size_t total = size;
    size_t end = first + 1;
    while (end < out->count && end - first < UDP_MOST_RUN_SEGMENTS) {
        const size_t next = udp_packet_bytes(out, end);
        if (next == 0 || next > size || total + next > UDP_MOST_RUN_BYTES)
            break;
        total += next;
        end++;
        if (next < size)
            break;
    }
    return end - first;
}

/* The parts of packet i, appended to `parts`; how many, or 0: there is no room for them. */
static size_t gather(const udp_outgoing *out, size_t i, struct iovec *parts, size_t room) {
    size_t used = 0;
    if (room == 0)
        return 0;
    parts[used++] = (struct iovec){(void *)(uintptr_t)(out->headers + i * out->header_bytes), header_bytes(out, i)};
    if (out->payloads == NULL)
        return used;
    uint32_t left = out->payloads[i].bytes;
    uint32_t cell = out->payloads[i].first_cell;
    while (left > 0) {
        uint32_t bytes = 0;
        if (used == room)
            return 0;
        const uint8_t *data = sky_payload_cell(out->satellite, cell, left, &bytes, &cell);
        parts[used++] = (struct iovec){(void *)(uintptr_t)data, bytes};
        left -= bytes;
    }
    return used;
}

size_t udp_flatten(const udp_outgoing *out, size_t first, size_t count, uint8_t *room) {
    static struct iovec parts[PARTS];
    uint8_t *at = room;
    if (out->payloads == NULL) {
        const size_t begin = first * out->header_bytes;
        const size_t end = (first + count) * out->header_bytes;
        const size_t bytes = (end < out->headers_bytes ? end : out->headers_bytes) - begin;
        memcpy(room, out->headers + begin, bytes);
        return bytes;
    }
    for (size_t i = first; i < first + count; i++) {
        const size_t used = gather(out, i, parts, PARTS);
        for (size_t part = 0; part < used; part++) {
            memcpy(at, parts[part].iov_base, parts[part].iov_len);
            at += parts[part].iov_len;
        }
    }
    return (size_t)(at - room);
}

/* The kernel cuts the message into datagrams of this size. */
static void set_segment(struct msghdr *header, control *room, size_t segment) {
    const uint16_t size = (uint16_t)segment;
    memset(room, 0, sizeof *room);
    header->msg_control = room;
    header->msg_controllen = CMSG_SPACE(sizeof size);
    struct cmsghdr *c = CMSG_FIRSTHDR(header);
    c->cmsg_level = SOL_UDP;
    c->cmsg_type = UDP_SEGMENT;
    c->cmsg_len = CMSG_LEN(sizeof size);
    memcpy(CMSG_DATA(c), &size, sizeof size);
}

size_t udp_send(int fd, const udp_endpoint *to, const udp_outgoing *out) {
    static struct mmsghdr messages[RUNS_A_CALL];
    static struct iovec parts[RUNS_A_CALL][PARTS];
    static control controls[RUNS_A_CALL];
    size_t lengths[RUNS_A_CALL];
    size_t sent = 0;
    bool offload = true;
    while (sent < out->count) {
        unsigned runs = 0;
        for (size_t next = sent; runs < RUNS_A_CALL && next < out->count; runs++) {
            struct msghdr *header = &messages[runs].msg_hdr;
            size_t length = offload ? udp_run_length(out, next) : 1;
            size_t used = 0;
            memset(header, 0, sizeof *header);
            header->msg_name = (void *)(uintptr_t)to;
            header->msg_namelen = udp_endpoint_bytes(to);
            header->msg_iov = parts[runs];
            for (size_t i = 0; i < length; i++) {
                const size_t its = gather(out, next + i, parts[runs] + used, PARTS - used);
                if (its == 0) { /* chunks of very many cells: a shorter run */
                    length = i;
                    break;
                }
                used += its;
            }
            if (length == 0)
                return out->count; /* more cells than a message has parts: never with cells that a configuration allows */
            header->msg_iovlen = used;
            if (length > 1)
                set_segment(header, &controls[runs], udp_packet_bytes(out, next));
            lengths[runs] = length;
            next += length;
        }
        const int taken = sendmmsg(fd, messages, runs, MSG_DONTWAIT);
        for (int i = 0; i < taken; i++)
            sent += lengths[i];
        if (taken >= 0)
            continue;
        if (try_later(errno))
            break;
        if (lengths[0] > 1 && offload && no_offload(errno))
            offload = false;
        else
            sent += lengths[0]; /* refused by the network: no route, or an ICMP error for an earlier datagram */
    }
    return sent;
}
