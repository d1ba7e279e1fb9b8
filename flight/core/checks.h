/* CHECK and CHECKED: does another satellite hold all chunks of one server of a value? And proofs that a chunk is lost.
 *
 * Twin of skymemory.protocol.satellite.checks.
 */
#ifndef SKY_CHECKS_H
#define SKY_CHECKS_H

#include <stdbool.h>

#include "state.h"

sky_checks *sky_checks_new(sky_arena *arena, const sky_config *config, sky_us now);

/* CHECK: answers another satellite; false: malformed. */
bool sky_checks_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now);
/* CHECKED: the answer to one of ours. Then call sky_sweep_release_handover. */
bool sky_checks_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                         sky_us now);

#endif
