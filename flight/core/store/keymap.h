/* A map of keys of 32 bytes in the order in which they came, in a pool of fixed size. The twin of Python's dict and
 * OrderedDict where these name something by its key.
 *
 * It knows entries by number, from 1; their values are in arrays of the user's own (of capacity + 1). Memory that no entry
 * has used is never touched.
 */
#ifndef SKY_KEYMAP_H
#define SKY_KEYMAP_H

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "store/buckets.h"

typedef struct {
    uint8_t key[32];
    uint32_t chain;        /* next in its bucket; next free entry */
    uint32_t older, newer; /* neighbours in the order */
} sky_keymap_node;

typedef struct {
    sky_keymap_node *nodes; /* 1 to capacity */
    sky_buckets buckets;
    uint64_t seed[2];
    uint32_t capacity;
    uint32_t count;
    uint32_t touched, freed; /* entries used so far; the first free one among them */
    uint32_t first, last;    /* the oldest and the newest entry; 0: none */
} sky_keymap;

bool sky_keymap_new(sky_keymap *map, sky_arena *arena, uint32_t capacity);
/* 0: not there. */
uint32_t sky_keymap_find(const sky_keymap *map, const uint8_t *key);
/* A key that is not there, as the newest; 0: full. */
uint32_t sky_keymap_add(sky_keymap *map, const uint8_t *key);
void sky_keymap_remove(sky_keymap *map, uint32_t entry);
/* As if it had just come. */
void sky_keymap_to_end(sky_keymap *map, uint32_t entry);
static inline const uint8_t *sky_keymap_key(const sky_keymap *map, uint32_t entry) { return map->nodes[entry].key; }
static inline uint32_t sky_keymap_newer(const sky_keymap *map, uint32_t entry) { return map->nodes[entry].newer; }
static inline uint32_t sky_keymap_older(const sky_keymap *map, uint32_t entry) { return map->nodes[entry].older; }

#endif
