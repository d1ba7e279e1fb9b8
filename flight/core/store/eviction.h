/* Which key a full memory lets go first: lru, lfuda, lrfu. Twin of skymemory.eviction.
 *
 * Keys are the shares of the memory, by number. Of lrfu the twin computes worths as floating point; here they are integers
 * with an exponent, rounded as IEEE 754 rounds doubles: see eviction.c for what may differ.
 */
#ifndef SKY_EVICTION_H
#define SKY_EVICTION_H

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "config.h"
#include "store/keymap.h"

/* mantissa · 2^exponent; the mantissa has 53 bits, or all is zero. */
typedef struct {
    uint64_t mantissa;
    int32_t exponent;
} sky_worth;

typedef struct {
    sky_worth rank;
    uint64_t stamp;     /* of equal ranks the lower stamp goes first */
    sky_worth before;   /* lrfu: worth of all uses but the last */
    uint64_t uses;      /* lfuda: how many; lrfu: the event of the last */
    uint32_t place;     /* in the heap, from 1; 0: not in it */
    uint32_t earlier, later; /* lrfu: neighbours among the recent keys */
    uint8_t state;      /* bits below */
} sky_ranked;

enum { SKY_IS_RANKED = 1, SKY_IS_RECENT = 2, SKY_IS_HELD = 4 };

typedef struct {
    sky_replacement kind;
    const sky_keymap *shares;
    sky_ranked *ranked; /* by share */
    uint32_t *heap;     /* heap[1 .. in_heap]: shares, the next victim first */
    uint32_t in_heap, count;
    uint64_t stamp;
    uint64_t age; /* lfuda */
    /* lrfu: */
    sky_keymap departed;
    sky_worth *departed_worth;
    uint64_t *departed_event;
    uint32_t recent_first, recent_last, recent_count;
    uint64_t events;
    sky_worth now;        /* the worth of a use now */
    uint64_t mean_return; /* in 2^-36 events */
} sky_eviction;

bool sky_eviction_new(sky_eviction *eviction, sky_arena *arena, const sky_config *config, const sky_keymap *shares);

void sky_eviction_noted(sky_eviction *eviction, uint32_t share);
void sky_eviction_used(sky_eviction *eviction, uint32_t share);
void sky_eviction_arrived(sky_eviction *eviction, uint32_t share);
/* Before the share leaves its map, or while it is pinned. */
void sky_eviction_gone(sky_eviction *eviction, uint32_t share, bool evicted);
void sky_eviction_hold(sky_eviction *eviction, uint32_t share);
void sky_eviction_free(sky_eviction *eviction, uint32_t share);
/* The next to be evicted but `but` (0: none) and what is held; 0: there is none. */
uint32_t sky_eviction_victim(const sky_eviction *eviction, uint32_t but);

/* All that are ranked, the next victim first. Sorts: not for every packet. Nothing may change meanwhile. */
typedef struct {
    uint32_t free_at, held_at, held_end, recent;
} sky_eviction_order;
void sky_eviction_order_begin(sky_eviction *eviction, sky_eviction_order *order);
uint32_t sky_eviction_order_next(const sky_eviction *eviction, sky_eviction_order *order);

#endif
