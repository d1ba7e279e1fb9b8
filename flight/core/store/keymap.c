#include "store/keymap.h"

#include <string.h>

#include "store/hash.h"

bool sky_keymap_new(sky_keymap *map, sky_arena *arena, uint32_t capacity) {
    map->nodes = sky_take(arena, (size_t)capacity + 1U, sizeof *map->nodes);
    const bool whole = sky_buckets_new(&map->buckets, arena, capacity);
    map->seed[0] = arena->hash_seed[0];
    map->seed[1] = arena->hash_seed[1];
    map->capacity = capacity;
    return whole && map->nodes != NULL;
}

static uint32_t *bucket_of(const sky_keymap *map, const uint8_t *key) {
    return sky_bucket(&map->buckets, sky_hash_key(map->seed, key, 0U));
}

static void chain_up(sky_keymap *map, uint32_t entry) {
    uint32_t *const bucket = bucket_of(map, map->nodes[entry].key);
    map->nodes[entry].chain = *bucket;
    *bucket = entry;
}

uint32_t sky_keymap_find(const sky_keymap *map, const uint8_t *key) {
    uint32_t entry = map->count == 0U ? 0U : *bucket_of(map, key);
    while (entry != 0U && memcmp(map->nodes[entry].key, key, 32) != 0) {
        entry = map->nodes[entry].chain;
    }
    return entry;
}

static void append(sky_keymap *map, uint32_t entry) {
    map->nodes[entry].older = map->last;
    map->nodes[entry].newer = 0;
    if (map->last != 0U) {
        map->nodes[map->last].newer = entry;
    } else {
        map->first = entry;
    }
    map->last = entry;
}

static void detach(sky_keymap *map, uint32_t entry) {
    const uint32_t older = map->nodes[entry].older, newer = map->nodes[entry].newer;
    if (older != 0U) {
        map->nodes[older].newer = newer;
    } else {
        map->first = newer;
    }
    if (newer != 0U) {
        map->nodes[newer].older = older;
    } else {
        map->last = older;
    }
}

uint32_t sky_keymap_add(sky_keymap *map, const uint8_t *key) {
    uint32_t entry = map->freed;
    if (entry != 0U) {
        map->freed = map->nodes[entry].chain;
    } else if (map->touched < map->capacity) {
        map->touched++;
        entry = map->touched;
    } else {
        return 0;
    }
    (void)memcpy(map->nodes[entry].key, key, 32);
    append(map, entry);
    map->count++;
    uint32_t parted = sky_buckets_part(&map->buckets, map->count);
    while (parted != 0U) {
        const uint32_t next = map->nodes[parted].chain;
        chain_up(map, parted);
        parted = next;
    }
    chain_up(map, entry);
    return entry;
}

void sky_keymap_remove(sky_keymap *map, uint32_t entry) {
    uint32_t *link = bucket_of(map, map->nodes[entry].key);
    while (*link != entry) {
        link = &map->nodes[*link].chain;
    }
    *link = map->nodes[entry].chain;
    detach(map, entry);
    map->nodes[entry].chain = map->freed;
    map->freed = entry;
    map->count--;
}

void sky_keymap_to_end(sky_keymap *map, uint32_t entry) {
    if (map->last != entry) {
        detach(map, entry);
        append(map, entry);
    }
}
