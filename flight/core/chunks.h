/* Requests for chunks: SET, MIGRATE, GET, HAS, EVICT, FORGET, LIST.
 *
 * Twin of skymemory.protocol.satellite.chunks.
 */
#ifndef SKY_CHUNKS_H
#define SKY_CHUNKS_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "satellite.h"
#include "wire/packet.h"

#define SKY_MOST_UNANSWERED 256U
#define SKY_MOST_UNANSWERED_CHUNKS 4096U

/* Chunks of one key and request, acknowledged together when packets are next sent. */
typedef struct {
    sky_header header;
    uint8_t journey[20]; /* version, operation, flags, status, addresses, ground host and request id as they came */
    uint8_t key[32];
    uint16_t first[2], last[2]; /* of the chunks that were taken, and refused: entry + 1 */
    uint32_t count[2];
} sky_unanswered;

typedef struct {
    sky_unanswered *requests;
    uint32_t request_count;
    struct sky_unanswered_chunk {
        uint32_t index; /* 0-based */
        uint16_t next;  /* entry + 1 */
    } *chunks;
    uint32_t chunk_count;
    uint32_t *sorted; /* scratch of acknowledge */
    uint32_t *wanted; /* scratch of GET: chunks of the memory */
    sky_us waited;    /* how long the packets being processed were postponed */
} sky_chunks;

bool sky_chunks_new(sky_chunks *chunks, sky_arena *arena, const sky_config *config);

/* SET and MIGRATE packets whose checksums are right; `segment_bytes` each, the last maybe shorter. */
void sky_chunks_set(sky_satellite *satellite, const uint8_t *packets, size_t bytes, size_t segment_bytes, sky_us now);
/* A plain GET by our own beam of chunks that are all here; false: it is none, and nothing was done. */
bool sky_chunks_answer_get(sky_satellite *satellite, const uint8_t *packet, size_t bytes, sky_link source, sky_us now);
/* ACKs for what was stored or refused since the last call. */
void sky_chunks_acknowledge(sky_satellite *satellite, sky_us now);

/* The handlers; false: malformed. */
bool sky_chunks_get(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now);
bool sky_chunks_has(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now);
bool sky_chunks_evict(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now);
bool sky_chunks_forget(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now);
bool sky_chunks_list(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now);

#endif
