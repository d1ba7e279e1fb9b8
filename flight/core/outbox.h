/* Outgoing packets: answers, own commands, packets in transit, each with the link it leaves by.
 *
 * Twin of skymemory.protocol.satellite.outbox. Runs wait in a pool until the caller has taken them (sky_next_run); where
 * it is full, packets are dropped and counted (`outbox_full`), as if the first link had lost them. Payloads are not
 * copied: a run names cells of the memory, which keeps freed cells until the runs were taken.
 */
#ifndef SKY_OUTBOX_H
#define SKY_OUTBOX_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "counters.h"
#include "placement/locator.h"
#include "routing.h"
#include "satellite.h"
#include "store/memory.h"
#include "wire/auth.h"
#include "wire/packet.h"

#define SKY_MOST_SENDERS 512U
#define SKY_LEAST_CREDIT_BYTES (128U * 1024U)

/* Divides what the receive buffer holds among those that send lately. Twin of congestion.Credit; beyond
 * SKY_MOST_SENDERS in half a second further ones do not count. */
typedef struct {
    uint32_t buffer_bytes, least_bytes, each_bytes;
    uint64_t hash_seed[2];
    uint32_t *senders; /* hashed: room for 2 SKY_MOST_SENDERS */
    uint32_t *periods; /* in which each was heard */
    uint32_t period;
    uint32_t count, before;
    sky_us until;
} sky_credit;

typedef struct {
    sky_run run;
    bool is_links; /* LINKS leave after all else, and do not count as traffic */
} sky_queued;

/* A chunk that leaves, as which copy of it. */
typedef struct {
    uint32_t chunk; /* of the memory */
    uint8_t replica;
} sky_leaving_chunk;

typedef struct {
    uint32_t here;
    sky_locator *locator;
    sky_router *router;
    sky_counters *counters;
    sky_memory *memory;
    const sky_authority *authority; /* NULL: no keys */
    sky_credit credit;
    uint16_t sequence;
    sky_queued *queue;
    uint32_t count, most;
    uint32_t traffic;  /* of the queue: until here it was counted as traffic of its links */
    uint32_t next;     /* the next to be taken; then `links_turn`, and from the start again */
    bool links_turn;
    uint8_t *bytes;    /* headers and payload lists of what is queued */
    size_t used, limit;
} sky_outbox;

/* The parts that it works with are set by the caller. */
bool sky_outbox_new(sky_outbox *outbox, sky_arena *arena, const sky_config *config);

void sky_credit_heard(sky_credit *credit, uint32_t sender, sky_us now);

/* --- Answers to the sender of `request` --- */

void sky_reply(sky_outbox *outbox, const sky_header *request, uint8_t op, const uint8_t *body, size_t bytes, sky_us now);
void sky_reply_as(sky_outbox *outbox, const sky_header *request, uint8_t op, const uint8_t *body, size_t bytes,
                  sky_us now, uint8_t status, uint8_t flags);

/* --- Commands of this satellite --- */

/* One control packet to another satellite. */
void sky_command(sky_outbox *outbox, uint8_t op, uint32_t there, uint32_t request_id, const uint8_t *body, size_t bytes,
                 sky_us now);
/* MIGRATE: one packet for each chunk. */
void sky_send_migrate(sky_outbox *outbox, uint32_t there, uint32_t request_id, const sky_leaving_chunk *chunks,
                      uint32_t count, sky_us now);
/* LINKS to a neighbour, by the link to it. */
void sky_send_links(sky_outbox *outbox, uint32_t neighbour, const uint8_t *body, size_t bytes, sky_us now);
/* Telemetry that nobody asked for to the `most` ground hosts heard last; how many there were. */
uint32_t sky_notify_ground(sky_outbox *outbox, uint8_t op, const uint8_t *body, size_t bytes, uint32_t most, sky_us now);

/* --- For satellite.c and chunks.c --- */

/* DATA for chunks of one key, by `link` or, SKY_NO_LINK, by the route to the sender. How many packets there was room for. */
uint32_t sky_reply_chunks(sky_outbox *outbox, const sky_header *request, const uint32_t *chunks, uint32_t count,
                          sky_link link, sky_us now);
/* Packets that are complete, where they are: they must stay there until they were taken. */
void sky_send_by(sky_outbox *outbox, const uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link link);
/* A ground host's refused command is answered on the link it came by: the sky_refuse of the gate, whose context is the
 * outbox. */
void sky_send_refusal(void *outbox, const uint8_t *command, size_t bytes, sky_link link, sky_us now);
/* The next run to be sent; false: there is none, and all that was queued is gone. */
bool sky_outbox_next(sky_outbox *outbox, sky_run *run);
/* A sound command of an unknown operation is answered with what this release supports. */
void sky_unsupported(sky_outbox *outbox, const uint8_t *command, sky_us now);

#endif
