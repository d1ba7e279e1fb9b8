/* Periodic checks of the keys that are here: incomplete blocks are dropped, lost copies are made again.
 *
 * Twin of skymemory.protocol.satellite.sweep. Fixed pools: suspicions (where full, a key is not suspected: the next sweep
 * asks again) and settings held back from a handover (the oldest are forgotten, as in the twin); questions: checks.h.
 */
#ifndef SKY_SWEEP_H
#define SKY_SWEEP_H

#include <stdbool.h>

#include "handover.h"
#include "state.h"

sky_sweep *sky_sweep_new(sky_arena *arena, const sky_config *config, sky_us now);

sky_us sky_sweep_next_sweep(const sky_satellite *satellite);
/* Examines the next keys, at a distance that doubles with each round over all keys. Not during a handover. */
void sky_sweep_sweep(sky_satellite *satellite, sky_us now);
/* The box has moved: ask whether what must leave is whole. Fresh bursts wait for the answers. */
void sky_sweep_before_handover(sky_satellite *satellite, sky_us now);
/* Lets fresh bursts leave if all answers are here. */
void sky_sweep_release_handover(sky_satellite *satellite);
/* PRESENCE: the answer to one of our HAS; false: malformed. */
bool sky_sweep_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now);
sky_us sky_sweep_next_confirmation(const sky_satellite *satellite);
/* Tries to prove the losses that are due. */
void sky_sweep_confirm_suspicions(sky_satellite *satellite, sky_us now);

/* Repair: makes lost copies again, where values have copies. */
sky_us sky_repair_next_timer(const sky_satellite *satellite);
void sky_repair_handle_timer(sky_satellite *satellite, sky_us now);

/* --- For migration.c --- */

/* Takes suspect chunks out of a burst: they leave after the proof was tried, if they are still here. */
void sky_sweep_hold_back(sky_satellite *satellite, uint32_t request_id, sky_us now);

#endif
