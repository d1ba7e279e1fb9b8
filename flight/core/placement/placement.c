#include "placement/placement.h"

#include <string.h>

#include "wire/bytes.h"

bool sky_placements_new(sky_placements *placements, sky_arena *arena, const sky_config *config) {
    const size_t cells = (size_t)config->planes * config->slots;
    bool whole = true;
    placements->torus = sky_config_torus(config);
    placements->satellites = sky_satellites(placements->torus);
    placements->centre = (uint32_t)config->centre_plane << 12 | config->centre_slot;
    placements->slot_link_ps = config->slot_link_ps;
    placements->plane_link_ps = config->plane_link_ps;
    for (uint32_t i = 0; i < SKY_LAYOUTS; i++) {
        placements->layouts[i].cells = sky_take_shared(arena, cells, sizeof(sky_cell));
        whole = whole && placements->layouts[i].cells != NULL;
    }
    placements->seen = sky_take_shared(arena, cells, 1);
    placements->walk = sky_take_shared(arena, cells, sizeof *placements->walk);
    placements->by_delay = sky_take_shared(arena, cells, sizeof *placements->by_delay);
    placements->by_row = sky_take_shared(arena, config->planes, sizeof *placements->by_row);
    return whole && placements->by_row != NULL && placements->seen != NULL && placements->walk != NULL &&
           placements->by_delay != NULL;
}

/* --- Layouts --- */

static sky_box centred(uint32_t width, uint32_t height) {
    const sky_box box = {(uint16_t)width, (uint16_t)height, (uint16_t)(width / 2U), (uint16_t)((height - 1U) / 2U)};
    return box;
}

/* The nearly square box: columns of slots, rows of planes. */
static sky_box usual_box(uint32_t servers, sky_torus torus) {
    const uint32_t planes = torus.planes;
    uint32_t width = 1;
    while (width * width < servers) { /* 4,096 turns at most: a root is at most the larger side */
        width++;
    }
    if ((servers + planes - 1U) / planes > width) {
        width = (servers + planes - 1U) / planes;
    }
    if (width > torus.slots) {
        width = torus.slots;
    }
    return centred(width, (servers + width - 1U) / width);
}

/* Breadth-first from the centre over the links, to placements->walk: up to `most` cells; how many. */
static uint32_t walk(sky_placements *placements, sky_box box, uint32_t most) {
    static const int8_t dx[4] = {0, 1, 0, -1}, dy[4] = {-1, 0, 1, 0}; /* north, east, south, west */
    const sky_cell begin = {0, 0};
    uint32_t queued = 1;
    (void)memset(placements->seen, 0, (size_t)box.width * box.height);
    placements->seen[(uint32_t)box.north * box.width + box.west] = 1;
    placements->walk[0] = begin;
    /* The queue is the order itself: once `most` are queued the first ones are known. */
    for (uint32_t at = 0; at < queued && queued < most; at++) {
        const sky_cell cell = placements->walk[at];
        for (uint32_t way = 0; way < 4U && queued < most; way++) {
            const uint32_t column = sky_modulo((int64_t)cell.x + dx[way] + box.west, placements->torus.slots);
            const uint32_t row = sky_modulo((int64_t)cell.y + dy[way] + box.north, placements->torus.planes);
            if (column < box.width && row < box.height && placements->seen[row * box.width + column] == 0U) {
                const sky_cell next = {(int16_t)((int32_t)column - (int32_t)box.west),
                                       (int16_t)((int32_t)row - (int32_t)box.north)};
                placements->seen[row * box.width + column] = 1;
                placements->walk[queued] = next;
                queued++;
            }
        }
    }
    return queued;
}

static uint32_t apart(int16_t by) { return by < 0 ? (uint32_t)(-(int32_t)by) : (uint32_t)by; }

static bool goes_before(const sky_ranked_cell *a, const sky_ranked_cell *b) {
    return a->delay_ps != b->delay_ps ? a->delay_ps < b->delay_ps : a->step < b->step;
}

static void swap(sky_ranked_cell *a, sky_ranked_cell *b) {
    const sky_ranked_cell other = *a;
    *a = *b;
    *b = other;
}

static void sift(sky_ranked_cell *heap, uint32_t from, uint32_t count) {
    uint32_t at = from;
    bool done = false;
    while (!done && 2U * at + 1U < count) {
        uint32_t larger = 2U * at + 1U;
        if (larger + 1U < count && goes_before(&heap[larger], &heap[larger + 1U])) {
            larger++;
        }
        done = !goes_before(&heap[at], &heap[larger]);
        if (!done) {
            swap(&heap[at], &heap[larger]);
            at = larger;
        }
    }
}

/* Sorted as a heap: no recursion, no worst case. */
static void rank_cells(sky_placements *placements) {
    const uint32_t count = walk(placements, centred(placements->torus.slots, placements->torus.planes), UINT32_MAX);
    sky_ranked_cell *const cells = placements->by_delay;
    for (uint32_t i = 0; i < count; i++) {
        const sky_cell cell = placements->walk[i];
        cells[i].delay_ps = apart(cell.x) * placements->slot_link_ps + apart(cell.y) * placements->plane_link_ps;
        cells[i].step = i;
        cells[i].cell = cell;
    }
    for (uint32_t at = count / 2U; at > 0U; at--) {
        sift(cells, at - 1U, count);
    }
    for (uint32_t left = count; left > 1U; left--) {
        swap(&cells[0], &cells[left - 1U]);
        sift(cells, 0, left - 1U);
    }
    placements->ranked = true;
}

/* The rank of a column or row in the order in which centred boxes grow: a box of n has just those of ranks below n. */
static uint32_t column_rank(int16_t x) { return x < 0 ? 2U * apart(x) - 1U : 2U * apart(x); }
static uint32_t row_rank(int16_t y) { return y > 0 ? 2U * apart(y) - 1U : 2U * apart(y); }

/* The least box of at least `servers` of the `near` nearest cells: the least area, then the squarest, then the narrowest. */
static sky_box least_box(const sky_placements *placements, uint32_t servers, uint32_t near) {
    const uint32_t slots = placements->torus.slots, planes = placements->torus.planes;
    uint8_t *const is_near = placements->seen; /* by ranks of row and column */
    uint16_t *const by_row = placements->by_row;
    uint32_t best_width = 0, best_height = 0;
    (void)memset(is_near, 0, (size_t)slots * planes);
    (void)memset(by_row, 0, (size_t)planes * sizeof *by_row);
    for (uint32_t i = 0; i < near; i++) {
        const sky_cell cell = placements->by_delay[i].cell;
        is_near[row_rank(cell.y) * slots + column_rank(cell.x)] = 1;
    }
    for (uint32_t width = 1; width <= slots; width++) {
        /* How many rows the box needs with so many columns. */
        uint32_t held = 0, height = 0;
        for (uint32_t row = 0; row < planes; row++) {
            by_row[row] = (uint16_t)(by_row[row] + is_near[row * slots + width - 1U]);
        }
        while (held < servers && height < planes) {
            held += by_row[height];
            height++;
        }
        if (held >= servers) {
            const uint32_t area = width * height, best = best_width * best_height;
            const uint32_t long_by = width > height ? width - height : height - width;
            const uint32_t best_by = best_width > best_height ? best_width - best_height : best_height - best_width;
            if (best == 0U || area < best || (area == best && long_by < best_by)) {
                best_width = width;
                best_height = height;
            }
        }
    }
    return centred(best_width, best_height);
}

static bool in_box(sky_box box, sky_cell cell) {
    return cell.x >= -(int32_t)box.west && cell.x < (int32_t)box.width - (int32_t)box.west &&
           cell.y >= -(int32_t)box.north && cell.y < (int32_t)box.height - (int32_t)box.north;
}

static void cheapest(sky_placements *placements, sky_layout *layout) {
    const sky_ranked_cell *const cells = placements->by_delay;
    const uint32_t all = (uint32_t)placements->torus.planes * placements->torus.slots;
    uint32_t near = layout->servers, taken = 0;
    if (!placements->ranked) {
        rank_cells(placements);
    }
    while (near < all && cells[near].delay_ps == cells[layout->servers - 1U].delay_ps) {
        near++;
    }
    layout->box = least_box(placements, layout->servers, near);
    for (uint32_t i = 0; i < near && taken < layout->servers; i++) {
        const sky_cell cell = cells[i].cell;
        if (in_box(layout->box, cell)) {
            layout->cells[taken] = cell;
            taken++;
        }
    }
}

static void row_by_row(sky_layout *layout) {
    for (uint32_t k = 0; k < layout->servers; k++) {
        layout->cells[k].x = (int16_t)((int32_t)(k % layout->box.width) - (int32_t)layout->box.west);
        layout->cells[k].y = (int16_t)((int32_t)(k / layout->box.width) - (int32_t)layout->box.north);
    }
}

/* The box around the cells of a walk. */
static sky_box around(const sky_cell *cells, uint32_t count) {
    int32_t west = 0, east = 0, north = 0, south = 0;
    sky_box box;
    for (uint32_t i = 0; i < count; i++) {
        west = cells[i].x < west ? cells[i].x : west;
        east = cells[i].x > east ? cells[i].x : east;
        north = cells[i].y < north ? cells[i].y : north;
        south = cells[i].y > south ? cells[i].y : south;
    }
    box.width = (uint16_t)(east - west + 1);
    box.height = (uint16_t)(south - north + 1);
    box.west = (uint16_t)-west;
    box.north = (uint16_t)-north;
    return box;
}

static void lay_out(sky_placements *placements, sky_layout *layout) {
    const uint32_t servers = layout->servers;
    layout->box = usual_box(servers, placements->torus);
    if (layout->strategy == SKY_COST) {
        cheapest(placements, layout);
    } else if (layout->strategy == SKY_ROTATION || layout->strategy == SKY_BASELINE) {
        row_by_row(layout);
    } else {
        const bool whole = layout->strategy == SKY_HOP;
        (void)walk(placements, whole ? centred(placements->torus.slots, placements->torus.planes) : layout->box, servers);
        (void)memcpy(layout->cells, placements->walk, servers * sizeof *layout->cells);
        if (whole) {
            layout->box = around(layout->cells, servers);
        }
    }
}

const sky_layout *sky_layout_of(sky_placements *placements, uint32_t code, uint32_t servers) {
    static const int8_t south[SKY_DISPLACEMENTS] = {0, 1, -1, 2, -2, 3, -3, 5, -5, 8, -8, 12, -12, 18, -18};
    const uint32_t strategy = code & SKY_STRATEGY_BITS, displacement = code >> SKY_DISPLACEMENT_AT;
    sky_layout *layout = NULL;
    if (strategy < SKY_ROTATION || strategy > SKY_BASELINE || displacement >= SKY_DISPLACEMENTS || servers < 1U ||
        servers > placements->satellites) {
        return NULL;
    }
    placements->asked++;
    for (uint32_t i = 0; i < SKY_LAYOUTS && layout == NULL; i++) {
        sky_layout *const known = &placements->layouts[i];
        if (known->servers == servers && known->strategy == strategy && known->displaced == south[displacement]) {
            layout = known;
        }
    }
    if (layout == NULL) {
        layout = &placements->layouts[0]; /* the one not asked for longest; those not in use were never asked for */
        for (uint32_t i = 1; i < SKY_LAYOUTS; i++) {
            if (placements->layouts[i].used < layout->used) {
                layout = &placements->layouts[i];
            }
        }
        layout->servers = servers;
        layout->strategy = strategy;
        layout->displaced = south[displacement];
        lay_out(placements, layout);
    }
    layout->used = placements->asked;
    return layout;
}

/* --- Where chunks are --- */

bool sky_layout_migrates(const sky_layout *layout) {
    return layout->strategy != SKY_HOP && layout->strategy != SKY_BASELINE;
}

uint32_t sky_centre_at(const sky_placements *placements, sky_moves now) {
    return sky_wrap(placements->torus, (int64_t)sky_plane_of(placements->centre) + now.plane,
                    (int64_t)sky_slot_of(placements->centre) - now.slot);
}

uint32_t sky_centre_of(const sky_placements *placements, const sky_layout *layout, sky_moves set, sky_moves now) {
    uint32_t centre = placements->centre;
    if (sky_layout_migrates(layout)) {
        centre = sky_centre_at(placements, now);
    } else if (layout->strategy == SKY_HOP) {
        centre = sky_centre_at(placements, set);
    } else {
        /* baseline: the first */
    }
    return sky_wrap(placements->torus, (int64_t)sky_plane_of(centre) + layout->displaced, sky_slot_of(centre));
}

uint32_t sky_locate(const sky_placements *placements, const sky_layout *layout, uint32_t server, sky_moves set,
                    sky_moves now, uint32_t replica) {
    const sky_box box = layout->box;
    const int64_t west = box.west, north = box.north;
    uint32_t centre;
    int64_t x, y;
    if (server >= layout->servers || replica >= (uint32_t)box.width * box.height) {
        return SKY_NOWHERE;
    }
    x = layout->cells[server].x;
    y = layout->cells[server].y;
    if (replica != 0U) { /* a shift within the box: down the rows first, each shifted by half the box */
        const uint32_t across = replica / box.height, down = replica % box.height;
        x = (int64_t)sky_modulo(x + across + (int64_t)down * (box.width / 2U) + west, box.width) - west;
        y = (int64_t)sky_modulo(y + down + north, box.height) - north;
    }
    if (sky_layout_migrates(layout)) {
        x = (int64_t)sky_modulo(x + now.slot - set.slot + west, box.width) - west;
        y = (int64_t)sky_modulo(y - now.plane + set.plane + north, box.height) - north;
    }
    centre = sky_centre_of(placements, layout, set, now);
    return sky_living(placements->torus,
                      sky_wrap(placements->torus, sky_plane_of(centre) + y, sky_slot_of(centre) + x));
}

uint32_t sky_locate_copy(sky_placements *placements, const uint8_t *tag, sky_moves now, uint32_t replica) {
    const sky_layout *const layout = sky_layout_of(placements, tag[4], sky_load16(tag));
    const sky_moves set = {sky_load32s(tag + 8), sky_load32s(tag + 12)};
    const uint32_t number = sky_load16(tag + 2);
    return layout == NULL || number == 0U ? SKY_NOWHERE
                                          : sky_locate(placements, layout, number - 1U, set, now, replica);
}

uint32_t sky_locate_tag(sky_placements *placements, const uint8_t *tag, sky_moves now) {
    return sky_locate_copy(placements, tag, now, tag[5]);
}

static uint32_t common(uint32_t a, uint32_t b) {
    while (b != 0U) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static uint32_t steps(uint32_t side, uint32_t ring) { return ring / common(side, ring); }

uint32_t sky_all_places(const sky_placements *placements, const sky_layout *layout) {
    return sky_layout_migrates(layout) ? steps(layout->box.width, placements->torus.slots) *
                                             steps(layout->box.height, placements->torus.planes)
                                       : 1U;
}

/* `from` and `step` sides further on. Once round both the box and the ring (`turn`) is the same place: that much less where
 * 32 bits are too few. */
static int32_t onward(int32_t from, uint32_t side, uint32_t step, uint32_t turn) {
    const int64_t found = (int64_t)from + (int64_t)side * step;
    return (int32_t)(found > INT32_MAX ? found - (int64_t)side * turn : found);
}

sky_moves sky_all_places_at(const sky_placements *placements, const sky_layout *layout, sky_moves set, uint32_t n) {
    sky_moves found = set;
    if (sky_layout_migrates(layout)) {
        const uint32_t across = steps(layout->box.width, placements->torus.slots);
        const uint32_t down = steps(layout->box.height, placements->torus.planes);
        found.slot = onward(set.slot, layout->box.width, n % across, across);
        found.plane = onward(set.plane, layout->box.height, n / across, down);
    }
    return found;
}
