/* The torus of satellites, by addresses as on the wire (shell 0: plane << 12 | slot). Twin of constellation.torus, without
 * gaps and seams. */
#ifndef SKY_TORUS_H
#define SKY_TORUS_H

#include <stdbool.h>
#include <stdint.h>

#define SKY_NOWHERE UINT32_MAX /* no address */

typedef struct {
    uint16_t planes, slots;
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

static inline bool sky_on_torus(sky_torus torus, uint32_t address) {
    return address >> 24 == 0U && sky_plane_of(address) < torus.planes && sky_slot_of(address) < torus.slots;
}

/* Position in plane-major order. */
static inline uint32_t sky_torus_index(sky_torus torus, uint32_t address) {
    return sky_plane_of(address) * torus.slots + sky_slot_of(address);
}

static inline uint32_t sky_torus_at(sky_torus torus, uint32_t index) {
    return index / torus.slots << 12 | index % torus.slots;
}

typedef enum { SKY_NORTH = 0, SKY_EAST = 1, SKY_SOUTH = 2, SKY_WEST = 3 } sky_direction;

static inline uint32_t sky_neighbour(sky_torus torus, uint32_t here, sky_direction direction) {
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

/* Signed links of a shortest way; exactly opposite on a ring counts as west or north. */
static inline void sky_delta(sky_torus torus, uint32_t here, uint32_t there, int32_t *slots, int32_t *planes) {
    const uint32_t east = sky_modulo((int64_t)sky_slot_of(there) - (int64_t)sky_slot_of(here), torus.slots);
    const uint32_t south = sky_modulo((int64_t)sky_plane_of(there) - (int64_t)sky_plane_of(here), torus.planes);
    *slots = (int32_t)east - (2U * east >= torus.slots ? (int32_t)torus.slots : 0);
    *planes = (int32_t)south - (2U * south >= torus.planes ? (int32_t)torus.planes : 0);
}

static inline uint32_t sky_hops(sky_torus torus, uint32_t here, uint32_t there) {
    int32_t slots, planes;
    sky_delta(torus, here, there, &slots, &planes);
    return (uint32_t)(slots < 0 ? -slots : slots) + (uint32_t)(planes < 0 ? -planes : planes);
}

typedef enum { SKY_NO_AXIS = 0, SKY_SLOT_AXIS = 1, SKY_PLANE_AXIS = 2 } sky_axis;

/* The next satellite of a packet for `there`; `here` where it has arrived. `came` matters to the alternate mode (true). */
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
        found = sky_neighbour(torus, here, planes > 0 ? SKY_SOUTH : SKY_NORTH);
    } else if (slots != 0) {
        found = sky_neighbour(torus, here, slots > 0 ? SKY_EAST : SKY_WEST);
    } else {
        /* arrived */
    }
    return found;
}

#endif
