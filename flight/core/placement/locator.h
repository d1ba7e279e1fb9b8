/* The moves of the box as this satellite counts them, and where chunks belong at them.
 *
 * Twin of skymemory.protocol.clock.Locator. What the clock counts comes from the caller (sky_clock of the configuration);
 * what operators add to it is kept here.
 */
#ifndef SKY_LOCATOR_H
#define SKY_LOCATOR_H

#include <stdbool.h>

#include "config.h"
#include "placement/placement.h"
#include "satellite.h"
#include "throttle.h"

#define SKY_MOST_PUSHED_AT_ONCE 10000
#define SKY_MOST_PUSHED 1000000
#define SKY_MOST_EARLIER 256U /* moves that sky_moves_since looks back one by one */
#define SKY_REMEMBERED_HOMES 64U /* a power of two */

typedef struct {
    uint8_t tag[16];
    uint32_t home; /* SKY_NOWHERE: an impossible placement */
    bool known;
} sky_known_home;

typedef struct {
    const sky_config *config;
    sky_placements *placements;
    sky_moves moves;
    sky_moves before;  /* the moves before the last change */
    sky_moves pushed;  /* what operators have added to the clock */
    sky_us next_move;  /* SKY_NEVER: none */
    sky_throttle pushing;
    sky_known_home homes[SKY_REMEMBERED_HOMES];
} sky_locator;

/* With its own placements from the arena; false: no room. */
bool sky_locator_new(sky_locator *locator, sky_arena *arena, const sky_config *config, sky_us now);

/* Whether sky_locator_push may follow: not too far in all, not more than `most` at once, not too often. A push that
 * changes nothing always may. */
bool sky_locator_may_push(sky_locator *locator, sky_moves pushed, sky_us now, int32_t most);
/* Sets what is added to the clock. It counts from the next sky_locator_follow. */
void sky_locator_push(sky_locator *locator, sky_moves pushed);
/* Brings the moves up to date; whether they changed. */
bool sky_locator_follow(sky_locator *locator, sky_us now);
/* The mean of the next two times between moves; SKY_NEVER: the box stands still. */
sky_us sky_locator_interval(const sky_locator *locator, sky_us now);
/* The moves at another time, with what is pushed now. */
sky_moves sky_locator_moves_at(const sky_locator *locator, sky_us time);
/* Whether a sender that counts these moves is behind this satellite. */
bool sky_locator_is_past(const sky_locator *locator, sky_moves moves);

/* The satellite where a chunk of this placement tag (16 bytes, as in its reference) belongs now; SKY_NOWHERE: its
 * placement is impossible. */
uint32_t sky_locator_home_of_tag(sky_locator *locator, const uint8_t *tag);
/* The same, of a whole chunk reference (72 bytes). */
uint32_t sky_locator_home(sky_locator *locator, const uint8_t *ref);

/* Counts of moves that cover every satellite where a chunk set at `set` can have been left, as
 * MoveClock.moves_since: those since then, the latest first; where these are too many, or unknown because operators have
 * pushed the box, the count of now and those of all places where the chunk can ever be. Begin, then `next` until it says
 * false. Walks the clock back, at most 256 moves: not for every packet. */
typedef struct {
    sky_moves found[SKY_MOST_EARLIER + 1U]; /* those since, the latest first; or that of now alone */
    uint32_t count, given;
    uint32_t all, all_given; /* how many of all places follow */
    sky_moves set;
    const sky_layout *layout;
} sky_moves_since;

void sky_moves_since_begin(sky_moves_since *since, const sky_locator *locator, const sky_layout *layout, sky_moves set,
                           sky_us now);
bool sky_moves_since_next(sky_moves_since *since, const sky_locator *locator, sky_moves *moves);

#endif
