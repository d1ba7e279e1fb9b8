/* Where the chains of a hash table begin. It opens one bucket for each entry that comes (linear hashing, Litwin 1980): a table
 * with few entries touches little of its memory, and nobody waits while all of it is hashed again.
 */
#ifndef SKY_BUCKETS_H
#define SKY_BUCKETS_H

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"

typedef struct {
    uint32_t *first; /* of each chain; 0: it is empty */
    uint32_t open, most;
    uint32_t mask; /* 2^n - 1, for the least 2^n that is not below `open` */
} sky_buckets;

static inline bool sky_buckets_new(sky_buckets *buckets, sky_arena *arena, uint32_t entries) {
    buckets->most = entries > 0U ? entries : 1U;
    buckets->first = sky_take(arena, buckets->most, sizeof *buckets->first);
    buckets->open = 1U;
    buckets->mask = 0U;
    return buckets->first != NULL;
}

static inline uint32_t *sky_bucket(const sky_buckets *buckets, uint32_t hash) {
    const uint32_t at = hash & buckets->mask;
    return &buckets->first[at < buckets->open ? at : at & (buckets->mask >> 1)];
}

/* One bucket more, where the entries are more than the buckets: gives the chain that it parts, taken off its bucket. The caller
 * puts each of its entries back (sky_bucket). 0: there is none. */
static inline uint32_t sky_buckets_part(sky_buckets *buckets, uint32_t entries) {
    uint32_t chain = 0U;
    if (entries > buckets->open && buckets->open < buckets->most) {
        if (buckets->open > buckets->mask) {
            buckets->mask = buckets->mask * 2U + 1U;
        }
        uint32_t *parted = &buckets->first[buckets->open & (buckets->mask >> 1)];
        chain = *parted;
        *parted = 0U;
        buckets->open++;
    }
    return chain;
}

#endif
