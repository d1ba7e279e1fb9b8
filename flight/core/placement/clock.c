#include "placement/clock.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#ifdef __clang__ /* as GCC does by itself in ISO mode: no fused operations, which round once where the twin rounds twice */
#pragma STDC FP_CONTRACT OFF
#endif

#define PI 3.141592653589793

/* --- Counts and the next move --- */

static double seconds(sky_us us) { return (double)us / 1e6; }

static double elapsed_at(const sky_move_clock *clock, double now_s) {
    return (now_s - clock->epoch_s) * clock->time_scale;
}

double sky_clock_elapsed_s(const sky_move_clock *clock, sky_us now) { return elapsed_at(clock, seconds(now)); }

/* The cell that a point lies in; a cell extends half a cell to either side. */
static double nearest(double cell) { return floor(cell + 0.5); }

static int32_t whole(double value) {
    int32_t found = 0;
    if (value >= (double)INT32_MAX) {
        found = INT32_MAX;
    } else if (value <= (double)INT32_MIN) {
        found = INT32_MIN;
    } else {
        found = (int32_t)value;
    }
    return found;
}

/* The piece of the track at a time: how many knots are not after it. Their times ascend. */
static uint32_t piece_at(const sky_move_clock *clock, double elapsed_s) {
    uint32_t low = 0, high = clock->knot_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2U;
        if (clock->knots[middle].time_s <= elapsed_s) {
            low = middle + 1U;
        } else {
            high = middle;
        }
    }
    return low;
}

typedef struct {
    double plane, slot, plane_rate, slot_rate;
} overhead;

/* The overhead point at a time of this piece. */
static overhead overhead_in(const sky_move_clock *clock, uint32_t piece, double elapsed_s) {
    const sky_knot *const before = &clock->knots[piece > 0U ? piece - 1U : 0U];
    overhead found = {0.0, 0.0, clock->plane_rate, clock->slot_rate};
    if (piece > 0U && piece < clock->knot_count) {
        const sky_knot *const after = &clock->knots[piece];
        const double lasts_s = after->time_s - before->time_s;
        found.plane_rate = (after->plane - before->plane) / lasts_s;
        found.slot_rate = (after->slot - before->slot) / lasts_s;
    }
    found.plane = before->plane + found.plane_rate * (elapsed_s - before->time_s);
    found.slot = before->slot + found.slot_rate * (elapsed_s - before->time_s);
    return found;
}

static void moves_at(const sky_move_clock *clock, double now_s, int32_t *slot_moves, int32_t *plane_moves) {
    const double elapsed_s = elapsed_at(clock, now_s);
    *slot_moves = 0;
    *plane_moves = 0;
    if (clock->by == SKY_BY_PERIODS) {
        *slot_moves = whole(floor(elapsed_s / clock->slot_period_s));
        *plane_moves = whole(floor(elapsed_s / clock->plane_period_s));
    } else if (clock->by == SKY_BY_OVERHEAD_POINT) {
        const overhead point = overhead_in(clock, piece_at(clock, elapsed_s), elapsed_s);
        *slot_moves = whole(clock->slot_origin - nearest(point.slot));
        *plane_moves = whole(nearest(point.plane) - clock->plane_origin);
    } else {
        /* stands still */
    }
}

static double until_edge(double cell, double rate) {
    double until = HUGE_VAL;
    if (rate > 0.0) {
        until = (nearest(cell) + 0.5 - cell) / rate;
    } else if (rate < 0.0) {
        until = (cell - (nearest(cell) - 0.5)) / -rate;
    } else {
        /* never */
    }
    return until;
}

static double least(double a, double b) { return a < b ? a : b; }

/* When the overhead point next reaches the edge of its cell: in this piece of its track, or in a later one. */
static double next_crossing(const sky_move_clock *clock, double elapsed_s) {
    double time_s = elapsed_s, crossing_s = HUGE_VAL;
    uint32_t piece = piece_at(clock, elapsed_s);
    bool going = true;
    while (going) {
        const double end_s = piece < clock->knot_count ? clock->knots[piece].time_s : HUGE_VAL;
        const overhead point = overhead_in(clock, piece, time_s);
        crossing_s = time_s + least(until_edge(point.plane, point.plane_rate), until_edge(point.slot, point.slot_rate));
        going = crossing_s > end_s && piece < clock->knot_count;
        time_s = end_s;
        piece++;
    }
    return crossing_s;
}

/* When an edge of the cell is next reached, to within rounding. */
static double next_edge(const sky_move_clock *clock, double now_s) {
    const double elapsed_s = elapsed_at(clock, now_s);
    double next_s = HUGE_VAL;
    if (clock->by == SKY_BY_PERIODS) {
        if (clock->slot_period_s < HUGE_VAL) {
            next_s = (floor(elapsed_s / clock->slot_period_s) + 1.0) * clock->slot_period_s;
        }
        if (clock->plane_period_s < HUGE_VAL) {
            next_s = least(next_s, (floor(elapsed_s / clock->plane_period_s) + 1.0) * clock->plane_period_s);
        }
    } else {
        next_s = next_crossing(clock, elapsed_s);
    }
    return clock->epoch_s + next_s / clock->time_scale;
}

/* The first microsecond at which the count has changed. Rounding may put an edge a little off the crossing: it is looked for
 * around it, and if it is not there (both edges nearly at once), at the next edge. */
static sky_us next_move(const sky_move_clock *clock, sky_us now, int32_t slot_moves, int32_t plane_moves) {
    enum { EDGES = 8, BEFORE_US = 3, AROUND_US = 12 };
    sky_us from = now, found = SKY_NEVER;
    bool going = clock->by != SKY_STANDS_STILL && clock->time_scale > 0.0;
    for (uint32_t edge = 0; edge < EDGES && going; edge++) {
        const double edge_us = next_edge(clock, seconds(from)) * 1e6;
        going = edge_us < 9e18 && edge_us > -9e18;
        if (going) {
            sky_us time = (sky_us)edge_us - BEFORE_US;
            if (time <= from) {
                time = from + 1;
            }
            for (uint32_t step = 0; step < AROUND_US && going; step++) {
                int32_t slots, planes;
                moves_at(clock, seconds(time), &slots, &planes);
                if (slots != slot_moves || planes != plane_moves) {
                    found = time;
                    going = false;
                }
                time++;
            }
            from = time;
        }
    }
    return found;
}

void sky_clock_moves(const sky_move_clock *clock, sky_us now, int32_t *slot_moves, int32_t *plane_moves) {
    moves_at(clock, seconds(now), slot_moves, plane_moves);
}

sky_counted sky_clock_counted(void *context, sky_us now) {
    const sky_move_clock *const clock = context;
    sky_counted counted;
    moves_at(clock, seconds(now), &counted.slot_moves, &counted.plane_moves);
    counted.next_us = next_move(clock, now, counted.slot_moves, counted.plane_moves);
    return counted;
}

void sky_clock_by_periods(sky_move_clock *clock, double epoch_s, double time_scale, double slot_period_s,
                          double plane_period_s) {
    (void)memset(clock, 0, sizeof *clock);
    clock->by = SKY_BY_PERIODS;
    clock->epoch_s = epoch_s;
    clock->time_scale = time_scale;
    clock->slot_period_s = slot_period_s;
    clock->plane_period_s = plane_period_s;
}

void sky_clock_by_track(sky_move_clock *clock, double epoch_s, double time_scale, const sky_knot *knots, uint32_t count,
                        double plane_rate, double slot_rate) {
    overhead point;
    (void)memset(clock, 0, sizeof *clock);
    clock->by = SKY_BY_OVERHEAD_POINT;
    clock->epoch_s = epoch_s;
    clock->time_scale = time_scale;
    clock->knots = knots;
    clock->knot_count = count;
    clock->plane_rate = plane_rate;
    clock->slot_rate = slot_rate;
    point = overhead_in(clock, piece_at(clock, 0.0), 0.0);
    clock->plane_origin = nearest(point.plane);
    clock->slot_origin = nearest(point.slot);
}

/* --- Presets: as constellation.orbit and visibility have them --- */

typedef struct {
    const char *name;
    double planes, slots, altitude_m, inclination_deg;
    bool by_periods;
} preset;

static const preset PRESETS[] = {
    {"testbed-19x5", 72, 22, 550000.0, 53.0, true}, {"paper-15x15", 15, 15, 550000.0, 53.0, true},
    {"starlink-a", 72, 22, 550000.0, 53.0, false},  {"starlink-b", 5, 75, 1275000.0, 81.0, false},
    {"kuiper-a", 34, 34, 630000.0, 51.9, false},    {"kuiper-b", 28, 28, 590000.0, 33.0, false},
};

static const double EPOCH_UNIX_S = 1735689600.0, EARTH_RADIUS_M = 6371000.0, EARTH_MU_M3_S2 = 3.986004418e14,
                    EARTH_J2 = 1.08262668e-3, EARTH_ROTATION_RAD_S = 7.292115146706979e-5,
                    WGS84_RADIUS_M = 6378137.0, WGS84_E2 = 0.0066943799901413165, WGS72_RADIUS_M = 6378135.0,
                    WGS72_J2 = 1.082616e-3, WGS72_J4 = -1.65597e-6, SIDEREAL_PER_CENTURY_S = 8640184.812866;

static double radians(double degrees) { return degrees * (PI / 180.0); }

typedef struct {
    double radius_m, period_s, node_rad_s, earth_rad_s, epoch_rad;
} orbit;

static orbit of_the_papers(const preset *its) {
    const double days = EPOCH_UNIX_S / 86400.0 + 2440587.5 - 2451545.0;
    orbit found;
    double motion, ratio;
    found.radius_m = EARTH_RADIUS_M + its->altitude_m;
    found.period_s = 2 * PI * sqrt(pow(found.radius_m, 3.0) / EARTH_MU_M3_S2);
    motion = 2 * PI / found.period_s;
    ratio = EARTH_RADIUS_M / found.radius_m;
    found.node_rad_s = -1.5 * EARTH_J2 * pow(ratio, 2.0) * motion * cos(radians(its->inclination_deg));
    found.earth_rad_s = EARTH_ROTATION_RAD_S;
    found.epoch_rad = fmod(2 * PI * (0.7790572732640 + 1.00273781191135448 * days), 2 * PI);
    return found;
}

/* The secular rates of SGP4 for a circular orbit without drag. */
static orbit of_sgp4(const preset *its) {
    const double inclination = radians(its->inclination_deg), cos2 = pow(cos(inclination), 2.0), cos4 = pow(cos2, 2.0);
    const double axis_m = WGS84_RADIUS_M + its->altitude_m, axis = axis_m / WGS72_RADIUS_M;
    const double xke = 60.0 / sqrt(pow(6378.135, 3.0) / 398600.8), motion = xke / pow(axis, 1.5);
    const double axis2 = pow(axis, 2.0);
    const double first = 1.5 * WGS72_J2 / axis2 * motion, second = 0.5 * first * WGS72_J2 / axis2;
    const double fourth = -0.46875 * WGS72_J4 / pow(axis, 4.0) * motion;
    const double anomaly = motion + 0.5 * first * (3 * cos2 - 1) + 0.0625 * second * (13 - 78 * cos2 + 137 * cos4);
    const double perigee = -0.5 * first * (1 - 5 * cos2) + 0.0625 * second * (7 - 114 * cos2 + 395 * cos4) +
                           fourth * (3 - 36 * cos2 + 49 * cos4);
    const double node = -first + 0.5 * second * (4 - 19 * cos2) + 2 * fourth * (3 - 7 * cos2);
    const double days = EPOCH_UNIX_S / 86400.0 + 2440587.5 - 2451545.0, centuries = days / 36525;
    double at_epoch_s = 67310.54841 + 86400.0 * fmod(days, 1.0), gain;
    orbit found;
    found.radius_m = axis_m * (1 - 0.75 * WGS72_J2 / axis2 * (3 * cos2 - 1));
    found.period_s = 2 * PI / ((anomaly + perigee) / 60);
    found.node_rad_s = node * cos(inclination) / 60;
    at_epoch_s += SIDEREAL_PER_CENTURY_S * days / 36525 + 0.093104 * pow(centuries, 2.0) - 6.2e-6 * pow(centuries, 3.0);
    found.epoch_rad = 2 * PI * fmod(at_epoch_s / 86400.0, 1.0);
    gain = SIDEREAL_PER_CENTURY_S + 2 * 0.093104 * 0.0 / 36525; /* the rate of J2000 */
    found.earth_rad_s = 2 * PI / 86400.0 * (1 + gain / 36525 / 86400.0);
    return found;
}

/* Argument of latitude where the climbing branch passes over the host, or comes nearest. */
static double overhead_argument(const preset *its, const orbit *flown, bool papers, double latitude_deg) {
    const double inclination = radians(its->inclination_deg), latitude = radians(latitude_deg);
    double sine;
    if (papers) {
        sine = sin(latitude) / sin(inclination);
    } else { /* where the normal meets the shell */
        const double normal_m = WGS84_RADIUS_M / sqrt(1 - WGS84_E2 * pow(sin(latitude), 2.0));
        const double out_m = normal_m * cos(latitude), north_m = normal_m * (1 - WGS84_E2) * sin(latitude);
        const double along_m = out_m * cos(latitude) + north_m * sin(latitude);
        const double up_m = sqrt(pow(along_m, 2.0) + pow(flown->radius_m, 2.0) - pow(out_m, 2.0) - pow(north_m, 2.0)) -
                            along_m;
        sine = (north_m + up_m * sin(latitude)) / flown->radius_m / sin(inclination);
    }
    return asin(sine < -1.0 ? -1.0 : (sine > 1.0 ? 1.0 : sine));
}

const char *sky_clock_by_preset(sky_move_clock *clock, sky_knot *knot, const char *name, int version, double epoch_s,
                                double time_scale, double latitude_deg, double longitude_deg) {
    const preset *its = NULL;
    bool papers;
    orbit flown;
    for (size_t i = 0; i < sizeof PRESETS / sizeof *PRESETS; i++) {
        if (strcmp(PRESETS[i].name, name) == 0) {
            its = &PRESETS[i];
        }
    }
    if (its == NULL || version < 1 || version > (its->by_periods ? 1 : 2)) {
        return "no such preset, or not in this version";
    }
    if (!(latitude_deg >= -90.0 && latitude_deg <= 90.0 && longitude_deg >= -180.0 && longitude_deg <= 360.0)) {
        return "latitude: expected -90 to 90 degrees, longitude -180 to 360";
    }
    papers = version == 1;
    flown = papers ? of_the_papers(its) : of_sgp4(its);
    {
        const double slot_period_s = flown.period_s / its->slots;
        const double plane_period_s = 2 * PI / its->planes / (flown.earth_rad_s - flown.node_rad_s);
        if (its->by_periods) {
            sky_clock_by_periods(clock, epoch_s, time_scale, slot_period_s, plane_period_s);
        } else {
            const double u = overhead_argument(its, &flown, papers, latitude_deg);
            const double from_node = atan2(cos(radians(its->inclination_deg)) * sin(u), cos(u));
            const double node = radians(longitude_deg) + flown.epoch_rad - from_node;
            knot->time_s = 0.0;
            knot->plane = node * its->planes / (2 * PI);
            knot->slot = u / (2 * PI) * its->slots;
            sky_clock_by_track(clock, epoch_s, time_scale, knot, 1, 1 / plane_period_s, -1 / slot_period_s);
        }
    }
    return NULL;
}
