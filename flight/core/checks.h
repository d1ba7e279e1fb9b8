/* CHECK and CHECKED: does another satellite hold all chunks of one server of a value? And proofs that a chunk is lost.
 *
 * Twin of skymemory.protocol.satellite.checks: it says what a proof is.
 */
#ifndef SKY_CHECKS_H
#define SKY_CHECKS_H

#include <stdbool.h>

#include "questions.h"
#include "state.h"

/* Of the copies of one share, before and after a move. More of them are not asked whether they have it; a proof of loss asks
 * all. */
#define SKY_MOST_PLACES 64U

/* Of each placement and server that one sky_proofs asks about: where its places are in `sky_checks.places`. */
typedef struct {
    uint8_t tag[SKY_TAG_BYTES];
    uint32_t server;
    uint32_t first, count;
    bool kept; /* false: there was no room, they are computed again */
} sky_known_places;

#define SKY_MOST_KNOWN_PLACES 160U

struct sky_checks {
    sky_questions questions;
    /* Proofs that are being gathered: */
    uint32_t asked_packets;
    sky_known_places *known; /* SKY_MOST_KNOWN_PLACES */
    uint32_t known_count;
    uint32_t *places; /* satellites, ascending */
    uint32_t places_count, most_places;
    uint8_t *marks; /* by torus index */
    sky_moves_since *since;
    /* Scratch of sky_replicas_*: */
    uint16_t *servers;
};

sky_checks *sky_checks_new(sky_arena *arena, const sky_config *config, sky_us now);

/* CHECK: answers another satellite; false: malformed. */
bool sky_checks_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now);
/* CHECKED: the answer to one of ours. Then call sky_sweep_release_handover. */
bool sky_checks_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                         sky_us now);

/* --- For gossip.c and sweep.c: shares --- */

/* The check of one server of the value that a packed reference belongs to; `setting` is filled and used by it. */
sky_check sky_check_of(const uint8_t *ref, uint32_t server, uint8_t setting[SKY_SETTING_BYTES]);
/* How many chunks a server of so many has. */
uint32_t sky_expected(uint32_t chunks, uint32_t servers, uint32_t server);
/* How many of the chunks of a check are here. */
uint32_t sky_held(const sky_satellite *satellite, const sky_check *check);
/* Shares of a key that is here which must be whole elsewhere: those that are not whole here, and that of the server `distance`
 * further in the ring, if it is not whole. `before`: the moves before the box last moved, during a handover; or NULL.
 * Their servers, in checks->servers; how many. */
uint32_t sky_replicas_to_ask(sky_satellite *satellite, uint32_t share, uint32_t distance, const sky_moves *before);
/* The shares of a value that are not whole here, and which belong here or, with `ours` false, are here in part. */
uint32_t sky_replicas_not_whole(sky_satellite *satellite, const uint8_t *ref, bool ours);
/* The satellites of the copies of a server's share, now and before, without this one; room for SKY_MOST_PLACES. */
uint32_t sky_replicas_others(sky_satellite *satellite, const uint8_t *ref, uint32_t server, const sky_moves *before,
                             uint32_t *places);
/* Chunks of one server that are not here, of the setting of `ref`, ascending, at most `most`. */
uint32_t sky_missing(const sky_satellite *satellite, const uint8_t *ref, uint32_t server, uint32_t *indices, uint32_t most);

/* --- Proofs of loss --- */

/* Asks all satellites that may have a chunk. Begin, add values (by a packed reference, and chunks of its setting that are
 * not here, ascending), send. The owner learns what is proved by `on_proved`, perhaps at once. */
void sky_proofs_begin(sky_satellite *satellite);
void sky_proofs_add(sky_satellite *satellite, const uint8_t *ref, const uint32_t *indices, uint32_t count,
                    sky_purpose owner, sky_us now);
void sky_proofs_send(sky_satellite *satellite, sky_us now);

#endif
