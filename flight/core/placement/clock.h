/* How often the box has moved, by the clock: what moves by periods, and the overhead point of a host that stands still.
 *
 * The one file with floating point: it is asked when the box moves, never for a packet, and computes in the order of the
 * twin (skymemory.protocol.clock.MoveClock, constellation.ground_track.Track), so that both count alike to the bit. A mission
 * that moves its box otherwise brings its own sky_clock instead. A host that moves is refused in this release.
 */
#ifndef SKY_CLOCK_H
#define SKY_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "satellite.h"

typedef enum { SKY_STANDS_STILL = 0, SKY_BY_PERIODS = 1, SKY_BY_OVERHEAD_POINT = 2 } sky_counted_by;

typedef struct {
    sky_counted_by by;
    double epoch_s, time_scale;
    double slot_period_s, plane_period_s;
    /* By the overhead point: cells at time 0, real numbers, and those a second. */
    double slot, plane, slot_rate, plane_rate;
    int64_t slot_origin, plane_origin;
} sky_move_clock;

void sky_clock_by_periods(sky_move_clock *clock, double epoch_s, double time_scale, double slot_period_s,
                          double plane_period_s);
/* The cell overhead at time 0 and its rates, as of a Track of one knot: for orbits computed elsewhere. */
void sky_clock_by_track(sky_move_clock *clock, double epoch_s, double time_scale, double plane, double slot,
                        double plane_rate, double slot_rate);
/* By the name and version of a preset (docs/reference/wire.md), over a host at these degrees. NULL: done; else why not. */
const char *sky_clock_by_preset(sky_move_clock *clock, const char *preset, int version, double epoch_s,
                                double time_scale, double latitude_deg, double longitude_deg);

/* A sky_clock; the context is a sky_move_clock. */
sky_counted sky_clock_counted(void *context, sky_us now);

#endif
