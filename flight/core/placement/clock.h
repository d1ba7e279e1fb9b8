/* How often the box has moved, by the clock: what moves by periods, and the overhead point of a host, which may move.
 *
 * The one file with floating point: it is asked when the box moves, never for a packet, and computes in the order of the
 * twin (skymemory.protocol.clock.MoveClock, constellation.ground_track.Track), so that both count alike to the bit. A mission
 * that moves its box otherwise brings its own sky_clock instead.
 */
#ifndef SKY_CLOCK_H
#define SKY_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "satellite.h"

typedef enum { SKY_STANDS_STILL = 0, SKY_BY_PERIODS = 1, SKY_BY_OVERHEAD_POINT = 2 } sky_counted_by;

/* The overhead point at a time, in cells: real numbers that never wrap. */
typedef struct {
    double time_s, plane, slot;
} sky_knot;

typedef struct {
    sky_counted_by by;
    double epoch_s, time_scale;
    double slot_period_s, plane_period_s;
    /* By the overhead point: knots by ascending time, straight between; cells a second before the first and after the last. */
    const sky_knot *knots;
    uint32_t knot_count;
    double slot_rate, plane_rate;
    double slot_origin, plane_origin;
} sky_move_clock;

void sky_clock_by_periods(sky_move_clock *clock, double epoch_s, double time_scale, double slot_period_s,
                          double plane_period_s);
/* A Track of the twin: at least one knot. They stay the caller's, as long as the clock is used. */
void sky_clock_by_track(sky_move_clock *clock, double epoch_s, double time_scale, const sky_knot *knots, uint32_t count,
                        double plane_rate, double slot_rate);
/* By the name and version of a preset (docs/reference/wire.md), over a host at these degrees; `knot` is the caller's, as
 * above. NULL: done; else why not. */
const char *sky_clock_by_preset(sky_move_clock *clock, sky_knot *knot, const char *preset, int version, double epoch_s,
                                double time_scale, double latitude_deg, double longitude_deg);

/* Seconds since the epoch as the satellites fly. */
double sky_clock_elapsed_s(const sky_move_clock *clock, sky_us now);
/* A sky_clock; the context is a sky_move_clock. */
sky_counted sky_clock_counted(void *context, sky_us now);
/* Its moves alone. */
void sky_clock_moves(const sky_move_clock *clock, sky_us now, int32_t *slot_moves, int32_t *plane_moves);

#endif
