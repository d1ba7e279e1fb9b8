/* The frozen bytes as the loops see them (wire.py says what they mean), and what segments.c lends to its neighbours. */
#ifndef SKYMEMORY_PACKET_H
#define SKYMEMORY_PACKET_H

#include "fast.h"

#include <string.h>

enum { OK, MALFORMED, HEADER_CRC, PAYLOAD_CRC };

enum {
    PRIMARY_WORD = 0x0800 | 0x0C0, /* version 0, secondary header, our APID; the type bit is masked out */
    VERSION = 1,
    UNSEGMENTED = 3,
    COMMAND_BYTES = 8,
    TELEMETRY_BYTES = 16,
    SKY_BYTES = 44,
    REF_BYTES = 72,
    MUTABLE_AT = 20,
    MUTABLE_END = 24,
    CRC_AT = 40,
    FLAGS_AT = 2,
    AUTHENTICATED = 0x01, /* a MAC ends the body */
    MAC_BYTES = 16,
    DESTINATION_AT = 4, /* within the SKY header, and the next two */
    SOURCE_AT = 8,
    GROUND_HOST_AT = 12,
    REQUEST_AT = 16,
    TIMESTAMP_AT = 24,
    SLOT_MOVES_AT = 28,
    CREDIT_AT = 36,
    KEY_ID_AT = 38,
    GROUND_SHELL = 0xFF,
    OP_SET = 0x01,
    OP_GET = 0x02,
    OP_MIGRATE = 0x05,
    OP_ACK = 0x41,
    OP_DATA = 0x42,
    KEY_BYTES = 32,
    REF_NUMBER_AT = 32,
    REF_CHUNKS_AT = 36,
    REF_LENGTH_AT = 40,
    REF_CRC_AT = 44,
    REF_VALUE_BYTES_AT = 48,
    REF_VALUE_CRC_AT = 52,
    REF_TAG_AT = 56,
    TAG_BYTES = 16,
    LONGEST_BULK_HEADER = TELEMETRY_BYTES + SKY_BYTES + REF_BYTES,
};

static inline uint32_t be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static inline uint32_t be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void put16(uint8_t *p, uint32_t value)
{
    p[0] = (uint8_t)(value >> 8), p[1] = (uint8_t)value;
}

static inline void put32(uint8_t *p, uint32_t value)
{
    put16(p, value >> 16), put16(p + 2, value);
}

/* Where a value belongs: in one buffer, or (twin/segments.py's Rows) its first bytes in ``head`` and the rest row by row in
 * ``room``. */
typedef struct {
    Py_buffer head, room;
    Py_ssize_t first, count, row_bytes, stride;
} Destination;

/* The value whose chunks are awaited, and the tally of its answers. */
typedef struct {
    const uint8_t *key;
    uint64_t chunks, chunk_bytes, value_bytes;
    uint32_t value_crc;
    uint8_t *head, *rows, *arrived, *crcs;
    uint64_t head_bytes, row_bytes, stride;
    Py_ssize_t placed, duplicates, corrupt, foreign;
} Value;

/* Where a value lands: the twin's tuple, opened. */
typedef struct {
    Py_buffer key, arrived, crcs;
    Destination out;
    Value value;
} Landing;

/* headers.c: CRC of packet[0:end] without the CRC field, with the forwarders' four bytes as zero. */
uint32_t sky_header_crc(const uint8_t *packet, size_t sky, size_t end);
/* The reason code of a packet's headers; *ref is the offset of its chunk reference, 0 if it carries no payload. MACs are not
 * checked. */
int sky_check_packet(const uint8_t *packet, size_t size, size_t *ref);
/* The same of a packet without a MAC; MALFORMED for one with, which this caller does not accept. */
int sky_check_header(const uint8_t *packet, size_t size, size_t *ref);
int sky_payload_is_sound(const uint8_t *packet, size_t size, size_t ref);

/* segments.c: -1 and an exception for segments of no length. */
Py_ssize_t sky_count_segments(const Py_buffer *data, Py_ssize_t segment);
/* Acquire the buffers of a landing, if they can hold its value; 0 with an exception, and none of them. */
int sky_open_landing(Landing *to, PyObject *landing);
void sky_close_landing(Landing *to);

/* runs.c: the fields of a request's first packet with chunks that all of them share. */
enum { RUN_START_BYTES = COMMAND_BYTES + SKY_BYTES + REF_BYTES };
/* Whether a run of sound SETs or MIGRATEs continues what ``first`` (RUN_START_BYTES) began after chunk number *after (0
 * where nothing is taken yet); *after moves on if so. Each has a MAC of ``mac`` bytes (0: none), which is not checked. */
int sky_continues_run(const uint8_t *data, size_t size, size_t segment, const uint8_t *first, size_t mac,
                      uint32_t *after);
/* (reference, payload) of one such packet. */
PyObject *sky_chunk_of(const uint8_t *packet, size_t size, size_t mac);

/* segments.c */
void sky_place_all(Value *value, const uint8_t *data, size_t size, size_t segment, Py_ssize_t count);

#endif
