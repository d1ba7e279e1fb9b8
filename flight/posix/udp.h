/* Datagrams in batches: recvmmsg with UDP_GRO, sendmmsg with UDP_SEGMENT. As skymemory/native/udp.c, without Python. */
#ifndef SKY_POSIX_UDP_H
#define SKY_POSIX_UDP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "endpoint.h"
#include "satellite.h"

enum {
    UDP_SLOTS = 8, /* messages a call: 512 KiB, still in the processor's cache when it is processed */
    UDP_SLOT_BYTES = 65536,
    UDP_MOST_RUN_BYTES = 65507,
    UDP_MOST_RUN_SEGMENTS = 64,
    UDP_BUFFER_BYTES = 4 << 20, /* requested; Linux reports twice as much where it grants it */
};

typedef struct {
    uint8_t *packets; /* sky_receive changes them */
    size_t bytes, segment_bytes;
    udp_endpoint from;
} udp_arrival;

/* A socket that never blocks, bound to the address (and of IPv6 not to IPv4's port); -1 with errno. `receive_bytes`, `send_bytes`: what the kernel grants. */
int udp_open(const udp_endpoint *address, uint32_t *receive_bytes, uint32_t *send_bytes);
/* What has arrived, at most UDP_SLOTS runs, valid until the next call of any socket. Errors of the network count as none. */
unsigned udp_receive(int fd, udp_arrival arrivals[UDP_SLOTS]);
bool udp_has_more(int fd);

/* Packet i of the run is `header_bytes` from i * header_bytes of `headers`, the last perhaps shorter; behind it the
 * payload that `satellite` holds in its cells. */
typedef struct {
    const uint8_t *headers;
    size_t headers_bytes, header_bytes;
    const struct sky_payload *payloads; /* or NULL */
    const sky_satellite *satellite;
    size_t count;
} udp_outgoing;

/* Packets that the kernel took; those that the network refuses count as taken, and are lost, as on any link. */
size_t udp_send(int fd, const udp_endpoint *to, const udp_outgoing *out);
/* Bytes of packet i. */
size_t udp_packet_bytes(const udp_outgoing *out, size_t i);
/* Writes packets from `first` on end to end into `room`; how many bytes. */
size_t udp_flatten(const udp_outgoing *out, size_t first, size_t count, uint8_t *room);
/* How many packets from `first` on one run may carry: equally long, but the last may be shorter. */
size_t udp_run_length(const udp_outgoing *out, size_t first);

#endif
