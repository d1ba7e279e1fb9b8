/* Which satellite holds a chunk: a closed form of its placement tag and the moves of the box. Twin of skymemory.placement
 * (layout.py and locate.py).
 *
 * Cells of a layout are computed when it is first asked for, and kept for the last SKY_LAYOUTS pairs of strategy and number
 * of servers: by all satellites together that share memory.
 */
#ifndef SKY_PLACEMENT_H
#define SKY_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "config.h"
#include "placement/torus.h"

enum { SKY_LAYOUTS = 16 };
enum { SKY_ROTATION = 1, SKY_HOP = 2, SKY_ROTATION_HOP = 3, SKY_COST = 4, SKY_BASELINE = 5 };
/* The upper four bits of a strategy on the wire displace the box: DISPLACEMENTS of skymemory.protocol.clock. */
enum { SKY_DISPLACEMENTS = 15, SKY_DISPLACEMENT_AT = 4, SKY_STRATEGY_BITS = 0xF };

typedef struct {
    int32_t slot, plane;
} sky_moves;

static inline bool sky_moves_equal(sky_moves a, sky_moves b) { return a.slot == b.slot && a.plane == b.plane; }
static inline int64_t sky_moves_sum(sky_moves moves) { return (int64_t)moves.slot + (int64_t)moves.plane; }

/* x slots east, y planes south of the centre. */
typedef struct {
    int16_t x, y;
} sky_cell;

typedef struct {
    uint16_t width, height, west, north; /* columns -west .. width - 1 - west, rows likewise */
} sky_box;

typedef struct {
    uint32_t servers; /* 0: not in use */
    uint32_t strategy; /* without the displacement */
    int32_t displaced; /* planes south */
    uint32_t used; /* when it was asked for last, to find the oldest */
    sky_box box;
    sky_cell *cells; /* of each server */
} sky_layout;

typedef struct {
    uint64_t delay_ps;
    uint32_t step; /* of the walk */
    sky_cell cell;
} sky_ranked_cell;

typedef struct {
    sky_torus torus;
    uint32_t satellites; /* without the gaps */
    uint32_t centre; /* at no moves */
    uint64_t slot_link_ps, plane_link_ps;
    uint32_t asked;
    sky_layout layouts[SKY_LAYOUTS];
    /* Scratch of one walk: */
    uint8_t *seen;
    sky_cell *walk;
    uint16_t *by_row;
    /* All cells by delay, nearest first, once `ranked`; equal ones in the order of the walk. */
    sky_ranked_cell *by_delay;
    bool ranked;
} sky_placements;

bool sky_placements_new(sky_placements *placements, sky_arena *arena, const sky_config *config);

/* By the strategy as on the wire. NULL: unknown, or more servers than satellites. Valid until the next call. */
const sky_layout *sky_layout_of(sky_placements *placements, uint32_t code, uint32_t servers);

/* The satellite that holds now what was set on `server` (from 0) at `set`, as this copy; SKY_NOWHERE: the box is too small
 * for so many copies, or has no such server. */
uint32_t sky_locate(const sky_placements *placements, const sky_layout *layout, uint32_t server, sky_moves set,
                    sky_moves now, uint32_t replica);
/* The same by a packed placement tag (16 bytes); SKY_NOWHERE: impossible. */
uint32_t sky_locate_tag(sky_placements *placements, const uint8_t *tag, sky_moves now);
/* The same as another copy. */
uint32_t sky_locate_copy(sky_placements *placements, const uint8_t *tag, sky_moves now, uint32_t replica);

/* The satellite overhead after these moves, and the centre of the box that holds what was set at `set`. */
uint32_t sky_centre_at(const sky_placements *placements, sky_moves now);
uint32_t sky_centre_of(const sky_placements *placements, const sky_layout *layout, sky_moves set, sky_moves now);
/* Whether chunks follow the overhead point. */
bool sky_layout_migrates(const sky_layout *layout);

/* How many counts of moves cover all satellites that can ever hold what was set at `set`, and the n-th of them (in the order
 * of moves_of_all_places; wrapped to 32 bits, which changes no place: give them to sky_locate only). */
uint32_t sky_all_places(const sky_placements *placements, const sky_layout *layout);
sky_moves sky_all_places_at(const sky_placements *placements, const sky_layout *layout, sky_moves set, uint32_t n);

#endif
