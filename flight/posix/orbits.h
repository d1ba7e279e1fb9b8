/* Real orbits, as far as a host's share needs them: how long light takes by a beam, and which links pass through the Earth.
 * Twin of constellation.sight.OrbitSight and PlaceSight: the same closed forms, so there is no table that could end.
 */
#ifndef SKY_POSIX_ORBITS_H
#define SKY_POSIX_ORBITS_H

#include <stdbool.h>
#include <stdint.h>

/* Of one plane at the epoch: right ascension of its node, and by how much its satellites are ahead. */
typedef struct {
    double node_rad, ahead_slots;
} orbits_plane;

typedef struct {
    double latitude_deg, longitude_deg;
} orbits_place;

typedef struct {
    double time_s;
    orbits_place at;
} orbits_waypoint;

/* Moves of a box; see placement/placement.h. */
typedef struct {
    int32_t slot, plane;
} orbits_moves;

typedef struct {
    unsigned planes, slots;
    unsigned centre_plane, centre_slot; /* of the box without moves: below it the plan's host is at the epoch */
    double radius_m, inclination_rad, period_s, node_rad_s;
    double span_rad, epoch_node_rad, epoch_slots; /* see Shell.span_rad and epoch_cell */
    orbits_plane *plane; /* NULL: the grid is no orbit */
    /* The Earth: its radius at the equator, the square of its eccentricity, and how far it has turned in the frame of the
     * satellites at the epoch and a second later. */
    double earth_m, eccentricity2, angle_rad, angle_rad_s;
    double mask_deg;      /* the least elevation */
    double blocked_m;     /* links between planes that are longer pass through the Earth; 0: none does */
    orbits_waypoint *way; /* of the plan's host, by ascending time; one: it stands still */
    unsigned way_count;
} orbits;

bool orbits_place_is_on_earth(const orbits_place *place);

/* Light's time between a satellite and a host on the ground, `sky_s` after the epoch as satellites fly. `place`: NULL for
 * the plan's host, around which the box is. `clocked` are the box's moves by the clock, `pushed` what operators add: the
 * grid is seen as if it had flown that far. For one below the mask, the paper's model: as if it could be reached. */
double orbits_beam_s(const orbits *its, uint32_t address, const orbits_place *place, orbits_moves clocked,
                     orbits_moves pushed, double sky_s);

/* Whether the Earth, or its atmosphere, is between two neighbours. */
bool orbits_blocked(const orbits *its, uint32_t here, uint32_t there, orbits_moves pushed, double sky_s);

#endif
