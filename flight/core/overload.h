/* Overload of a host: how late it is with its work, and the background packets that wait meanwhile.
 *
 * Twin of skymemory.protocol.satellite.overload.
 */
#ifndef SKY_OVERLOAD_H
#define SKY_OVERLOAD_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "satellite.h"

#define SKY_LATE_US 50000 /* a longer wait counts as late */
#define SKY_MOST_POSTPONED_AGE_US 2000000

/* A host is overloaded when even the shortest wait has been long for a while (CoDel, RFC 8289). */
typedef struct {
    sky_us worst, worst_at; /* the longest wait, and when */
    sky_us on_time;         /* when an event was last on time; SKY_NEVER: none has been late yet */
} sky_lateness;

void sky_lateness_begin(sky_lateness *lateness);
/* An event was handled `late` after it was due. To be told of events on time, too. */
void sky_lateness_measured(sky_lateness *lateness, sky_us late, sky_us now);
/* The longest recent wait, decaying, to a microsecond. */
sky_us sky_lateness_at(const sky_lateness *lateness, sky_us now);
bool sky_lateness_is_late(const sky_lateness *lateness, sky_us now);

/* A bounded queue of background packets; beyond its bounds the oldest are dropped. */
typedef struct {
    uint8_t *ring;
    size_t most, ring_bytes; /* of packets; of the ring */
    size_t first, used; /* in bytes, with the heads of the runs */
    uint32_t runs;
    size_t bytes; /* of packets */
    uint64_t kept, dropped;
} sky_postponed;

bool sky_postponed_new(sky_postponed *postponed, sky_arena *arena, const sky_config *config);
/* Keeps a run of packets: a copy. */
void sky_postponed_keep(sky_postponed *postponed, const uint8_t *packets, size_t bytes, size_t segment_bytes,
                        sky_link source, sky_us now);
/* Takes the oldest run that is not too old into `packets` (room for 65,536 bytes); 0: there is none. */
size_t sky_postponed_take(sky_postponed *postponed, uint8_t *packets, size_t *segment_bytes, sky_link *source,
                          sky_us *came, sky_us now);
/* Whether packets, which have one journey, may wait. */
bool sky_is_background(const uint8_t *packet, size_t bytes);

#endif
