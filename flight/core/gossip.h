/* Eviction gossip (NOTICE): a satellite that evicts part of a block informs the satellites of its box.
 *
 * Twin of skymemory.protocol.satellite.gossip. Fixed pools: evicted keys that wait to be announced are the memory's (where
 * that list is full, an eviction is not announced: clients find the hole, as with `lazy`); notices that were seen are 4,096,
 * as in the twin.
 */
#ifndef SKY_GOSSIP_H
#define SKY_GOSSIP_H

#include <stdbool.h>

#include "questions.h"
#include "state.h"

sky_gossip *sky_gossip_new(sky_arena *arena, const sky_config *config, sky_us now);

/* To be called when chunks may have been evicted. */
void sky_gossip_gather(sky_satellite *satellite, sky_us now);
sky_us sky_gossip_next_timer(const sky_satellite *satellite);
/* Announces, or has proved, the loss of what was evicted and not stored again since. */
void sky_gossip_handle_timer(sky_satellite *satellite, sky_us now);
/* NOTICE of another satellite; false: malformed. */
bool sky_gossip_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now);

/* --- Events of checks.c, and for sweep.c --- */

void sky_gossip_proved(sky_satellite *satellite, const uint8_t *ref, bool lost, sky_us now);
/* The answer to questions of gossip. */
void sky_gossip_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                     sky_us now);
/* Drops the chunks of a dead value (44 bytes: key and setting), unless its key may have been stored again since the loss was
 * noticed; whether it did. */
bool sky_gossip_purge(sky_satellite *satellite, const uint8_t *dead, sky_us now);
/* GONE to the ground hosts that this satellite knows, of SKY_MOST_DEAD values at most; whether there are any. */
bool sky_gossip_notify_ground(sky_satellite *satellite, const uint8_t *dead, uint32_t count, sky_us now);

#endif
