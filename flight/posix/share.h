/* A host's share of a constellation: the flat text that skymemory.testbed.flight writes from the plan. A line is a word and
 * its values; `#` begins a remark. */
#ifndef SKY_POSIX_SHARE_H
#define SKY_POSIX_SHARE_H

#include <stdbool.h>

#include "config.h"
#include "endpoint.h"
#include "faults.h"
#include "link_queues.h"
#include "orbits.h"
#include "placement/clock.h"

typedef struct {
    sky_link address;
    udp_endpoint endpoint;
} share_satellite;

typedef struct {
    char name[64];
    sky_config config; /* of every satellite; address, credit and neighbour_timeout are its own */
    uint8_t *gaps;     /* the configuration's */
    sky_move_clock clock;
    sky_knot *knots; /* of the clock's track */
    unsigned knot_count;
    sky_auth auth;
    char keys_path[4096];    /* empty: no MACs */
    char outages_path[4096]; /* which satellites are disabled; empty: none */
    char record_path[4096];  /* removed at a regular end; empty: none */
    int64_t unix_at_boot_us; /* where the clock counts from; 0: what the wall clock says */

    share_satellite *mine, *others;
    unsigned mine_count, others_count;

    /* Delays: `delay_scale` times the time of light; 0: nothing is held. Links east and west, and links between plane i and
     * the next, in microseconds and scaled. Beams by their orbits, or of a grid that is none by how many planes south and
     * slots east of the box's centre the satellite is: one for each cell of the torus. */
    double delay_scale;
    sky_us slot_delay_us;
    sky_us *plane_delays_us;
    double *beams_s;
    orbits sky;
    bool onboard; /* the client's host is part of a satellite, whose beam has no length */
    sky_link onboard_at;
    bool delayed;
    link_terms links;
    fault_rates faults;
} share;

/* False with a reason. */
bool share_read(const char *path, share *its, char reason[512]);
/* What share_read allocated. */
void share_free(share *its);
/* Light's time between a satellite that counts these moves and a host on the ground, not scaled; `place` as for orbits. */
double share_beam_s(const share *its, sky_link address, const orbits_place *place, int32_t slot_moves, int32_t plane_moves,
                    sky_us now);
/* Whether the Earth is between two neighbours, by the count of the first. */
bool share_blocked(const share *its, sky_link here, sky_link there, int32_t slot_moves, int32_t plane_moves, sky_us now);
sky_us share_hop_us(const share *its, sky_link here, sky_link there);
/* How long a neighbour may take to answer; over gaps its links may be longer. */
sky_us share_timeout_us(const share *its, sky_link here);
/* As long as a simulated delay lasts: never early. */
sky_us share_scaled_us(const share *its, double seconds);

#endif
