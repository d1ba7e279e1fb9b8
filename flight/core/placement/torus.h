/* The torus of satellites, by addresses as on the wire (shell 0: plane << 12 | slot). Twin of constellation.torus: there it
 * is said what gaps and a seam are. */
#ifndef SKY_TORUS_H
#define SKY_TORUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SKY_NOWHERE UINT32_MAX /* no address */

typedef struct {
    uint16_t planes, slots;
    uint16_t most_planes, most_slots; /* that a link over gaps may span; 0: one */
    bool seam;                        /* between the last plane and the first */
    const uint8_t *gaps;              /* by index: not 0 for a cell without a satellite; NULL: there are none */
} sky_torus;

static inline uint32_t sky_plane_of(uint32_t address) { return address >> 12 & 0xFFFU; }
static inline uint32_t sky_slot_of(uint32_t address) { return address & 0xFFFU; }

/* Never negative. */
static inline uint32_t sky_modulo(int64_t value, uint32_t modulus) {
    const int64_t rest = value % (int64_t)modulus;
    return (uint32_t)(rest < 0 ? rest + (int64_t)modulus : rest);
}

/* The satellite at these indices, which may lie beyond either end of their rings. */
static inline uint32_t sky_wrap(sky_torus torus, int64_t plane, int64_t slot) {
    return sky_modulo(plane, torus.planes) << 12 | sky_modulo(slot, torus.slots);
}

/* Position in plane-major order. */
static inline uint32_t sky_torus_index(sky_torus torus, uint32_t address) {
    return sky_plane_of(address) * torus.slots + sky_slot_of(address);
}

static inline bool sky_is_gap(sky_torus torus, uint32_t address) {
    return torus.gaps != NULL && torus.gaps[sky_torus_index(torus, address)] != 0U;
}

/* Whether there is a satellite of this address. */
static inline bool sky_on_torus(sky_torus torus, uint32_t address) {
    return address >> 24 == 0U && sky_plane_of(address) < torus.planes && sky_slot_of(address) < torus.slots &&
           !sky_is_gap(torus, address);
}

/* Who holds what belongs to a cell: its satellite; of a gap the next one ahead in its plane, and where the whole plane is
 * empty, in the next plane that is not. */
static inline uint32_t sky_living(sky_torus torus, uint32_t cell) {
    uint32_t found = cell;
    for (uint32_t planes = 0; planes < torus.planes && sky_is_gap(torus, found); planes++) {
        for (uint32_t slots = 0; slots < torus.slots && sky_is_gap(torus, found); slots++) {
            found = sky_wrap(torus, (int64_t)sky_plane_of(cell) + planes, (int64_t)sky_slot_of(cell) + slots);
        }
    }
    return found;
}

static inline uint32_t sky_satellites(sky_torus torus) {
    uint32_t count = (uint32_t)torus.planes * torus.slots;
    for (uint32_t index = 0; torus.gaps != NULL && index < (uint32_t)torus.planes * torus.slots; index++) {
        count -= torus.gaps[index] != 0U ? 1U : 0U;
    }
    return count;
}

static inline uint32_t sky_torus_at(sky_torus torus, uint32_t index) {
    return index / torus.slots << 12 | index % torus.slots;
}

typedef enum { SKY_NORTH = 0, SKY_EAST = 1, SKY_SOUTH = 2, SKY_WEST = 3 } sky_direction;

/* The cell next to this one. */
static inline uint32_t sky_next_cell(sky_torus torus, uint32_t here, sky_direction direction) {
    const int64_t plane = sky_plane_of(here), slot = sky_slot_of(here);
    uint32_t found;
    if (direction == SKY_NORTH) {
        found = sky_wrap(torus, plane - 1, slot);
    } else if (direction == SKY_EAST) {
        found = sky_wrap(torus, plane, slot + 1);
    } else if (direction == SKY_SOUTH) {
        found = sky_wrap(torus, plane + 1, slot);
    } else {
        found = sky_wrap(torus, plane, slot - 1);
    }
    return found;
}

/* The satellite at the other end of a link: over gaps the next living one. Where that is too far, and across a seam, there
 * is none: `here` itself, as on a ring of one. */
static inline uint32_t sky_neighbour(sky_torus torus, uint32_t here, sky_direction direction) {
    const bool by_plane = direction == SKY_NORTH || direction == SKY_SOUTH;
    const uint32_t most = by_plane ? torus.most_planes : torus.most_slots;
    uint32_t found = here, at = here, span = 0;
    bool going = true;
    while (going) {
        const uint32_t last = torus.planes - 1U;
        const bool across = torus.seam && ((direction == SKY_NORTH && sky_plane_of(at) == 0U) ||
                                           (direction == SKY_SOUTH && sky_plane_of(at) == last));
        at = sky_next_cell(torus, at, direction);
        span++;
        if (!across && !sky_is_gap(torus, at)) {
            found = at;
        }
        going = !across && sky_is_gap(torus, at) && span < most;
    }
    return found;
}

/* Signed links of a shortest way; exactly opposite on a ring counts as west or north. */
static inline void sky_delta(sky_torus torus, uint32_t here, uint32_t there, int32_t *slots, int32_t *planes) {
    const uint32_t east = sky_modulo((int64_t)sky_slot_of(there) - (int64_t)sky_slot_of(here), torus.slots);
    const uint32_t south = sky_modulo((int64_t)sky_plane_of(there) - (int64_t)sky_plane_of(here), torus.planes);
    *slots = (int32_t)east - (2U * east >= torus.slots ? (int32_t)torus.slots : 0);
    if (torus.seam) {
        *planes = (int32_t)sky_plane_of(there) - (int32_t)sky_plane_of(here);
    } else {
        *planes = (int32_t)south - (2U * south >= torus.planes ? (int32_t)torus.planes : 0);
    }
}

/* Where there are no gaps. */
static inline uint32_t sky_hops(sky_torus torus, uint32_t here, uint32_t there) {
    int32_t slots, planes;
    sky_delta(torus, here, there, &slots, &planes);
    return (uint32_t)(slots < 0 ? -slots : slots) + (uint32_t)(planes < 0 ? -planes : planes);
}

typedef enum { SKY_NO_AXIS = 0, SKY_SLOT_AXIS = 1, SKY_PLANE_AXIS = 2 } sky_axis;

/* The next cell of a packet for `there`; `here` where it has arrived. `came` matters to the alternate mode (true). Over gaps
 * it need not be a satellite: see sky_router_next. */
static inline uint32_t sky_next_hop(sky_torus torus, uint32_t here, uint32_t there, bool alternate, sky_axis came) {
    int32_t slots, planes;
    bool by_plane;
    uint32_t found = here;
    sky_delta(torus, here, there, &slots, &planes);
    by_plane = planes != 0;
    if (slots != 0 && planes != 0 && alternate) {
        const int32_t far_slots = slots < 0 ? -slots : slots, far_planes = planes < 0 ? -planes : planes;
        if (came != SKY_NO_AXIS) {
            by_plane = came == SKY_SLOT_AXIS;
        } else if (far_slots != far_planes) {
            by_plane = far_planes > far_slots;
        } else {
            by_plane = (slots > 0) != (planes > 0); /* by quadrant: the diagonals spread over the four links too */
        }
    }
    if (by_plane) {
        found = sky_next_cell(torus, here, planes > 0 ? SKY_SOUTH : SKY_NORTH);
    } else if (slots != 0) {
        found = sky_next_cell(torus, here, slots > 0 ? SKY_EAST : SKY_WEST);
    } else {
        /* arrived */
    }
    return found;
}

#endif
