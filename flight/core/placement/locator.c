#include "placement/locator.h"

#include <string.h>

#include "wire/packet.h"

enum { PUSHES_AT_ONCE = 16, ROOM = SKY_MOST_EARLIER + 1 };
/* How far back to look for earlier moves: at first, doubled up to the longest. The twin begins with longer spans: that
 * decides nothing but how many steps the search takes. */
static const sky_us FIRST_SPAN_US = 1000000, LONGEST_SPAN_US = (sky_us)100000000 * 1000000;

static sky_counted counted(const sky_locator *locator, sky_us now) {
    sky_counted found = {0, 0, SKY_NEVER};
    if (locator->config->clock != NULL) {
        found = locator->config->clock(locator->config->clock_context, now);
    }
    return found;
}

static sky_moves with_pushed(const sky_locator *locator, sky_counted by_clock) {
    const sky_moves moves = {locator->pushed.slot + by_clock.slot_moves, locator->pushed.plane + by_clock.plane_moves};
    return moves;
}

bool sky_locator_new(sky_locator *locator, sky_arena *arena, const sky_config *config, sky_us now) {
    sky_counted by_clock;
    locator->config = config;
    locator->placements = sky_take_shared(arena, 1, sizeof *locator->placements);
    locator->pushed.slot = config->pushed_slot;
    locator->pushed.plane = config->pushed_plane;
    by_clock = counted(locator, now);
    locator->moves = with_pushed(locator, by_clock);
    locator->before = locator->moves;
    locator->next_move = by_clock.next_us;
    sky_throttle_begin(&locator->pushing, PUSHES_AT_ONCE, 0);
    if (locator->placements == NULL) { /* only counting: the placements' own pools count too */
        sky_placements counting;
        (void)memset(&counting, 0, sizeof counting);
        (void)sky_placements_new(&counting, arena, config);
        return false;
    }
    return sky_placements_new(locator->placements, arena, config);
}

static int32_t distance(int32_t a, int32_t b) { return a > b ? a - b : b - a; }

bool sky_locator_may_push(sky_locator *locator, sky_moves pushed, sky_us now, int32_t most) {
    bool may = sky_moves_equal(pushed, locator->pushed);
    if (!may && distance(pushed.slot, 0) <= SKY_MOST_PUSHED && distance(pushed.plane, 0) <= SKY_MOST_PUSHED &&
        distance(pushed.slot, locator->pushed.slot) <= most && distance(pushed.plane, locator->pushed.plane) <= most &&
        sky_throttle_is_open(&locator->pushing, now)) {
        sky_throttle_done(&locator->pushing, now);
        may = true;
    }
    return may;
}

void sky_locator_push(sky_locator *locator, sky_moves pushed) { locator->pushed = pushed; }

bool sky_locator_follow(sky_locator *locator, sky_us now) {
    const sky_counted by_clock = counted(locator, now);
    const sky_moves moves = with_pushed(locator, by_clock);
    const bool changed = !sky_moves_equal(moves, locator->moves);
    locator->next_move = by_clock.next_us;
    if (changed) {
        locator->before = locator->moves;
        locator->moves = moves;
        (void)memset(locator->homes, 0, sizeof locator->homes);
    }
    return changed;
}

sky_us sky_locator_interval(const sky_locator *locator, sky_us now) {
    sky_us interval = SKY_NEVER;
    if (locator->next_move != SKY_NEVER) {
        const sky_us following = counted(locator, locator->next_move).next_us;
        if (following != SKY_NEVER) {
            interval = (following - now) / 2;
        }
    }
    return interval;
}

sky_moves sky_locator_moves_at(const sky_locator *locator, sky_us time) {
    return with_pushed(locator, counted(locator, time));
}

bool sky_locator_is_past(const sky_locator *locator, sky_moves moves) {
    return sky_moves_sum(moves) < sky_moves_sum(locator->moves);
}

uint32_t sky_locator_home_of_tag(sky_locator *locator, const uint8_t *tag) {
    /* Values differ in their moves, servers in their number, copies in their replica: bytes 3, 5, 11, 15 and 1. */
    const uint32_t mixed = ((uint32_t)tag[3] * 37U + (uint32_t)tag[1] * 11U + tag[11] * 101U + tag[15] * 59U + tag[5]);
    sky_known_home *const known = &locator->homes[mixed & (SKY_REMEMBERED_HOMES - 1U)];
    if (!known->known || memcmp(known->tag, tag, sizeof known->tag) != 0) {
        (void)memcpy(known->tag, tag, sizeof known->tag);
        known->home = sky_locate_tag(locator->placements, tag, locator->moves);
        known->known = true;
    }
    return known->home;
}

uint32_t sky_locator_home(sky_locator *locator, const uint8_t *ref) {
    return sky_locator_home_of_tag(locator, ref + SKY_REF_TAG_AT);
}

/* --- Where a chunk can have been left --- */

static void reverse(sky_moves *moves, uint32_t low, uint32_t end) {
    while (low + 1U < end) {
        const sky_moves other = moves[low];
        end--;
        moves[low] = moves[end];
        moves[end] = other;
        low++;
    }
}

/* The counts before that of now to `since->found`, the latest first, from found[1] on: the twin's moves_before. They are met
 * in ascending order, in a ring: of more than the room the earliest are dropped. */
static void look_back(sky_moves_since *since, const sky_locator *locator, sky_us now) {
    const sky_moves moves = since->found[0];
    sky_us span = FIRST_SPAN_US, time;
    uint32_t met = 0;
    bool going = true;
    while (span < LONGEST_SPAN_US && going) {
        const sky_moves before = sky_locator_moves_at(locator, now - span);
        going = (int64_t)distance(moves.slot, before.slot) + distance(moves.plane, before.plane) <
                (int64_t)SKY_MOST_EARLIER;
        if (going) {
            span *= 2;
        }
    }
    time = now - span;
    going = true;
    while (time <= now && going) {
        const sky_counted by_clock = counted(locator, time);
        since->found[met % ROOM] = with_pushed(locator, by_clock);
        met++;
        going = by_clock.next_us > time;
        time = by_clock.next_us;
    }
    if (met <= ROOM) {
        reverse(since->found, 0, met);
        since->count = met;
    } else { /* the latest is right before the ring's seam: both parts turned round, it is first */
        reverse(since->found, 0, met % ROOM);
        reverse(since->found, met % ROOM, ROOM);
        since->count = ROOM;
    }
}

void sky_moves_since_begin(sky_moves_since *since, const sky_locator *locator, const sky_layout *layout, sky_moves set,
                           sky_us now) {
    uint32_t last, kept = 1;
    since->set = set;
    since->layout = layout;
    since->given = 0;
    since->all = 0;
    since->all_given = 0;
    since->found[0] = sky_locator_moves_at(locator, now);
    since->count = 1;
    if (counted(locator, now).next_us != SKY_NEVER) { /* else the box stands still: there is no other */
        look_back(since, locator, now);
    }
    last = since->count;
    while (last > 0U && !sky_moves_equal(since->found[last - 1U], set)) {
        last--;
    }
    if (last == 0U || locator->pushed.slot != 0 || locator->pushed.plane != 0) {
        since->count = 1; /* that of now, and then all places */
        since->all = sky_all_places(locator->placements, layout);
    } else {
        /* Down to the one of the setting, each once: a box that turns back has been at some twice. */
        for (uint32_t i = 1; i < last; i++) {
            bool twice = false;
            for (uint32_t j = 0; j < kept && !twice; j++) {
                twice = sky_moves_equal(since->found[i], since->found[j]);
            }
            if (!twice) {
                since->found[kept] = since->found[i];
                kept++;
            }
        }
        since->count = kept;
    }
}

bool sky_moves_since_next(sky_moves_since *since, const sky_locator *locator, sky_moves *moves) {
    bool more = true;
    if (since->given < since->count) {
        *moves = since->found[since->given];
        since->given++;
    } else if (since->all_given < since->all) {
        *moves = sky_all_places_at(locator->placements, since->layout, since->set, since->all_given);
        since->all_given++;
    } else {
        more = false;
    }
    return more;
}
