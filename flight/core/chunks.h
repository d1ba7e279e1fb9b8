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
#include "store/memory.h"
#include "wire/packet.h"

#define SKY_MOST_UNANSWERED 1024U
#define SKY_MOST_UNANSWERED_CHUNKS 4096U
#define SKY_MOST_INCOMING 544U /* the shortest packets with a chunk that one run of 65,535 bytes can have */

/* A run: packets of `segment_bytes` each, the last maybe shorter. */
typedef struct {
    uint8_t *packets;
    size_t bytes, segment_bytes;
} sky_packets;

/* Chunks of one key and request, acknowledged together when packets are next sent. Where there is no room to note one more,
 * all are acknowledged at once. */
typedef struct {
    sky_header header;
    uint8_t journey[20]; /* version, operation, flags, status, addresses, ground host and request id as they came */
    uint8_t key[SKY_KEY_BYTES];
    uint16_t first[2], last[2]; /* of the chunks that were taken [0], and refused [1]: entry + 1 */
} sky_unanswered;

typedef struct {
    uint32_t index; /* 0-based */
    uint16_t next;  /* entry + 1 */
} sky_unanswered_chunk;

typedef struct {
    sky_unanswered *requests;
    uint32_t request_count;
    sky_unanswered_chunk *chunks;
    uint32_t chunk_count;
    uint32_t *sorted;       /* scratch of acknowledgements */
    sky_incoming *incoming; /* scratch of a run of SETs */
    uint32_t *wanted;       /* scratch of GETs: chunks of the memory */
    uint32_t most_wanted;
    uint8_t *body;          /* of the answer that is being made */
    uint8_t *missing;       /* bits of the steps of a selection that are not here */
    sky_us waited;          /* how long the packets being processed were postponed */
} sky_chunks;

bool sky_chunks_new(sky_chunks *chunks, sky_arena *arena, const sky_config *config);

/* Runs of sound SETs or MIGRATEs of one request and value for this satellite: nearly all bytes that it receives. How many of
 * the runs, from the first on, these were; 0: nothing was done. */
uint32_t sky_chunks_store_runs(sky_satellite *satellite, const sky_packets *runs, uint32_t count, sky_link source,
                               sky_us now);
/* One SET or MIGRATE packet whose checksums are right. */
void sky_chunks_set(sky_satellite *satellite, const uint8_t *packet, size_t bytes, sky_us now);
/* A plain GET by our own beam of chunks that are all here. False: it is none, and nothing was done. */
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
