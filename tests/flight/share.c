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

static double beam_at(const void *context, uint32_t satellite, const orbits_place *place, sky_us at) {
    const share *its = context;
    int32_t slots = 0;
    int32_t planes = 0;
    sky_clock_moves(&its->clock, at, &slots, &planes);
    return share_beam_s(its, satellite, place, slots + its->config.pushed_slot, planes + its->config.pushed_plane, at);
}

link_queues *share_queues(const share *its) {
    return link_queues_new(&its->links, beam_at, its);
}

sky_us share_leaves(link_queues *queues, int class, uint32_t satellite, uint32_t other, const double *place, int onboard,
                    size_t bytes, sky_us now, int urgent) {
    const orbits_place at = place != NULL ? (orbits_place){place[0], place[1]} : (orbits_place){0.0, 0.0};
    const link_way way = {(link_class)class, satellite, other, onboard != 0, place != NULL ? &at : NULL};
    return link_queues_leave(queues, &way, bytes, now, urgent != 0);
}

void share_figures(const link_queues *queues, sky_us now, uint64_t out[6]) {
    link_queues_figures(queues, now, out, out + LINK_CLASSES);
}
