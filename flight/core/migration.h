/* Handler of handovers: turns the plan of handover.h into MIGRATE packets, and the ACKs into deletions.
 *
 * Twin of skymemory.protocol.satellite.migration.
 */
#ifndef SKY_MIGRATION_H
#define SKY_MIGRATION_H

#include <stdbool.h>

#include "state.h"

sky_migration *sky_migration_new(sky_arena *arena, const sky_config *config, sky_us now);

/* A chunk was stored by SET or MIGRATE (`header`): it stays, or leaves again where the box has moved meanwhile. `ref`: its
 * packed reference as it came. Copies whose place it took are the memory's `conflicts`. Call it for each chunk after it was
 * stored; then, once for all that came together, let leave what may: sky_hand_over, unless the handover is idle. */
void sky_migration_stored(sky_satellite *satellite, const uint8_t *ref, const sky_header *header, sky_us now);
/* Have sky_migration_send_due plan the handover. `urgent`: an operator moved the box. */
void sky_migration_box_moved(sky_satellite *satellite, bool urgent);
sky_us sky_migration_next_timer(const sky_satellite *satellite);
/* Sends all that is due: strays whose time has come, fresh bursts, retransmissions. */
void sky_migration_send_due(sky_satellite *satellite, sky_us now);
/* Deletes acknowledged chunks whose grace period is over, unless they belong here again. */
void sky_migration_delete_copied(sky_satellite *satellite, sky_us now);
/* ACK and UNREACHABLE: what became of a burst; false: malformed. */
bool sky_migration_acknowledged(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                                sky_us now);
bool sky_migration_unreachable(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                               sky_us now);

#endif
