#include "orbits.h"

#include <math.h>
#include <stddef.h>

#define PI 3.141592653589793
#define LIGHT_M_S 299792458.0

static double radians(double degrees) {
    return degrees * (PI / 180.0);
}

typedef struct {
    double x, y, z;
} vector;

static double dot(vector a, vector b) {
    return a.x * b.x + a.y * b.y + a.z * b.z;
}

static unsigned wrapped(int64_t value, unsigned modulus) {
    const int64_t rest = value % (int64_t)modulus;
    return (unsigned)(rest < 0 ? rest + (int64_t)modulus : rest);
}

/* Signed steps of a shortest way round a ring; exactly opposite counts as backwards. */
static int64_t steps(int64_t from, int64_t to, unsigned ring) {
    const int64_t ahead = wrapped(to - from, ring);
    return 2 * ahead >= (int64_t)ring ? ahead - (int64_t)ring : ahead;
}

/* --- Satellites --- */

static vector direction(const orbits *its, double argument_rad, double node_rad) {
    const double along = cos(argument_rad);
    const double across = sin(argument_rad) * cos(its->inclination_rad);
    const double c = cos(node_rad);
    const double s = sin(node_rad);
    const vector found = {c * along - s * across, s * along + c * across, sin(argument_rad) * sin(its->inclination_rad)};
    return found;
}

static double argument(const orbits *its, unsigned plane, double slot, double sky_s) {
    return 2.0 * PI * ((slot + its->plane[plane].ahead_slots) / its->slots + sky_s / its->period_s);
}

/* Where the satellite is, as a unit vector, in a grid that flies as if it were pushed. */
static vector satellite(const orbits *its, uint32_t address, orbits_moves pushed, double sky_s) {
    const unsigned plane = wrapped((int64_t)(address >> 12) - pushed.plane, its->planes);
    const unsigned slot = wrapped((int64_t)(address & 0xFFFU) + pushed.slot, its->slots);
    return direction(its, argument(its, plane, slot, sky_s), its->plane[plane].node_rad + its->node_rad_s * sky_s);
}

bool orbits_blocked(const orbits *its, uint32_t here, uint32_t there, orbits_moves pushed, double sky_s) {
    if (!(its->blocked_m > 0.0) || here >> 12 == there >> 12)
        return false;
    const vector one = satellite(its, here, pushed, sky_s);
    const vector other = satellite(its, there, pushed, sky_s);
    const vector apart = {one.x - other.x, one.y - other.y, one.z - other.z};
    return its->radius_m * sqrt(dot(apart, apart)) > its->blocked_m;
}

/* --- The ground --- */

bool orbits_place_is_on_earth(const orbits_place *place) {
    return place->latitude_deg >= -90.0 && place->latitude_deg <= 90.0 && place->longitude_deg >= -180.0 &&
           place->longitude_deg <= 360.0;
}

static vector unit(const orbits_place *place) {
    const double latitude = radians(place->latitude_deg);
    const double longitude = radians(place->longitude_deg);
    const vector found = {cos(latitude) * cos(longitude), cos(latitude) * sin(longitude), sin(latitude)};
    return found;
}

/* Where the plan's host is: great circles between its waypoints; before the first and after the last it stands still. */
static orbits_place host_at(const orbits *its, double sky_s) {
    unsigned after = 0;
    while (after < its->way_count && its->way[after].time_s <= sky_s)
        after++;
    if (after == 0 || after == its->way_count)
        return its->way[after == 0 ? 0 : after - 1].at;
    const orbits_waypoint *here = &its->way[after - 1];
    const orbits_waypoint *there = &its->way[after];
    const vector a = unit(&here->at);
    const vector b = unit(&there->at);
    const vector cross = {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
    const double angle = atan2(sqrt(dot(cross, cross)), dot(a, b));
    const double share = (sky_s - here->time_s) / (there->time_s - here->time_s);
    if (angle < 1e-9)
        return here->at;
    const double p = sin((1.0 - share) * angle);
    const double q = sin(share * angle);
    const vector at = {p * a.x + q * b.x, p * a.y + q * b.y, p * a.z + q * b.z};
    const orbits_place found = {atan2(at.z, hypot(at.x, at.y)) * (180.0 / PI), atan2(at.y, at.x) * (180.0 / PI)};
    return found;
}

/* Distance from the Earth's axis and, northward, from the plane of the equator. */
static void ground(const orbits *its, double latitude_rad, double *out_m, double *north_m) {
    const double sine = sin(latitude_rad);
    const double normal_m = its->earth_m / sqrt(1.0 - its->eccentricity2 * sine * sine);
    *out_m = normal_m * cos(latitude_rad);
    *north_m = normal_m * (1.0 - its->eccentricity2) * sine;
}

/* Argument of latitude where the climbing branch passes straight over a place, or comes nearest. */
static double overhead_argument(const orbits *its, double latitude_rad) {
    double out_m = 0.0;
    double north_m = 0.0;
    ground(its, latitude_rad, &out_m, &north_m);
    /* Where the normal meets the shell: up by `up_m`. */
    const double along_m = out_m * cos(latitude_rad) + north_m * sin(latitude_rad);
    const double up_m = sqrt(along_m * along_m + its->radius_m * its->radius_m - out_m * out_m - north_m * north_m) - along_m;
    const double sine = (north_m + up_m * sin(latitude_rad)) / its->radius_m / sin(its->inclination_rad);
    return asin(sine < -1.0 ? -1.0 : sine > 1.0 ? 1.0 : sine);
}

/* The cell overhead a place that stands still. */
static void cell_over(const orbits *its, const orbits_place *place, double sky_s, int64_t *plane, int64_t *slot) {
    const double u = overhead_argument(its, radians(place->latitude_deg));
    const double from_node = atan2(cos(its->inclination_rad) * sin(u), cos(u));
    const double node = radians(place->longitude_deg) + its->angle_rad - from_node - its->epoch_node_rad;
    const double turn_rad_s = its->angle_rad_s - its->node_rad_s;
    *plane = (int64_t)floor((node + turn_rad_s * sky_s) * its->planes / its->span_rad + 0.5);
    *slot = (int64_t)floor((u / (2.0 * PI) - sky_s / its->period_s) * its->slots - its->epoch_slots + 0.5);
}

/* --- Beams --- */

double orbits_beam_s(const orbits *its, uint32_t address, const orbits_place *place, orbits_moves clocked,
                     orbits_moves pushed, double sky_s) {
    const orbits_place at = place != NULL ? *place : host_at(its, sky_s);
    const double latitude = radians(at.latitude_deg);
    const double longitude = radians(at.longitude_deg) + its->angle_rad + its->angle_rad_s * sky_s;
    const vector up = {cos(latitude) * cos(longitude), cos(latitude) * sin(longitude), sin(latitude)};
    double out_m = 0.0;
    double north_m = 0.0;
    ground(its, latitude, &out_m, &north_m);
    const vector host_m = {out_m * cos(longitude), out_m * sin(longitude), north_m};
    const vector there = satellite(its, address, pushed, sky_s);
    const double r = its->radius_m;
    const double slant_m = sqrt(fmax(0.0, r * r + dot(host_m, host_m) - 2.0 * r * dot(there, host_m)));
    const double height_m = out_m * cos(latitude) + north_m * sin(latitude); /* of the horizon, above the Earth's centre */
    if ((r * dot(there, up) - height_m) / slant_m >= sin(radians(its->mask_deg)))
        return slant_m / LIGHT_M_S;
    /* By the offset from the cell overhead, as SkyMemory has it: a chord, seen from below. */
    int64_t plane = (int64_t)its->centre_plane + clocked.plane;
    int64_t slot = (int64_t)its->centre_slot - clocked.slot;
    if (place != NULL)
        cell_over(its, place, sky_s, &plane, &slot);
    const int64_t south = steps(plane + pushed.plane, (int64_t)(address >> 12), its->planes);
    const int64_t east = steps(slot - pushed.slot, (int64_t)(address & 0xFFFU), its->slots);
    const unsigned from = wrapped(plane, its->planes);
    const unsigned to = wrapped(plane + south, its->planes);
    const double u = overhead_argument(its, latitude);
    const vector one = direction(its, u, its->plane[from].node_rad);
    const double on = argument(its, to, (double)east, 0.0) - argument(its, from, 0.0, 0.0);
    const vector other = direction(its, u + on, its->plane[to].node_rad);
    const vector apart = {one.x - other.x, one.y - other.y, one.z - other.z};
    const double over_m = r - its->earth_m;
    return sqrt(over_m * over_m + r * r * dot(apart, apart) * its->earth_m / r) / LIGHT_M_S;
}
