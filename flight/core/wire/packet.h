/* Packets of protocol version 1: numbers, offsets, headers, bodies. Twin of skymemory.protocol.wire and messages; the page
 * docs/reference/wire.md says what each field means.
 *
 * A packet is `Space Packet header (8 command | 16 telemetry) | SKY header 44 | body | payload`. Ids of chunks and servers
 * count from 1 on the wire and from 0 here, but in raw references. Parsers trust nothing: they read within `bytes` alone.
 */
#ifndef SKY_PACKET_H
#define SKY_PACKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "satellite.h"
#include "wire/bytes.h"

enum {
    SKY_COMMAND_BYTES = 8,
    SKY_TELEMETRY_BYTES = 16,
    SKY_COMMAND_BIT = 0x10, /* in the first byte of a command */
    SKY_HEADER_BYTES = 44,
    SKY_COMMAND_PREFIX_BYTES = SKY_COMMAND_BYTES + SKY_HEADER_BYTES,
    SKY_TELEMETRY_PREFIX_BYTES = SKY_TELEMETRY_BYTES + SKY_HEADER_BYTES,
    SKY_REF_BYTES = 72,
    SKY_MAC_BYTES = 16,
    SKY_MAX_PACKET_BYTES = 65507,
    SKY_MAX_CHUNK_BYTES = SKY_MAX_PACKET_BYTES - SKY_TELEMETRY_PREFIX_BYTES - SKY_REF_BYTES,
    SKY_HOP_LIMIT = 64,
    SKY_CREDIT_UNIT_BYTES = 4096,
    SKY_MOST_CREDIT = 0xFFFF,
    SKY_MAX_MOVES = 0x40000000,
    SKY_GROUND_SHELL = 0xFF,
    SKY_WIRE_VERSION = 1
};

/* Offsets within the SKY header. */
enum {
    SKY_OP_AT = 1,
    SKY_FLAGS_AT = 2,
    SKY_STATUS_AT = 3,
    SKY_DESTINATION_AT = 4,
    SKY_SOURCE_AT = 8,
    SKY_GROUND_AT = 12,
    SKY_REQUEST_AT = 16,
    SKY_HOP_LIMIT_AT = 20, /* this and the next three bytes are the forwarders' */
    SKY_HOP_COUNT_AT = 21,
    SKY_MUTABLE_END = 24,
    SKY_TIMESTAMP_AT = 24,
    SKY_SLOT_MOVES_AT = 28,
    SKY_PLANE_MOVES_AT = 32,
    SKY_CREDIT_AT = 36,
    SKY_KEY_ID_AT = 38,
    SKY_CRC_AT = 40
};

/* Offsets within a chunk reference. */
enum {
    SKY_REF_NUMBER_AT = 32,
    SKY_REF_CHUNKS_AT = 36,
    SKY_REF_LENGTH_AT = 40,
    SKY_REF_CRC_AT = 44,
    SKY_REF_VALUE_BYTES_AT = 48,
    SKY_REF_VALUE_CRC_AT = 52,
    SKY_REF_TAG_AT = 56,
    SKY_REF_REPLICA_AT = 61,
    SKY_REF_MOVES_AT = 64,
    SKY_TAG_BYTES = 16,
    SKY_KEY_BYTES = 32,
    SKY_SETTING_BYTES = 12 /* value CRC and moves of the setting: with the key it names one write of a value */
};

typedef enum {
    SKY_SET = 0x01,
    SKY_GET = 0x02,
    SKY_HAS = 0x03,
    SKY_EVICT = 0x04,
    SKY_MIGRATE = 0x05,
    SKY_PING = 0x06,
    SKY_LIST = 0x07,
    SKY_ADVANCE = 0x08,
    SKY_NOTICE = 0x09,
    SKY_LINKS = 0x0A,
    SKY_RETAIN = 0x0B,
    SKY_CHECK = 0x0C,
    SKY_FORGET = 0x0D,
    SKY_ACK = 0x41,
    SKY_DATA = 0x42,
    SKY_MISS = 0x43,
    SKY_PRESENCE = 0x44,
    SKY_EVICTED = 0x45,
    SKY_PONG = 0x46,
    SKY_LISTED = 0x47,
    SKY_ADVANCED = 0x48,
    SKY_BUSY = 0x49,
    SKY_UNREACHABLE = 0x4A,
    SKY_RETAINED = 0x4B,
    SKY_GONE = 0x4C,
    SKY_CHECKED = 0x4D,
    SKY_UNSUPPORTED = 0x4E
} sky_op;

typedef enum { SKY_OK = 0, SKY_FULL = 1, SKY_HOP_LIMIT_USED = 2, SKY_NO_ROUTE = 3, SKY_REFUSED = 4 } sky_status;

enum { SKY_FLAG_AUTHENTICATED = 0x01, SKY_FLAG_SETTLED = 0x02 };

/* What is wrong with a packet. The first four are the codes of the twin's verify_segments. */
typedef enum {
    SKY_SOUND = 0,
    SKY_MALFORMED = 1,
    SKY_BAD_HEADER_CRC = 2,
    SKY_BAD_PAYLOAD_CRC = 3,
    SKY_UNKNOWN_OPERATION = 4, /* a sound command of a later release */
    SKY_BAD_BODY = 5           /* a sound packet whose body contradicts itself */
} sky_verdict;

/* The SKY header. Addresses as on the wire: shell << 24 | plane << 12 | slot. */
typedef struct {
    uint8_t op, flags, status, hop_limit, hop_count;
    uint16_t congestion, credit, key_id;
    uint32_t destination, source, ground, request_id, timestamp_us;
    int32_t slot_moves, plane_moves;
} sky_header;

static inline size_t sky_header_start(const uint8_t *packet) {
    return (packet[0] & SKY_COMMAND_BIT) != 0U ? SKY_COMMAND_BYTES : SKY_TELEMETRY_BYTES;
}
static inline bool sky_op_is_command(uint8_t op) { return op < 0x40U; }
/* Whether packets of this operation carry a payload behind the body. */
static inline bool sky_op_carries(uint8_t op) { return op == SKY_SET || op == SKY_MIGRATE || op == SKY_DATA; }

/* --- Whole packets --- */

/* How many packets a run has. */
static inline size_t sky_run_count(size_t bytes, size_t segment_bytes) {
    return segment_bytes == 0U ? 0U : bytes / segment_bytes + (bytes % segment_bytes != 0U ? 1U : 0U);
}
/* Whether the packets of a run have one kind, operation, flags, status, destination, source, ground host: native.same_journey. */
bool sky_same_journey(const uint8_t *packets, size_t bytes, size_t segment_bytes);
/* Counts a hop of each packet where it lies; false, and nothing changed: some header is not whole, or a hop limit used up. */
bool sky_count_hops(uint8_t *packets, size_t bytes, size_t segment_bytes);

/* The first four verdicts: lengths, headers, both CRCs. A MAC is not checked, only room for it. */
sky_verdict sky_packet_verify(const uint8_t *packet, size_t bytes);
/* The same without the payload's CRC. */
sky_verdict sky_packet_verify_headers(const uint8_t *packet, size_t bytes);
/* Headers of a packet that sky_packet_verify found sound: SKY_SOUND, SKY_MALFORMED or SKY_UNKNOWN_OPERATION. The body
 * (with the payload, if any) is what follows. */
sky_verdict sky_packet_parse(const uint8_t *packet, size_t bytes, sky_header *header, const uint8_t **body,
                             size_t *body_bytes);
/* The SKY header alone, at `sky` of a packet that has one; the same verdicts. */
sky_verdict sky_header_parse(const uint8_t *sky, sky_header *header);
/* Whether the body is one of `op`. */
bool sky_body_check(uint8_t op, const uint8_t *body, size_t bytes);
/* All of these: what a receiver believes of one datagram. The entry for fuzzers. */
int sky_packet_check(const uint8_t *packet, size_t bytes);

/* CRC of packet[0:end] without the CRC field, with the forwarders' bytes as zero; `sky`: where the SKY header begins. */
uint32_t sky_header_crc(const uint8_t *packet, size_t sky, size_t end);

/* --- Building --- */

/* Writes the headers of a packet of `header->op` whose body and payload have `body_bytes` together; gives their length
 * (52 or 60): the body goes there. sky_packet_seal then ends it, with the end of the body (not of the payload). The time
 * is telemetry's. */
size_t sky_packet_begin(uint8_t *packet, const sky_header *header, size_t body_bytes, uint16_t sequence, sky_us now);
void sky_packet_seal(uint8_t *packet, size_t end);
/* Of a packet that has been sealed with another body: all but sequence, length and CRC is the same. Seals it. */
void sky_packet_renumber(uint8_t *packet, size_t end, size_t body_bytes, uint16_t sequence);

/* --- Chunk reference (raw bytes are kept: chunks are sent as they came) --- */

typedef struct {
    uint32_t index, chunks, length, crc, value_bytes, value_crc;
    uint16_t servers, server; /* server from 0 */
    uint8_t strategy, replica;
    int32_t slot_moves, plane_moves;
} sky_ref;

/* False: out of range, as ChunkRef.unpack has it. */
bool sky_ref_parse(const uint8_t *bytes, sky_ref *ref);
static inline uint32_t sky_ref_index(const uint8_t *ref) { return sky_load32(ref + SKY_REF_NUMBER_AT) - 1U; }
static inline uint32_t sky_ref_length(const uint8_t *ref) { return sky_load32(ref + SKY_REF_LENGTH_AT); }
/* CRC of the value, slot moves, plane moves: 12 bytes. */
void sky_ref_setting(const uint8_t *ref, uint8_t setting[SKY_SETTING_BYTES]);
bool sky_ref_has_setting(const uint8_t *ref, const uint8_t *setting);
bool sky_ref_same_setting(const uint8_t *a, const uint8_t *b);

/* --- Selection: which chunks of a key; the body of GET, ACK, MISS and BUSY --- */

enum { SKY_SELECTION_BYTES = 44, SKY_MAX_SELECTION_BITS = 0x10000 };

typedef struct {
    const uint8_t *key;
    uint32_t first; /* from 0 */
    uint32_t stride, count;
    const uint8_t *bitmap;
} sky_selection;

bool sky_selection_parse(const uint8_t *body, size_t bytes, sky_selection *selection);
/* Goes through the selected steps: *step is where to look from (0 at first) and becomes the step after the one found; false:
 * no more. The chunk's index is `first + (found) * stride`, in *index. */
bool sky_selection_next(const sky_selection *selection, uint32_t *step, uint32_t *index);
/* Bytes of a selection of so many steps. */
static inline size_t sky_selection_bytes(uint32_t count) { return SKY_SELECTION_BYTES + ((size_t)count + 7U) / 8U; }
/* The first `take` or fewer of `count` ascending, distinct indices, as Selection.cover splits them; how many these are.
 * `stride` is that of all (sky_selection_stride). Zero: no room. `written`: bytes of the body. */
uint32_t sky_selection_build(uint8_t *body, size_t room, const uint8_t *key, const uint32_t *indices, uint32_t count,
                             uint32_t stride, size_t *written);
/* The greatest common divisor of the distances, at least 1: what Selection.cover takes. */
uint32_t sky_selection_stride(const uint32_t *indices, uint32_t count);

/* --- Lists: a count of 2 bytes, 2 bytes, then records --- */

enum {
    SKY_LIST_HEAD = 4,
    SKY_MOST_KEYS = 180,
    SKY_MOST_LISTED = 90,
    SKY_MOST_DEAD = 130,
    SKY_MOST_CHECKS = 100,
    SKY_MOST_DECLARATIONS = 360,
    SKY_PRESENCE_BYTES = 36,
    SKY_LISTED_BYTES = SKY_KEY_BYTES + SKY_PRESENCE_BYTES,
    SKY_DEAD_BYTES = SKY_KEY_BYTES + SKY_SETTING_BYTES,
    SKY_CHECK_BYTES = 56,
    SKY_RETAIN_HEAD = 12,
    SKY_NOTICE_HEAD = 24,
    SKY_LINKS_HEAD = 20,
    SKY_DECLARATION_BYTES = 16,
    SKY_UNSUPPORTED_BYTES = 20
};

/* HAS and EVICT: the keys, and how many. */
bool sky_keys_parse(const uint8_t *body, size_t bytes, const uint8_t **keys, uint32_t *count);
/* LIST: `limit` is SKY_MOST_LISTED at most. */
bool sky_list_parse(const uint8_t *body, size_t bytes, const uint8_t **after, uint32_t *limit);
/* ADVANCE and ADVANCED. */
bool sky_moves_parse(const uint8_t *body, size_t bytes, int32_t *slot_moves, int32_t *plane_moves);
void sky_moves_build(uint8_t body[8], int32_t slot_moves, int32_t plane_moves);
/* A list of 1 to `most` records of `width`; PRESENCE, PONG and LISTED may have none (`least` 0). */
bool sky_records_parse(const uint8_t *body, size_t bytes, size_t width, uint32_t least, uint32_t most, uint32_t *count);
static inline void sky_records_head(uint8_t *body, uint32_t count) {
    sky_store16(body, count);
    sky_store16(body + 2, 0);
}

/* What is held of one key. */
typedef struct {
    uint32_t index, chunks, length, value_bytes, value_crc, held; /* held 0: nothing */
    uint16_t servers, server;                                     /* server from 0 */
    uint8_t strategy;
    int32_t slot_moves, plane_moves;
} sky_presence;

/* False: malformed. `held` 0: nothing is there. */
bool sky_presence_parse(const uint8_t *record, sky_presence *presence);
void sky_presence_build(uint8_t record[SKY_PRESENCE_BYTES], const sky_presence *presence);

/* GONE: dead values (records of SKY_DEAD_BYTES: key and setting). */
bool sky_dead_parse(const uint8_t *body, size_t bytes, const uint8_t **dead, uint32_t *count);
/* FORGET: those, but not what was stored within `since_ms`. */
bool sky_forget_parse(const uint8_t *body, size_t bytes, const uint8_t **dead, uint32_t *count, uint32_t *since_ms);

typedef struct {
    uint32_t origin, number, centre;
    uint16_t north, south, west, east;
    uint8_t hops;
    bool notified;
    uint32_t count;
    const uint8_t *dead; /* records of SKY_DEAD_BYTES */
} sky_notice;

bool sky_notice_parse(const uint8_t *body, size_t bytes, sky_notice *notice);
/* The head; the records follow it. */
void sky_notice_build(uint8_t head[SKY_NOTICE_HEAD], const sky_notice *notice);

enum { SKY_TOUCH = 0, SKY_PIN = 1, SKY_EXPIRE = 2, SKY_LEASE = 3, SKY_WRITING = 4 };
enum { SKY_ABSENT = 0, SKY_DONE = 1, SKY_KEEP_REFUSED = 2 }; /* RETAINED */
enum { SKY_WHOLE = 0, SKY_LACKING = 1, SKY_NO_ROOM = 2 };    /* CHECKED */

typedef struct {
    uint8_t what;
    uint64_t until_ms;
    uint32_t count;
    const uint8_t *keys;
} sky_retain;

bool sky_retain_parse(const uint8_t *body, size_t bytes, sky_retain *retain);
void sky_retain_build(uint8_t head[SKY_RETAIN_HEAD], uint8_t what, uint64_t until_ms, uint32_t count);
/* RETAINED and CHECKED: a byte for each question, none above 2. */
bool sky_verdicts_parse(const uint8_t *body, size_t bytes, const uint8_t **verdicts, uint32_t *count);

typedef struct {
    const uint8_t *key, *setting;
    uint16_t servers, server; /* server from 0 */
    uint32_t chunks, length;
} sky_check;

/* CHECK: checks every record; sky_check_at gives the n-th. */
bool sky_checks_parse(const uint8_t *body, size_t bytes, uint32_t *count);
void sky_check_at(const uint8_t *body, uint32_t n, sky_check *check);
void sky_check_build(uint8_t record[SKY_CHECK_BYTES], const sky_check *check);

typedef struct {
    bool answer_me;
    uint8_t late; /* in 10 ms */
    int32_t pushed_slot, pushed_plane;
    uint64_t pushed_at_ms;
    uint32_t count;
    const uint8_t *declarations;
} sky_links;

bool sky_links_parse(const uint8_t *body, size_t bytes, sky_links *links);
void sky_links_build(uint8_t head[SKY_LINKS_HEAD], const sky_links *links);

typedef struct {
    uint32_t origin; /* as it came, with its shell */
    uint8_t down;    /* bit 0 north, 1 east, 2 south, 3 west */
    uint64_t made_ms;
} sky_declaration;

void sky_declaration_at(const uint8_t *declarations, uint32_t n, sky_declaration *declaration);
void sky_declaration_build(uint8_t record[SKY_DECLARATION_BYTES], const sky_declaration *declaration);

/* UNSUPPORTED: at least 20 bytes; what follows is a later release's. */
bool sky_unsupported_parse(const uint8_t *body, size_t bytes);
void sky_unsupported_build(uint8_t body[SKY_UNSUPPORTED_BYTES], uint8_t op, uint64_t operations, uint64_t codecs);

#endif
