/* The daemon's own reading of its configuration, and what it makes of it, for tests. */
#include "share.h"

#include <stdlib.h>

share *share_of(const char *path, char reason[512]) {
    share *its = calloc(1, sizeof *its);
    if (its != NULL && !share_read(path, its, reason)) {
        free(its);
        its = NULL;
    }
    return its;
}

double share_beam(const share *its, uint32_t address, const double *place, int32_t slots, int32_t planes, sky_us now) {
    const orbits_place at = place != NULL ? (orbits_place){place[0], place[1]} : (orbits_place){0.0, 0.0};
    return share_beam_s(its, address, place != NULL ? &at : NULL, slots, planes, now);
}

void share_counted(share *its, sky_us now, int64_t out[3]) {
    const sky_counted counted = sky_clock_counted(&its->clock, now);
    out[0] = counted.slot_moves;
    out[1] = counted.plane_moves;
    out[2] = counted.next_us;
}
