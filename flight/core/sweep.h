/* Periodic checks of the keys that are here: incomplete blocks are dropped, lost copies are made again.
 *
 * Twin of skymemory.protocol.satellite.sweep. Fixed pools: suspicions (where full a key is not suspected, `pools_full` counts,
 * and the next sweep asks again), settings that were held back from a handover (the oldest are forgotten, as in the twin).
 */
#ifndef SKY_SWEEP_H
#define SKY_SWEEP_H

#include <stdbool.h>

#include "questions.h"
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

/* --- For migration.c, and events of checks.c --- */

/* Takes suspect chunks out of a burst: they leave after the proof was tried, if they are still here. */
void sky_sweep_hold_back(sky_satellite *satellite, uint32_t request_id, sky_us now);
void sky_sweep_proved(sky_satellite *satellite, const uint8_t *ref, bool lost, sky_us now);
/* Answers to the CHECKs of the sweep, and of the repair. */
void sky_sweep_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                    sky_us now);
void sky_repair_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                        sky_us now);

#endif
