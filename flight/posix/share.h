/* A host's share of a constellation: the flat text that skymemory.testbed.flight writes from the plan. A line is a word and
 * its values; `#` begins a remark. */
#ifndef SKY_POSIX_SHARE_H
#define SKY_POSIX_SHARE_H

#include <netinet/in.h>
#include <stdbool.h>

#include "config.h"
#include "faults.h"
#include "placement/clock.h"

typedef struct {
    sky_link address;
    struct sockaddr_in endpoint;
} share_satellite;

typedef struct {
    char name[64];
    sky_config config; /* of every satellite; address and credit are its own */
    sky_move_clock clock;
    bool every_packet;
    char keys_path[4096];    /* empty: no MACs */
    char outages_path[4096]; /* which satellites are disabled; empty: none */
    char record_path[4096];  /* removed at a regular end; empty: none */

    share_satellite *mine, *others;
    unsigned mine_count, others_count;

    /* Delays, in microseconds. Links east and west; links between plane i and the next; and beams, by how many planes south
     * and slots east of the box's centre the satellite is: one for each cell of the torus. Absent: nothing is held. */
    sky_us slot_delay_us;
    sky_us *plane_delays_us;
    sky_us *beam_delays_us;
    bool onboard; /* the client's host is part of the centre's satellite, whose beam has no length */
    bool delayed;
    fault_rates faults;
} share;

/* False with a reason. */
bool share_read(const char *path, share *its, char reason[512]);
/* What share_read allocated. */
void share_free(share *its);
/* By how far light takes from the ground to a satellite of `address`, the box's centre being moved by these. */
sky_us share_beam_us(const share *its, sky_link address, int32_t slot_moves, int32_t plane_moves);
sky_us share_hop_us(const share *its, sky_link here, sky_link there);

#endif
